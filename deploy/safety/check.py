"""A judgement of one thing: how it stands, how bad that is, and what to do. Plain records.

Levels: ``good``; ``plain``, nothing to judge; ``look``, a person should look at it some time; ``bad``, work is being
lost or would be.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["good", "plain", "look", "bad"]
ORDER: tuple[Level, ...] = ("plain", "good", "look", "bad")
"""Worst last."""

LATE, VERY_LATE = 3.0, 10.0
"""How many times the usual time may pass until somebody should look, and until work is being lost."""

FLOOR = 60.0
"""Seconds that nobody is alarmed about."""

LONG = 3600.0
"""Seconds without a commit that somebody should look at where nobody knows how often they come."""

AHEAD = 120.0
"""Seconds that clocks of two machines may differ."""


@dataclass(frozen=True)
class Check:
    """name: of the thing, short. text: how it stands. note: more of it. todo: what to type or do, '' where nothing."""

    name: str
    level: Level
    text: str
    note: str = ""
    todo: str = ""


def typed(command: str, root: Path) -> str:
    """A command about a store, as it is typed."""
    return f"driftpoint {command} {shlex.quote(str(root))}"
