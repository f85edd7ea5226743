"""Compute the interval between decisions (Young/Daly, within limits, damped), and estimate the interruption rate.

Pure. docs/interval.md derives the formulas and explains the prior."""

import math
from dataclasses import dataclass
from typing import Final

FIRST: Final = 3  # steps before the first decision of a job: enough to measure the time of a step

_STEADY = 1.25
"""The interval is kept while the optimum is within this factor of it: the time lost is then within 3 % of the least."""

_GROWTH = 4  # largest growth factor of the interval: the first save of a job is slower than later ones


@dataclass(frozen=True)
class Measured:
    """Measured times of a job in seconds; None: not measured yet."""

    step: float | None = None  # of an optimizer step without a decision
    cost: float | None = None  # that a decision and its save block training
    durable: float | None = None  # from a decision to the commit


@dataclass(frozen=True)
class Limits:
    """Upper limits of the interval."""

    max_loss: float = math.inf  # seconds of training that an interruption may cost, without the restart
    max_staleness: int | None = None  # steps


@dataclass(frozen=True)
class Interval:
    """``steps`` to the next decision, >= 1, and the reason. too_slow: max_loss cannot be kept."""

    steps: int
    because: str
    too_slow: bool = False


def daly(cost: float, between: float) -> float:
    """Return the seconds between two saves of ``cost`` seconds each that lose the least time.

    between: mean seconds between two interruptions, > 0. Eq. (37) of J. T. Daly, *A higher order estimate of the
    optimum checkpoint interval for restart dumps*, Future Generation Computer Systems 22 (2006) 303-312, valid for
    cost < 2 * between; else ``between``, as there. The first term is Young's (*A first order approximation to the
    optimum checkpoint interval*, Communications of the ACM 17 (1974) 530-531)."""
    if cost >= 2.0 * between:
        return between
    ratio = math.sqrt(cost / (2.0 * between))
    return math.sqrt(2.0 * cost * between) * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - cost


def next_interval(now: int, measured: Measured, per_hour: float, limits: Limits) -> Interval:
    """Return the steps to the next decision; ``now`` is the current interval.

    In order of precedence: at least 1; at most max_staleness; at least the time that a save takes to become durable,
    since a decision during a save cannot begin another; at most max_loss; Daly's optimum, damped. Until a step and a
    save were measured: ``now``, within the known limits. per_hour: expected interruptions, > 0."""
    least, most = _within(measured, limits)
    if measured.step is None or measured.cost is None:
        return _limited(now, "want of measurements", least, most, limits)
    best = max(1.0, daly(measured.cost, 3600.0 / per_hour) / max(measured.step, 1e-9))
    # Limits before damping, so that damping does not apply to an interval that a limit forbids.
    wanted = _limited(_whole(best), "the least time lost", least, most, limits)
    steady = now / _STEADY <= wanted.steps <= now * _STEADY
    steps = now if steady else min(wanted.steps, now * _GROWTH)
    damped = _limited(steps, wanted.because, least, most, limits)
    return Interval(damped.steps, wanted.because, damped.too_slow)


def _within(measured: Measured, limits: Limits) -> tuple[int, float]:
    """Return the (least, most) steps that save time and max_loss allow; inf if unknown."""
    if measured.step is None:
        return 1, math.inf
    step, durable = max(measured.step, 1e-9), measured.durable or 0.0
    # One step more: otherwise every other decision would come just before the running save finishes, and be skipped.
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


_KINDS = 6  # kinds of jobs in the prior, from ordinary ones to those interrupted 100,000 times as often
_TIMES = 10.0  # factor between the interruption rates of two kinds
_RARER = 100.0  # factor between the prior weights of two kinds


@dataclass(frozen=True)
class Prior:
    """Prior of the interruption rate: hardware failures per GPU-hour, plus preemptions per hour of the job.

    It weighs as much as one observed interruption and is a mixture: most jobs have this rate, one in a hundred ten
    times the rate, one in ten thousand a hundred times, and so on. So hours without interruptions and a single
    interruption change little, while several in a row raise the estimate quickly."""

    gpu_hours_per_interruption: float
    preemptions_per_hour: float
    gpus: int

    @property
    def per_gpu_hour(self) -> float:
        """The prior rate, which is the mean of the mixture."""
        return 1.0 / self.gpu_hours_per_interruption + self.preemptions_per_hour / self.gpus

    def expected_per_hour(self, interruptions: int, gpu_hours: float) -> float:
        """Return the interruptions of the job expected in the next hour, > 0, after ``interruptions`` in ``gpu_hours``.

        Each kind k has a Gamma prior of shape 1 and rate b_k GPU-hours; counts being Poisson, its posterior is a Gamma
        of shape 1 + interruptions and rate b_k + gpu_hours, and its weight is multiplied by the probability of the
        observations (Gelman et al., *Bayesian Data Analysis*, 3rd ed., 2.6). Returns the mean over all kinds."""
        seen, hours = interruptions + 1, [self._hours(kind) for kind in range(_KINDS)]
        logs = [math.log(h) - k * math.log(_RARER) - seen * math.log(h + gpu_hours) for k, h in enumerate(hours)]
        largest = max(logs)
        likely = [math.exp(log - largest) for log in logs]
        means = [seen / (mean + gpu_hours) for mean in hours]
        return self.gpus * (sum(weight * mean for weight, mean in zip(likely, means, strict=True)) / sum(likely))

    def _hours(self, kind: int) -> float:
        """Return the expected GPU-hours between two interruptions of this kind of job."""
        weights = [_RARER**-index for index in range(_KINDS)]
        mean_factor = sum(weight * _TIMES**index for index, weight in enumerate(weights)) / sum(weights)
        return mean_factor / self.per_gpu_hour / _TIMES**kind
