"""In what order a benchmark takes its turns, so that no way is always first or always behind the same other. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def cycle(number: int, always: Sequence[str], extras: Sequence[str], each: int) -> list[str]:
    """The turns of one cycle: all of ``always`` and ``each`` of ``extras``, which take turns over the cycles.

    Every cycle begins one further on, and every second one runs backwards."""
    chosen = [extras[(number * each + i) % len(extras)] for i in range(min(each, len(extras)))]
    turns = [*always, *chosen]
    first = number % len(turns)
    turns = turns[first:] + turns[:first]
    return turns[::-1] if number % 2 else turns


def rows_for(seconds: float, few: tuple[int, float], many: tuple[int, float]) -> int:
    """Rows of a batch with which a step takes ``seconds`` at least, from two measured (rows, seconds)."""
    slope = (many[1] - few[1]) / (many[0] - few[0])
    if slope <= 0:
        raise ValueError(f"{many[0]} rows took no longer than {few[0]}: {many[1]:.3g} s, {few[1]:.3g} s")
    return max(1, -int(-(seconds - few[1]) // slope) + few[0])
