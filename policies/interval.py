"""Young/Daly interval, failure-rate prior.

How many steps lie between two decisions: Young's and Daly's optimum, inside limits, and damped.

Pure. It does not know how its figures come to be measured, nor what a decision then saves. docs/interval.md derives
what is done here and says what is minimised.

How often a job is expected to be interrupted: what is known beforehand, corrected by what happened to it.

Pure. It does not know how interruptions and hours are counted. docs/interval.md says why the prior is what it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

FIRST: Final = 3
"""Steps before the first decision of a job: enough to know what a step takes, and soon enough to learn from."""

_STEADY = 1.25
"""The interval stays where it is while the optimum is within this factor of it. There the time lost is within 3 % of
the least, and an interval that moved with every measurement would be no easier to reason about than the noise."""

_GROWTH = 4
"""An interval grows by no more at a time: the first save of a job is slower than those that follow."""


@dataclass(frozen=True)
class Measured:
    """What a job has shown of itself so far, in seconds; None: nothing yet.

    step: of one optimizer step in which nothing is decided. cost: that one decision, with the save that it may begin,
    keeps training from going on. durable: from the decision to the commit, beside training."""

    step: float | None = None
    cost: float | None = None
    durable: float | None = None


@dataclass(frozen=True)
class Limits:
    """max_loss: seconds of training that one interruption may cost, restart not counted. max_staleness: steps."""

    max_loss: float = math.inf
    max_staleness: int | None = None


@dataclass(frozen=True)
class Interval:
    """steps: to the next decision, >= 1. because: what set it, for people. too_slow: max_loss cannot hold."""

    steps: int
    because: str
    too_slow: bool = False


def daly(cost: float, between: float) -> float:
    """Seconds of training between two saves that cost ``cost`` seconds each, for the least time lost.

    between: mean seconds between two interruptions, > 0. Eq. (37) of J. T. Daly, *A higher order estimate of the
    optimum checkpoint interval for restart dumps*, Future Generation Computer Systems 22 (2006) 303-312, valid for
    cost < 2 * between; beyond, ``between``, as there. Its first term is Young's (*A first order approximation to the
    optimum checkpoint interval*, Communications of the ACM 17 (1974) 530-531)."""
    if cost >= 2.0 * between:
        return between
    ratio = math.sqrt(cost / (2.0 * between))
    return math.sqrt(2.0 * cost * between) * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - cost


def next_interval(now: int, measured: Measured, per_hour: float, limits: Limits) -> Interval:
    """The steps to the next decision, where ``now`` lay between the last two. per_hour: interruptions expected, > 0.

    In order of strength: at least 1; at most max_staleness; at least what a save takes to become durable, since a
    decision meanwhile could begin none; at most what max_loss allows; Daly's optimum, damped. Until a step and a save
    have been measured, ``now`` within the limits that are known."""
    least, most = _within(measured, limits)
    if measured.step is None or measured.cost is None:
        return _limited(now, "want of measurements", least, most, limits)
    best = max(1.0, daly(measured.cost, 3600.0 / per_hour) / max(measured.step, 1e-9))
    because = "the least time lost"
    # Limits first, so that the damping is about the interval that is wanted, not about one that no limit allows.
    wanted = _limited(_whole(best), because, least, most, limits)
    steady = now / _STEADY <= wanted.steps <= now * _STEADY
    steps = now if steady else min(wanted.steps, now * _GROWTH)
    held = _limited(steps, wanted.because, least, most, limits)
    return Interval(held.steps, wanted.because, held.too_slow)


def _within(measured: Measured, limits: Limits) -> tuple[int, float]:
    """(least, most) steps by what a save takes and what may be lost; inf where nothing is known."""
    if measured.step is None:
        return 1, math.inf
    step, durable = max(measured.step, 1e-9), measured.durable or 0.0
    # One step more: a save that takes just as long as the steps between would be waited for every other time.
    least = 1 if measured.durable is None else _whole(durable / step) + 1
    left = limits.max_loss - durable - (measured.cost or 0.0)
    return least, math.inf if left == math.inf else math.floor(max(0.0, min(left / step, 1e15)))


def _limited(steps: int, because: str, least: int, most: float, limits: Limits) -> Interval:
    too_slow = most < least
    if steps > most:
        steps, because = int(most), "max_loss_minutes"
    if steps < least:
        steps, because = least, "the time that a save takes" if least > 1 else because
    if limits.max_staleness is not None and steps > limits.max_staleness:
        steps, because = limits.max_staleness, "max_staleness"
    return Interval(steps, because, too_slow)


def _whole(steps: float) -> int:
    return int(min(max(1.0, math.floor(steps)), 1e15))


_TIMES = 10.0
"""Each kind of job beyond the ordinary one is interrupted so many times as often as the one before it."""
_KINDS = 6
"""Kinds of job that are considered: up to 100 000 times as often."""
_RARER = 100.0
"""And is so many times as rare."""


@dataclass(frozen=True)
class Prior:
    """What is known before the first interruption: one in so many GPU-hours, and so many an hour of the whole job
    besides, on a job of ``gpus``.

    It weighs as much as one interruption seen, and is a mixture: most jobs are interrupted about that often; one in a
    hundred ten times as often, one in ten thousand a hundred times, and so on. So hours without any interruption
    change little, one interruption changes a little, and a few in a row are believed."""

    gpu_hours_per_interruption: float
    preemptions_per_hour: float
    gpus: int

    @property
    def per_gpu_hour(self) -> float:
        """The rate expected beforehand, and the mean of the mixture."""
        return 1.0 / self.gpu_hours_per_interruption + self.preemptions_per_hour / self.gpus

    def expected_per_hour(self, interruptions: int, gpu_hours: float) -> float:
        """Interruptions of the whole job expected in the next hour, after so many in ``gpu_hours`` of it. > 0.

        Each kind k has a Gamma prior of shape 1 and rate b_k GPU-hours; counts being Poisson, its posterior is a Gamma
        of shape 1 + interruptions and rate b_k + gpu_hours, and its weight is multiplied by the probability of what
        was seen (Gelman et al., *Bayesian Data Analysis*, 3rd edition, 2.6). The mean over all kinds is returned."""
        seen = interruptions + 1
        kinds = [(self._log_weight(kind), self._hours(kind)) for kind in range(_KINDS)]
        logs = [weight + math.log(hours) - seen * math.log(hours + gpu_hours) for weight, hours in kinds]
        largest = max(logs)
        likely = [math.exp(log - largest) for log in logs]
        means = [seen / (hours + gpu_hours) for _, hours in kinds]
        mean = sum(weight * one for weight, one in zip(likely, means, strict=True)) / sum(likely)
        return self.gpus * mean

    def _log_weight(self, kind: int) -> float:
        return -kind * math.log(_RARER)

    def _hours(self, kind: int) -> float:
        """GPU-hours in which one interruption of this kind of job is expected."""
        weights = [_RARER**-one for one in range(_KINDS)]
        more = sum(weight * _TIMES**one for one, weight in enumerate(weights)) / sum(weights)
        return more / self.per_gpu_hour / _TIMES**kind
