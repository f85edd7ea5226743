"""The table of docs/optimizers.md, made by running each optimizer; run as a module, it is written anew."""

from __future__ import annotations

import re
from typing import Any

from tests.support.cli import ROOT
from tests.support.optimizer_runs import outcomes
from tests.support.optimizers import CASES, Case

PAGE = ROOT / "docs" / "optimizers.md"
_TABLE = re.compile(r"(?<=\|---\|---\|---\|---\|\n).*?\n(?=\n)", re.S)


def row(case: Case, saved: dict[str, Any]) -> str:
    """The row of a case. saved: what the run that saved found."""
    if saved["refused"] is None:
        return f"| {case.name} | {case.source} | {', '.join(saved['kinds']) or 'none'} | bit for bit |"
    why = re.sub(", (which|so) .*", "", saved["refused"].partition(": ")[2]).replace("tests.support.optimizers.", "")
    return f"| {case.name} | {case.source} | {why} | refused {saved['at']} |"


if __name__ == "__main__":
    missing = {case.source for case in CASES if not case.installed}
    if missing:
        raise SystemExit(f"first install {', '.join(missing)}: pip install '.[optimizers]'")
    found = outcomes()[0].values()
    table = "\n".join(row(case, saved) for case, saved in zip(CASES, found, strict=True))
    PAGE.write_text(_TABLE.sub(lambda _: table + "\n", PAGE.read_text(), count=1))
