"""Bars over the columns of a run, beside what full saves would have come to. Geometry only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.report.heat import WIDTH, Label, apart

_LEFT, _TOP, _BODY, _BOTTOM = 76.0, 10.0, 110.0, 20.0
_TICKS = 3


@dataclass(frozen=True)
class Bars:
    """path: of the bars. beside: of what they are compared with, '' for nothing. marks: x of restarts. levels: of the
    scale, with their text."""

    width: float
    height: float
    left: float
    right: float
    top: float
    body: float
    path: str
    beside: str
    marks: Sequence[float]
    levels: Sequence[Label]
    ticks: Sequence[Label]


def bars(
    values: Sequence[float],
    beside: Sequence[float],
    text: Callable[[float], str],
    ticks: Sequence[tuple[float, str]],
    marks: Sequence[float],
    *,
    unit: float = 1.0,
) -> Bars:
    """values: one for each column. beside: the same of what they are compared with, empty for nothing. unit: in which
    the scale's figures are round."""
    count = max(1, len(values))
    each = (WIDTH - _LEFT) / count
    top = nice_top(max((*values, *beside), default=0.0) / unit) * unit
    levels = [
        Label(_LEFT - 8, _TOP + _BODY * (1 - i / (_TICKS - 1)) + 4, text(top * i / (_TICKS - 1))) for i in range(_TICKS)
    ]
    below = [
        Label(
            _LEFT + column * each,
            _TOP + _BODY + 16,
            label,
            "start" if column < 1 else "end" if column > count - 2 else "middle",
        )
        for column, label in ticks
    ]
    return Bars(
        width=WIDTH,
        height=_TOP + _BODY + _BOTTOM,
        left=_LEFT,
        right=WIDTH,
        top=_TOP,
        body=_BODY,
        path=_path(values, each, _BODY / top),
        beside=_path(beside, each, _BODY / top),
        marks=[round(_LEFT + mark * each, 1) for mark in marks],
        levels=levels,
        ticks=apart(below),
    )


def nice_top(value: float) -> float:
    """A little above the largest value: 1, 2, 3, 4, 6 or 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** len(str(int(value))) / 10 if value >= 1 else 1.0
    while power > value:
        power /= 10
    return next(step * power for step in (1, 2, 3, 4, 6, 8, 10, 20) if step * power >= value)


def _path(values: Sequence[float], each: float, scale: float) -> str:
    gap = 1.0 if each > 4 else 0.0
    foot = _TOP + _BODY
    return "".join(
        f"M{_LEFT + i * each + gap / 2:.1f} {foot:.0f}v{-max(1.0, value * scale):.1f}h{each - gap:.1f}V{foot:.0f}z"
        for i, value in enumerate(values)
        if value > 0
    )
