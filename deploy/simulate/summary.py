"""Summarise a replay: bytes, stall, cost of a failure and money."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from policies.replay.failure_cost import Exposure, Position, Spread, goodput
from policies.replay.recorded_run import Run
from policies.replay.state import ReplayResult
from store.names import WEIGHTS


@dataclass(frozen=True)
class Terms:
    """Assumed failures, and prices in any one currency.

    ``mtbf_hours``: mean times between failures of the whole job, None for 3 h, 12 h and 2 days."""

    mtbf_hours: tuple[float, ...] | None = None
    restart_seconds: float = 600.0  # from a failure to the next step, without repeated training
    price_per_gpu_hour: float | None = None
    price_per_tb_written: float | None = None  # 10^12 bytes

    @property
    def times(self) -> tuple[float, ...]:
        return self.mtbf_hours or (3.0, 12.0, 48.0)


@dataclass(frozen=True)
class Summary:
    """Result of one configuration. ``seconds``: duration of the run; ``step_seconds``: of a step, including stall."""

    name: str
    replayed: ReplayResult
    seconds: float
    step_seconds: float
    gpus: int
    terms: Terms

    @property
    def saves(self) -> int:
        return len(self.replayed.committed)

    @property
    def written(self) -> int:
        return self.replayed.written

    @property
    def later(self) -> int:
        """Return the bytes without the first save, if that is the first of its store and so always full."""
        committed = self.replayed.committed
        first = bool(committed) and all(one.staleness is None for one in committed[0].stats)
        return self.written - (committed[0].written if first else 0)

    @property
    def hours(self) -> float:
        return self.seconds / 3600

    @property
    def bytes_per_hour(self) -> float:
        return self.written / self.hours if self.hours else 0.0

    @property
    def stall_share(self) -> float:
        return self.replayed.stall / self.seconds if self.seconds else 0.0

    @property
    def exposure(self) -> Exposure:
        return self.replayed.exposure

    @property
    def rewound(self) -> Spread:
        """Return the steps repeated after a resume: from the effective step, or the newest under `resume: {at:
        newest}`."""
        return self.exposure.rewound if self.replayed.plan.goes_back else self.exposure.lost

    @property
    def lost_seconds(self) -> float:
        """Return the mean training time lost by a failure, infinite without any commit."""
        return self.rewound.mean * self.step_seconds if self.rewound.weight else math.inf

    def drift(self, weights: bool) -> Spread:
        """Return the drift of the weights, or of all other slots."""
        found = [spread for slot, spread in self.exposure.drift.items() if (slot == WEIGHTS) == weights]
        merged = Spread()
        for spread in found:
            merged.add(spread.mean, spread.worst, spread.weight)
        return merged

    def goodput(self, mtbf_hours: float) -> float:
        """Return the share of wall time that remains for training."""
        return goodput(
            stall_share=self.stall_share,
            lost_seconds=self.lost_seconds,
            restart_seconds=self.terms.restart_seconds,
            mtbf_seconds=3600 * mtbf_hours,
        )

    def price(self, mtbf_hours: float) -> float | None:
        """Return the price of stall, failures and written bytes over the run, None without prices."""
        gpu_hour, tb_written = self.terms.price_per_gpu_hour, self.terms.price_per_tb_written
        if gpu_hour is None and tb_written is None:
            return None
        wasted = (1.0 - self.goodput(mtbf_hours)) * self.hours * self.gpus
        return wasted * (gpu_hour or 0.0) + self.written / 1e12 * (tb_written or 0.0)


def summary_of(replayed: ReplayResult, run: Run, terms: Terms) -> Summary:
    """Summarise a replay of ``run``."""
    return Summary(replayed.plan.name, replayed, run.seconds, step_seconds(run), run.segments[-1].job.world_size, terms)


def over(summaries: Sequence[Summary], since: Position | None) -> tuple[Summary, ...]:
    """Restrict the summaries to failures from ``since`` on."""
    return tuple(replace(one, replayed=one.replayed.seen_from(since)) for one in summaries)


def step_seconds(run: Run) -> float:
    """Return the wall time per step, between the first and last decision of each segment."""
    steps = seconds = 0.0
    for segment in run.segments:
        first, last = segment.decisions[0].line, segment.decisions[-1].line
        steps += last.step - first.step
        seconds += last.seconds - first.seconds
    return seconds / steps if steps else 0.0


def as_json(summary: Summary, baseline: Summary) -> dict[str, Any]:
    """Return a configuration's entry in the JSON output."""
    exposure = summary.exposure
    return {
        "name": summary.name,
        "as_recorded": summary.replayed.as_recorded,
        "policy_failures": len(summary.replayed.failures),
        "saves": summary.saves,
        "bytes": summary.written,
        "bytes_per_hour": summary.bytes_per_hour,
        "bytes_per_save": summary.written / summary.saves if summary.saves else None,
        "bytes_of_full": summary.written / baseline.written if baseline.written else None,
        "bytes_saved": baseline.written - summary.written,
        "stall_seconds": summary.replayed.stall,
        "stall_share": summary.stall_share,
        "stall_seconds_saved": baseline.replayed.stall - summary.replayed.stall,
        "damage": _spread(exposure.total),
        "damage_by_slot": {slot: _spread(one) for slot, one in exposure.damage.items()},
        "drift_by_slot": {slot: _spread(one) for slot, one in exposure.drift.items()},
        "staleness": _spread(exposure.staleness),
        "lost_steps": _spread(exposure.lost),
        "rewound_steps": _spread(summary.rewound),
        "unprotected_steps": exposure.unprotected,
        "unknown": exposure.unknown,
        "goodput": [
            {"mtbf_hours": hours, "share": summary.goodput(hours), "price": summary.price(hours)}
            for hours in summary.terms.times
        ],
    }


def _spread(one: Spread) -> Mapping[str, float | None]:
    return {"mean": one.mean, "worst": one.worst} if one.weight else {"mean": None, "worst": None}
