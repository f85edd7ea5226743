"""Rows of the quality benchmark: each is a configuration at a rate of bytes, in families that a curve joins.

``thresholds`` must be told how far units move; all else is fixed. To add a row, add it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.learner import Learner
from benchmarks.stepped import SteppedConfig, per_step
from benchmarks.turns import TurnsConfig
from monitor.config.load import Config

PERIODS = (10, 20, 40, 80)
"""In steps: how often everything is saved, raw, at the rates that are compared. Raw is 12 bytes a parameter."""

_GATHER = 200.0
_PACKED = {"packing": 3, "differences": True}


@dataclass(frozen=True)
class Row:
    """family: what a curve joins. every: steps between two decisions. settings: what differs from saving everything,
    raw. rate: bytes a parameter and step of a budget. lossless: what it gives back is what was, all of one step, so
    that a resume need not be tried at every failure. bytes_only: what it gives back is another row's. more: left out
    where little is to be run."""

    family: str
    every: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    rate: float | None = None
    mark: str = ""
    lossless: bool = False
    bytes_only: bool = False
    more: bool = False

    @property
    def journaled(self) -> bool:
        """Whether a failure costs no step."""
        return "journal" in self.settings

    @property
    def name(self) -> str:
        """Unlike any other's."""
        rate = "" if self.rate is None else f" {self.rate:g}"
        return f"{self.family} @{self.every}{rate}{self.mark}"

    def config(self, store: Path, learner: Learner) -> Config:
        """For ``monitor.attach``."""
        values: dict[str, Any] = {
            "store": str(store),
            "every": self.every,
            "staging": "eager",
            "metrics": {"enabled": False},
            "trace": {"enabled": False},
            "resume": {"at": "newest"},
            "retention": {"keep_last": 1, "log_spaced": False},
            **self.settings,
        }
        if learner.shape.device == "cuda" and "encoding" in self.settings:
            values["encode"] = "staging"  # the same bytes; encoding on the host takes longer than the steps between
        if self.rate is not None:
            nbytes = self.rate * sum(one.numel() for one in learner.model.parameters() if one.requires_grad)
            values["budget"] = per_step(nbytes, lambda: learner.schedule.last_epoch, _GATHER)
            return SteppedConfig.model_validate(values)
        return (TurnsConfig if "turns" in values else Config).model_validate(values)


def rows(thresholds: Mapping[int, Mapping[str, float]]) -> Iterator[Row]:
    """All of them. thresholds: period -> slot -> the drift that the median layer has after so many steps."""
    yield Row("full", 10, lossless=True)
    yield from (Row("full, packed", every, _PACKED, lossless=True, bytes_only=True) for every in PERIODS[:3])
    yield Row("full, compact", 10, {"encoding": "compact"})
    yield from (
        Row("full, compact, packed", every, {"encoding": "compact", **_PACKED}, bytes_only=True)
        for every in (5, *PERIODS[:3])
    )
    yield Row("full, careful", 10, {"encoding": "careful"})
    for k, periods, usual in ((2, (5, 10, 20, 40), (10, 20)), (4, (5, 10, 20), (10,))):
        policy = {"policy": {"name": "parity", "k": k}}
        yield from (Row(f"parity {k}", every, policy, more=every not in usual) for every in periods)
        yield Row(f"parity {k}, journal", 10, {**policy, "journal": {"enabled": True}}, lossless=True, more=True)
    filtered = {"policy": {"name": "filter", "n": 1, "m": 4}}
    yield from (Row("filter", every, filtered, more=every != 20) for every in PERIODS[:3])
    yield from (_threshold(period, slots) for period, slots in thresholds.items())
    yield from (
        Row("turns, compact", every, {"encoding": "compact", "turns": 8}, more=every != 10) for every in (5, 10, 20)
    )
    yield from (_budget("budget", rate, {}) for rate in (0.6, 0.3, 0.15, 0.075))
    yield from (_budget("budget, compact", rate, {"encoding": "compact"}) for rate in (0.3, 0.15, 0.075, 0.0375))
    yield from (
        _budget("budget, compact, packed", rate, {"encoding": "compact", **_PACKED}) for rate in (0.15, 0.075, 0.0375)
    )
    yield from _auto()
    for lag in (0.3, 30.0):
        yield _budget("budget", 0.3, {}, lag)
        yield _budget("budget, compact", 0.15, {"encoding": "compact"}, lag)
    for lag in (10.0, 30.0):
        yield _budget("budget, compact", 0.3, {"encoding": "compact"}, lag)


def _auto() -> Iterator[Row]:
    """Policy ``auto``, deciding at every step, as everything less often is given every period; and turns, packed."""
    packed = {"encoding": "compact", **_PACKED}
    for family, rates, settings in (
        ("auto, compact, packed", (0.3, 0.15, 0.075, 0.0375), packed),
        ("auto", (0.6, 0.3, 0.15, 0.075), {}),
    ):
        yield from (Row(family, 1, {"policy": "auto", **settings}, rate, more=True) for rate in rates)
    yield from (Row("turns, compact, packed", every, {**packed, "turns": 8}, more=True) for every in (5, 10, 20))


def _budget(family: str, rate: float, settings: Mapping[str, Any], lag: float | None = None) -> Row:
    policy: dict[str, Any] = {"name": "budget"}
    if lag is not None:
        policy["lags"] = {"exp_avg": lag, "exp_avg_sq": lag}
    mark = "" if lag is None else f" lag {lag:g}"
    return Row(family, 10, {"policy": policy, **settings}, rate, mark, more=lag is not None)


def _threshold(period: int, slots: Mapping[str, float]) -> Row:
    others = {slot: limit for slot, limit in slots.items() if slot != "fp32"}
    policy = {"name": "threshold", "threshold": slots["fp32"], "slots": others}
    bounds = {"max_staleness": 4 * period}
    return Row("threshold", 5, {"policy": policy, "bounds": bounds}, mark=f" ~{period}", more=period not in (20, 40))


RULED = frozenset({"parity 2 @20", "parity 4 @20", "threshold @5 ~40", "budget @10 0.15"})
"""Rows whose resumes are tried from several steps, where a setting asks for that."""

LAGGED = frozenset({"budget, compact @10 0.3"} | {f"budget, compact @10 0.3 lag {lag}" for lag in (10, 30)})
"""Rows that differ in what policy budget takes old moments for."""

FEW = RULED - {"parity 4 @20", "budget @10 0.15"} | {
    "full @10",
    "full, packed @20",
    "full, compact @10",
    "full, compact, packed @20",
    "full, careful @10",
    "turns, compact @10",
    "budget @10 0.3",
    "budget, compact @10 0.15",
    "budget, compact, packed @10 0.075",
    "budget, compact, packed @10 0.0375",
}
"""Rows of a setting whose steps are dear."""

LARGE = frozenset({"full @10", "full, compact @10", "turns, compact @10", "budget @10 0.3", "budget, compact @10 0.15"})
"""Rows of a setting whose saves are dear as well."""
