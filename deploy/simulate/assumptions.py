"""Build a trace from stated assumptions, for machines that are not at hand.

Every assumption is printed with its source. The results are estimates, not measurements."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.budget import GROWTH
from store.errors import UsageError
from store.names import WEIGHTS
from store.trace import DecisionLine, JobLine, MovedLine, Trace, TracedUnit

SLOTS = (WEIGHTS, "exp_avg", "exp_avg_sq")
_BETAS = {"exp_avg": 0.9, "exp_avg_sq": 0.95}
_MOST_DECISIONS = 100_000  # most decisions of an assumed run
_DRIFTS = {1e-3: 5e-2, 1e-4: 7e-3, 1e-5: 7e-4}  # measured drift of the weights over ten steps, by learning rate
GPU_HOURS_PER_FAILURE = 50_000.0  # GPU hours per failure on large clusters; for the source see :meth:`Assumptions.told`
_STEP_SECONDS = {"llama-8b": 4.0, "llama-70b": 8.0, "llama-405b": 16.0}


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama model: blocks, hidden and inner width, vocabulary, width of keys and values."""

    blocks: int
    hidden: int
    inner: int
    vocabulary: int
    key: int

    def layers(self) -> Mapping[str, int]:
        """Return the parameters of each layer, in model order."""
        block = 2 * self.hidden * (self.hidden + self.key) + 3 * self.hidden * self.inner + 2 * self.hidden
        names = {f"model.layers.{i}": block for i in range(self.blocks)}
        ends = self.vocabulary * self.hidden
        return {"model.embed_tokens": ends, **names, "model.norm": self.hidden, "lm_head": ends}


MODELS: Mapping[str, Shape] = {
    "llama-8b": Shape(32, 4096, 14336, 128256, 1024),
    "llama-70b": Shape(80, 8192, 28672, 128256, 1024),
    "llama-405b": Shape(126, 16384, 53248, 128256, 1024),
}


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about model, machine and training."""

    model: str
    gpus: int
    step_seconds: float | None = None
    drift: float | None = None  # of the weights over ten steps
    learning_rate: float = 1e-4
    storage_gbps: float = 200.0  # write speed of the whole job in GB/s
    copy_gbps: float = 20.0  # copy speed of each GPU to host memory in GB/s
    every: int = 25
    hours: float = 24.0  # hours of training

    @classmethod
    def of(cls, model: str, given: Mapping[str, Any]) -> "Assumptions":
        """Build the assumptions from the given values and the defaults."""
        return cls(model, **{"gpus": 1024} | {key: value for key, value in given.items() if value is not None})

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UsageError(f"unknown model {self.model!r}: known are {', '.join(MODELS)}")

    @property
    def step(self) -> float:
        return self.step_seconds if self.step_seconds is not None else _STEP_SECONDS[self.model]

    @property
    def pace(self) -> float:
        """Return the drift of the weights over ten steps; log-interpolated in the learning rate unless given."""
        if self.drift is not None:
            return self.drift
        known = sorted(_DRIFTS)
        rate = min(max(self.learning_rate, known[0]), known[-1])
        low = max(one for one in known[:-1] if one <= rate)
        high = known[known.index(low) + 1]
        share = math.log(rate / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(_DRIFTS[low]) + share * math.log(_DRIFTS[high]))

    def told(self) -> Mapping[str, str]:
        layers = MODELS[self.model].layers()
        given = "given" if self.step_seconds is not None else "guessed; set --step-seconds"
        pace = "given" if self.drift is not None else f"small own runs, at learning rate {self.learning_rate:g}"
        return {
            "Model": f"{self.model}, {sum(layers.values()) / 1e9:.1f} G parameters in {len(layers)} layers, the "
            "published shapes; 12 bytes a parameter (fp32 weights and two moments), ZeRO-3: no copy is written twice",
            "Machine": f"{self.gpus} GPUs; storage takes {self.storage_gbps:g} GB/s, each GPU copies "
            f"{self.copy_gbps:g} GB/s to its host (guessed; set --storage-gbps, --copy-gbps); copies block training",
            "Step": f"{self.step:g} s ({given})",
            "Weights": f"drift {self.pace:.2g} over 10 steps ({pace}), growing like steps^{GROWTH / 2:g}, alike in "
            "all layers (docs/budget.md: between linear and a random walk)",
            "Moments": "saturate within 1/(1 - beta) steps: sqrt(2 (1 - 0.9^t)), 1 - 0.95^t",
            "Failures": f"one in {GPU_HOURS_PER_FAILURE:,.0f} GPU-hours, so one in {self.mtbf_hours:.2g} h (419 "
            "unexpected ones in 54 days on 16384 GPUs: The Llama 3 Herd of Models, arXiv:2407.21783, 3.3.4)",
        }

    @property
    def mtbf_hours(self) -> float:
        """Return the mean hours between failures of the whole job."""
        return GPU_HOURS_PER_FAILURE / self.gpus


def assumed_trace(one: Assumptions) -> Trace:
    """Return the trace of an assumed run that saved nothing."""
    units = tuple(
        TracedUnit(
            layer=layer, slot=slot, position=i, block=".layers." in layer, nbytes=4 * numel, numel=numel, moving=True
        )
        for i, (layer, numel) in enumerate(MODELS[one.model].layers().items())
        for slot in SLOTS
    )
    job = JobLine(
        started=0.0,
        epoch=1,
        framework="deepspeed",
        world_size=one.gpus,
        policy="full",
        observing=True,
        settings={"every": one.every},
        units=units,
    )
    if 3600 * one.hours / one.step / one.every > _MOST_DECISIONS:
        raise UsageError(
            f"{one.hours:g} hours of steps of {one.step:g} s are more than {_MOST_DECISIONS:,} decisions every "
            f"{one.every} steps: lower --hours, or raise --every or --step-seconds"
        )
    steps = range(one.every, int(3600 * one.hours / one.step) + 1, one.every)
    if len(steps) < 2:
        raise UsageError(f"{one.hours:g} hours are fewer than two decisions every {one.every} steps: raise --hours")
    decisions = [DecisionLine(step=step, seconds=step * one.step, commits=0, skipped="nothing") for step in steps]
    # The movement at the last step over all ages applies to every step.
    last = steps[-1]
    ages = sorted({age for power in range(64) if (age := round(2 ** (power / 2))) <= last})
    since = {last - age: tuple(_distance(one, unit.slot, age) for unit in units) for age in ages}
    return Trace((job, *decisions, MovedLine(step=last, since=since)), 0)


def _distance(one: Assumptions, slot: str, age: int) -> float:
    if slot == WEIGHTS:
        return float(one.pace * (age / 10) ** (GROWTH / 2))
    left = _BETAS[slot] ** age
    return math.sqrt(2 * (1 - left)) if slot == "exp_avg" else 1 - left
