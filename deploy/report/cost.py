"""What saving cost, beside what full saves at the same moments would have: figures and bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.cli.text import plural, size_text
from deploy.report.bars import Bars, bars
from deploy.report.history import History
from deploy.report.maps import marks_of, ticks_of
from deploy.safety.words import share_text, span_text


@dataclass(frozen=True)
class Figure:
    """value: large. note: small, below it."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Cost:
    """written, stalled: by column; a column holds ``merged`` decisions."""

    figures: Sequence[Figure]
    written: Bars
    stalled: Bars
    merged: int
    observing: bool


def cost_of(history: History) -> Cost:
    """Of a run that saved at least once."""
    columns, ticks, marks = history.bins.columns, ticks_of(history), marks_of(history)
    largest = max(max(one.written, one.full) for one in columns)
    unit = float(1 << (10 * max(0, (int(largest).bit_length() - 1) // 10)))
    return Cost(
        figures=_figures(history),
        written=bars(
            [float(one.written) for one in columns],
            [float(one.full) for one in columns],
            lambda value: size_text(round(value)),
            ticks,
            marks,
            unit=unit,
        ),
        stalled=bars(
            [one.longest for one in columns], [], lambda value: span_text(value) if value else "0", ticks, marks
        ),
        merged=history.bins.width,
        observing=history.totals.observing,
    )


def _figures(history: History) -> list[Figure]:
    totals = history.totals
    share = totals.written / totals.full if totals.full else 0.0
    stall = totals.stall / totals.seconds if totals.seconds else 0.0
    beside = ""
    if totals.full_stall is not None:
        told = plural(totals.full_seen, "save")
        beside = f"{span_text(totals.full_stall)} had all been like the {told} that held everything"
    verb = "would have been written" if totals.observing else "written"
    failed = f", {totals.failed} failed" if totals.failed else ""
    return [
        Figure("Saves", f"{totals.saves:,}", f"of {totals.decisions:,} decisions{failed}"),
        Figure("Bytes", size_text(totals.written), f"{verb}; full saves: {size_text(totals.full)}"),
        Figure("Of full saves", share_text(share), f"{size_text(max(0, totals.full - totals.written))} left out"),
        Figure(
            "Training waited",
            span_text(totals.stall),
            f"{share_text(stall)} of {span_text(totals.seconds)}; {beside}".rstrip("; "),
        ),
        Figure("Longest wait", span_text(totals.longest), "for one decision"),
    ]
