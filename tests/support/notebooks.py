"""Runs a notebook's code in one namespace, as it is, without a notebook server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def cells(path: Path) -> list[dict[str, Any]]:
    """Those with code."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def executed(name: str) -> dict[str, Any]:
    """From top to bottom; what it leaves behind."""
    path = NOTEBOOKS / f"{name}.ipynb"
    names: dict[str, Any] = {}
    for cell in cells(path):
        exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), names)
    return names
