"""How often a job is expected to be interrupted: what is known beforehand, corrected by what happened to it.

Pure. It does not know how interruptions and hours are counted. docs/interval.md says why the prior is what it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
