"""Times and steps as people read them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

from deploy.cli.text import plural

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def span_text(seconds: float) -> str:
    """A length of time in its two largest units: ``9.0 s``, ``2 min 5 s``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.0005 else "0 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for (large, length), (small, part) in pairwise(_UNITS):
        if seconds >= length:
            high, low = divmod(round(seconds / part) * part, length)
            return f"{high} {large}" + (f" {low // part} {small}" if low else "")
    return f"{round(seconds)} s"


def ago_text(seconds: float) -> str:
    """How long ago; clocks of two machines may differ."""
    return "just now" if -120.0 < seconds < 0.5 else f"{span_text(seconds)} ago" if seconds > 0 else "in the future"


def steps_text(steps: float) -> str:
    """A number of steps that may be an estimate."""
    return plural(round(steps), "step")


def share_text(share: float) -> str:
    """In per cent, two digits."""
    return "0 %" if share == 0 else f"{100 * share:.2g} %" if share < 0.0995 else f"{100 * share:.0f} %"


def clock(seconds: float | None) -> str:
    """A moment in universal time; '' where it is not known."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
