"""``driftpoint policy check``: tries on a policy what every policy promises, before it decides in a real job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from deploy.cli import output
from deploy.cli.exit_codes import EPILOG, OK
from deploy.cli.options import DebugOption, JsonOption
from deploy.cli.policy_again import another_process
from deploy.cli.policy_settings import Named, named
from deploy.cli.text import plural
from policies.asked import BrokenError
from policies.contract import Finding, digest, examine
from store.errors import DriftpointError

app = typer.Typer(epilog=EPILOG, help="Look at a policy outside of a job.", no_args_is_help=True)

_STYLES = {"holds": "green", "broken": "bold red", "not checked": "dim", "take note": "yellow"}
_NEEDS_AN_ANSWER = 3
"""Where the promise about another process stands in the list: after being asked again in this one."""

PolicyArgument = Annotated[
    str,
    typer.Argument(
        metavar="POLICY",
        help="my.py:Mine, package.module:Mine, the name of a policy, or a YAML configuration.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the policy; may be given several times."),
]


@dataclass(frozen=True)
class Checked:
    """What became of every promise of a policy."""

    policy: str
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """No promise was found broken."""
        return all(one.outcome != "broken" for one in self.findings)


@app.command(epilog=EPILOG)
def check(
    policy: PolicyArgument, *, set_: SetOption = None, json: JsonOption = False, debug: DebugOption = False
) -> None:
    """Try on a policy what every policy promises: on made-up models and runs, in this process and in another."""
    del debug
    with output.kept_for_answers():
        checked = look(policy, set_ or ())
    output.answer(as_json(checked), lambda console: draw(console, checked), as_json=json)
    raise typer.Exit(OK if checked.holds else DriftpointError.exit_code)


def look(word: str, given: Sequence[str]) -> Checked:
    """Try the policy that was named."""
    found = named(word, given)
    findings = list(examine(found.policy, found.bounds))
    findings.insert(_NEEDS_AN_ANSWER, _elsewhere(found))
    return Checked(found.policy.name, tuple(findings))


def as_json(checked: Checked) -> dict[str, Any]:
    """The JSON object of the command."""
    return {
        "policy": checked.policy,
        "holds": checked.holds,
        "checks": [asdict(one) for one in checked.findings],
    }


def draw(console: Console, checked: Checked) -> None:
    """The text of the command."""
    rows = output.table()
    rows.add_column("Promise", max_width=32)
    rows.add_column("", no_wrap=True)
    rows.add_column("Found", overflow="fold")
    for one in checked.findings:
        rows.add_row(output.cell(one.promise), output.cell(one.outcome, _STYLES[one.outcome]), output.cell(one.detail))
    console.print(rows)
    console.print()
    console.print(output.cell(_verdict(checked)))


def _elsewhere(found: Named) -> Finding:
    try:
        expected = digest(found.policy)
    except BrokenError:
        return Finding("same answer in another process", "not checked", "it has no answer in this one")
    return another_process(found.settings, expected)


def _verdict(checked: Checked) -> str:
    broken = sum(one.outcome == "broken" for one in checked.findings)
    if broken:
        return (
            f"policy {checked.policy} breaks {plural(broken, 'promise')}: a decision at which it does saves everything"
        )
    notes = sum(one.outcome == "take note" for one in checked.findings)
    return f"policy {checked.policy}: nothing found broken" + (
        f"; {plural(notes, 'thing')} to take note of" if notes else ""
    )
