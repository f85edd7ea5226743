"""``python -m deploy.cli.policy_again``: the digest of a policy's answers, in a process that has seen nothing else.

Reads the policy's settings as YAML from stdin and writes one line, which is the last: the user's code may print too.
"""

from __future__ import annotations

import os
import subprocess
import sys

import yaml

from policies.asked import BrokenError
from policies.contract import Finding, digest
from policies.select import policy_from
from store.config_file import parse_value

PROMISE = "same answer in another process"
_MARK = "driftpoint-digest "
_PATIENCE = 300.0


def another_process(settings: object, expected: str) -> Finding:
    """Whether a fresh process with another hash seed answers alike. settings: a policy's, with absolute paths."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "deploy.cli.policy_again"],
            input=yaml.safe_dump(settings),
            capture_output=True,
            text=True,
            env=environment,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(PROMISE, "broken", f"another process had no answer after {_PATIENCE:.0f} s")
    last = done.stdout.splitlines()[-1:] or [""]
    if done.returncode != 0 or not last[0].startswith(_MARK):
        return Finding(PROMISE, "broken", f"in another process it fails: {done.stderr.strip()[-300:]}")
    if last[0] != _MARK + expected:
        return Finding(
            PROMISE,
            "broken",
            f"with PYTHONHASHSEED={seed} it decides differently: does it go through a set, or keep something?",
        )
    return Finding(PROMISE, "holds", f"with another hash seed (PYTHONHASHSEED={seed})")


def main() -> None:
    """Entry point of the process."""
    try:
        told = digest(policy_from(parse_value(sys.stdin.read(), "the settings")))
    except BrokenError as error:
        sys.exit(str(error))
    sys.stdout.write(f"\n{_MARK}{told}\n")


if __name__ == "__main__":
    main()
