"""Traces of runs that nobody ran: units whose movement is a known function of age, and decisions at given moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitor.telemetry.trace import to_line
from store.names import Unit
from store.trace import DecisionLine, JobLine, Line, MovedLine, Trace, TracedUnit


@dataclass(frozen=True)
class Mover:
    """A unit that is ``distance(age)`` away after ``age`` steps."""

    unit: Unit
    nbytes: int
    distance: Callable[[float], float]
    position: int = 0
    moving: bool = True

    @property
    def traced(self) -> TracedUnit:
        return TracedUnit(
            layer=self.unit.layer,
            slot=self.unit.slot,
            position=self.position,
            block=True,
            nbytes=self.nbytes,
            numel=self.nbytes // 4,
            moving=self.moving,
        )


def power(rate: float, exponent: float) -> Callable[[float], float]:
    """rate * age ** exponent."""
    return lambda age: rate * age**exponent


def job_line(movers: Sequence[Mover], settings: Mapping[str, Any], started: float = 0.0) -> JobLine:
    return JobLine(
        started=started,
        epoch=1,
        framework="torch",
        world_size=1,
        policy="full",
        settings=settings,
        units=tuple(mover.traced for mover in movers),
    )


def decisions(steps: Sequence[int], step_seconds: float = 1.0) -> list[DecisionLine]:
    """Moments at which nothing was seen or saved."""
    return [
        DecisionLine(step=step, seconds=(step - steps[0] + 1) * step_seconds, commits=0, skipped="nothing")
        for step in steps
    ]


def moved_line(movers: Sequence[Mover], step: int, ages: Sequence[int]) -> MovedLine:
    return MovedLine(
        step=step,
        since={
            step - age: tuple(mover.distance(age) if mover.moving else None for mover in movers)
            for age in ages
            if age <= step
        },
    )


def trace_of(
    movers: Sequence[Mover],
    steps: Sequence[int],
    ages: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    step_seconds: float = 1.0,
    **settings: Any,
) -> Trace:
    """A run that only looked: what movers did is told at its last step."""
    lines: list[Line] = [job_line(movers, settings), *decisions(steps, step_seconds)]
    if ages:
        lines.append(moved_line(movers, steps[-1], ages))
    return Trace(tuple(lines), 0)


def write_trace(trace: Trace, path: Path) -> Path:
    path.write_bytes(b"".join(map(to_line, trace.lines)))
    return path
