"""Reads a drift trace back: its lines by kind, what a policy was shown at a decision, and exact distances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from monitor.observe.drift_meter import drift_ratio
from monitor.types import StepReport
from policies.base import UnitStats
from store.names import Unit
from store.trace import DecisionLine, JobLine, Line, Trace, incarnations, read_lines
from tests.support.jobs import Job

L = TypeVar("L", bound=Line)


@dataclass(frozen=True)
class Traced:
    """One incarnation with known units."""

    job: JobLine
    lines: tuple[Line, ...]

    def of(self, kind: type[L]) -> list[L]:
        return [line for line in self.lines if isinstance(line, kind)]

    @property
    def units(self) -> list[Unit]:
        return [one.unit for one in self.job.units]


def trace_of(path: Path) -> Trace:
    with path.open("rb") as lines:
        return read_lines(lines)


def traced(path: Path) -> list[Traced]:
    """Every incarnation in a trace that has no torn line."""
    trace = trace_of(path)
    assert trace.skipped == 0
    return [Traced(job, lines) for job, lines in incarnations(trace) if job.units]


def shown(job: JobLine, line: DecisionLine) -> list[UnitStats]:
    """What the policy was shown, from the trace alone."""
    return [
        UnitStats(
            unit=one.unit,
            position=one.position,
            block=one.block,
            nbytes=one.nbytes,
            drift=line.drift[at],
            staleness=line.staleness[at],
            finite=at not in line.sick,
            moving=one.moving,
            changed_shape=at in line.changed,
            error=line.error[at],
            numel=one.numel,
            encoding=line.encoding[at],
            stored_bytes=line.stored_bytes[at],
        )
        for at, one in enumerate(job.units)
    ]


def distances(
    now: Mapping[str, torch.Tensor], then: Mapping[str, torch.Tensor], layers: Sequence[str]
) -> dict[Unit, float]:
    """Relative distance of every unit between two states (``fqn/slot``, and what else tells pieces apart -> values),
    in float64."""
    sums: dict[Unit, list[float]] = {}
    for key, values in now.items():
        fqn, slot, *_ = key.split("/")
        layer = next((name for name in layers if fqn.startswith(f"{name}.")), "(root)")
        found = sums.setdefault(Unit(layer, slot), [0.0, 0.0])
        found[0] += float((values.double() - then[key].double()).square().sum())
        found[1] += float(then[key].double().square().sum())
    return {unit: drift_ratio(moved, reference) for unit, (moved, reference) in sums.items()}


def beside(store: Path) -> Path:
    return store.with_name("store.trace.jsonl")


def trained(one: Job, steps: int) -> tuple[list[StepReport], dict[int, dict[str, torch.Tensor]]]:
    """Reports of so many steps, and the live state at each of them."""
    reports, states = [], {}
    one.ckpt.resume()
    for _ in range(steps):
        report = one.step()
        assert report is not None
        reports.append(report)
        states[report.step] = one.weights()
    return reports, states


def only(store: Path) -> Traced:
    """What one process has written, in another epoch too."""
    first, *rest = traced(beside(store))
    assert all((one.job.started, one.units) == (first.job.started, first.units) for one in rest)
    return Traced(first.job, tuple(line for one in (first, *rest) for line in one.lines))
