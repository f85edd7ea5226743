"""Figures of a benchmark: the table, the JSON, and whether the goals hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One measured number. ``goal`` is an upper bound on it; None where it is only told."""

    name: str
    value: float
    unit: str
    against: str = ""
    goal: float | None = None

    @property
    def holds(self) -> bool | None:
        return None if self.goal is None else self.value <= self.goal


def report(title: str, figures: list[Figure], json_path: Path | None) -> int:
    """Print the table, write the JSON where asked. 1 where a goal is missed, else 0."""
    table = Table(title=title)
    for column, justify in (
        ("figure", "left"),
        ("value", "right"),
        ("against", "left"),
        ("goal", "right"),
        ("", "left"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for figure in figures:
        goal = "" if figure.goal is None else f"<= {figure.goal:.3g}"
        verdict = {None: "", True: "holds", False: "[bold red]missed[/]"}[figure.holds]
        table.add_row(figure.name, f"{figure.value:.4g} {figure.unit}", figure.against, goal, verdict)
    Console().print(table)
    if json_path is not None:
        rows = [{**vars(figure), "holds": figure.holds} for figure in figures]
        json_path.write_text(json.dumps({"figures": rows}, indent=2) + "\n")
    return int(any(figure.holds is False for figure in figures))
