"""Policies as a user writes them, in files of their own."""

from __future__ import annotations

from pathlib import Path

HEAD = """
from __future__ import annotations

from dataclasses import dataclass, field

from policies.base import Choice, Decision
"""

SOUND = """
@dataclass(frozen=True)
class Mine:
    every: int = 2
    tag: str = field(default="mine", kw_only=True)
    name = "mine"
    needs_drift = False

    def select(self, stats, budget, history):
        turn = history.commits % self.every
        return Decision({
            one.unit: Choice("raw", "its turn") if one.position % self.every == turn else Choice(None, "not its turn")
            for one in stats
        })
"""


def policy_file(folder: Path, body: str = SOUND, name: str = "my.py") -> str:
    """Writes a file with the policy ``Mine`` in it; returns what names it: ``/…/my.py:Mine``."""
    path = folder / name
    path.write_text(HEAD + body)
    return f"{path}:Mine"


def selecting(lines: str, drift: bool = False, more: str = "") -> str:
    """A class ``Mine`` whose ``select`` begins with ``lines``, and else saves everything."""
    indented = "\n".join(f"        {line}" for line in lines.strip("\n").splitlines())
    return f"""
class Mine:
    name = "mine"
    needs_drift = {drift}
    {more}

    def select(self, stats, budget, history):
{indented}
        return Decision({{one.unit: Choice("raw", "always") for one in stats}})
"""
