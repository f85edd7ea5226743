"""``driftpoint policy check``: test that a policy keeps the contract before it decides in a real job.

``python -m deploy.cli.policy`` computes the digest of a policy's answers in a fresh process. It reads the policy's
settings as YAML from stdin and writes the digest as the last line, since the user's code may print too."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Column

from deploy import console as output
from deploy.console import DebugOption, JsonOption
from deploy.exit_codes import EPILOG, OK
from deploy.format import plural
from policies.base import Policy
from policies.bounds import Bounds
from policies.conformance import ANY, BrokenError, Finding, digest, examine
from policies.registry import anchored, policy_from
from store.config_file import parse_value
from store.errors import ConfigError, DriftpointError, UsageError

PROMISE = "same answer in another process"
_MARK = "driftpoint-digest "
_PATIENCE = 300.0
_ODD_NUMBER = re.compile(r"[-+.]?\d")
app = typer.Typer(epilog=EPILOG, help="Check a policy outside of a job.", no_args_is_help=True)
_STYLES = {"holds": "green", "broken": "bold red", "not checked": "dim", "take note": "yellow"}
_NEEDS_AN_ANSWER = 3  # index of the check in a fresh process: after the policy was asked twice in this one


def check_in_fresh_process(settings: object, expected: str) -> Finding:
    """Check that a fresh process with another hash seed answers alike. Paths in ``settings`` must be absolute."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "deploy.cli.policy"],
            input=yaml.safe_dump(settings),
            capture_output=True,
            text=True,
            env=environment,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(PROMISE, "broken", f"another process did not answer within {_PATIENCE:.0f} s")
    last = done.stdout.splitlines()[-1:] or [""]
    if done.returncode != 0 or not last[0].startswith(_MARK):
        return Finding(PROMISE, "broken", f"the policy fails in another process: {done.stderr.strip()[-300:]}")
    if last[0] != _MARK + expected:
        why = f"with PYTHONHASHSEED={seed} it decides differently: does it iterate over a set, or keep state?"
        return Finding(PROMISE, "broken", why)
    return Finding(PROMISE, "holds", f"with another hash seed (PYTHONHASHSEED={seed})")


def main() -> None:
    """Run the fresh process."""
    try:
        value = digest(policy_from(parse_value(sys.stdin.read(), "the settings")))
    except BrokenError as error:
        sys.exit(str(error))
    sys.stdout.write(f"\n{_MARK}{value}\n")


@dataclass(frozen=True)
class PolicyToCheck:
    """A policy to check. ``settings`` as in a configuration, with the path of its file made absolute."""

    policy: Policy
    settings: object
    bounds: Bounds = ANY


def named(word: str, given: Sequence[str]) -> PolicyToCheck:
    """Find the policy of a name, ``module:Class``, ``file.py:Class`` or YAML file. Raises ConfigError, UsageError.

    ``given``: ``--set`` arguments."""
    if word.endswith((".yaml", ".yml")):
        if given:
            raise UsageError(f"--set applies to a policy's name or class: edit the parameters in {word} itself")
        from monitor.config.load import load_config

        config = load_config(Path(word))
        return PolicyToCheck(policy_from(config.policy), config.policy, config.limits())
    settings = anchored({"name": word, **parameters(given)} if given else word, Path.cwd())
    return PolicyToCheck(policy_from(settings), settings)  # type: ignore[arg-type]


def parameters(given: Sequence[str]) -> Mapping[str, Any]:
    """Parse ``--set`` arguments: ``key=value``, the value as JSON or YAML. Raises UsageError."""
    found: dict[str, Any] = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes key=value, such as --set k=4, not {one!r}")
        if key == "name" or key in found:
            what = "names the policy itself; pass it as POLICY" if key == "name" else "was given twice"
            raise UsageError(f"--set {one}: {key!r} {what}")
        found[key] = _value(one, value)
    return found


def _value(one: str, text: str) -> Any:
    """Parse JSON, in which 1e-3 is a number; else a YAML mapping or list, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    if _ODD_NUMBER.match(text):
        raise UsageError(
            f"--set {one}: write numbers as 12, 0.5 or 1e-3, and a text that begins with a digit as '\"1a\"'"
        )
    if not text.startswith(("{", "[")):
        return text
    try:
        return parse_value(text, "the value")
    except ConfigError as error:
        raise UsageError(f"--set {one}: neither JSON nor YAML: {error}") from error


PolicyArgument = Annotated[
    str,
    typer.Argument(
        metavar="POLICY", help="my.py:Mine, package.module:Mine, the name of a policy, or a YAML configuration."
    ),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a parameter of the policy; repeatable.")
]


@app.command(epilog=EPILOG)
def check(
    policy: PolicyArgument, *, set_: SetOption = None, json: JsonOption = False, _debug: DebugOption = False
) -> None:
    """Check that a policy keeps the contract, on synthetic models and runs, in this process and in a fresh one."""
    with output.stdout_to_stderr():
        found = named(policy, set_ or ())
        findings = list(examine(found.policy, found.bounds))
        findings.insert(_NEEDS_AN_ANSWER, _fresh_process_finding(found))
    name, holds = found.policy.name, all(one.outcome != "broken" for one in findings)
    body = {"policy": name, "holds": holds, "checks": list(map(asdict, findings))}
    output.answer(body, lambda console: _draw(console, name, findings), as_json=json)
    raise typer.Exit(OK if holds else DriftpointError.exit_code)


def _draw(console: Console, name: str, findings: Sequence[Finding]) -> None:
    rows = output.table(Column("Check", max_width=32), output.line(""), output.fold("Result"))
    for one in findings:
        rows.add_row(output.cell(one.promise), output.cell(one.outcome, _STYLES[one.outcome]), output.cell(one.detail))
    console.print(rows)
    console.print()
    console.print(output.cell(_verdict(name, findings)))


def _fresh_process_finding(found: PolicyToCheck) -> Finding:
    try:
        expected = digest(found.policy)
    except BrokenError:
        return Finding(PROMISE, "not checked", "it has no answer in this one")
    return check_in_fresh_process(found.settings, expected)


def _verdict(name: str, findings: Sequence[Finding]) -> str:
    broken = sum(one.outcome == "broken" for one in findings)
    if broken:
        return f"policy {name} fails {plural(broken, 'check')}: a job saves everything at such a decision"
    notes = sum(one.outcome == "take note" for one in findings)
    return f"policy {name}: no check failed" + (f"; {plural(notes, 'thing')} to note" if notes else "")


if __name__ == "__main__":
    main()
