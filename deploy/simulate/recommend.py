"""Which configuration to take: of each family the one that makes the most of what is allowed, then the least damage.

Families: everything seldom, turns of layers, one threshold, and ``budget``, each raw and in the encodings that round.
All are replayed; nothing is predicted beyond that, and damage is that of docs/budget.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from deploy.simulate.plans import Asked, plan_of, recorded_interval, recorded_settings, remarks
from deploy.simulate.summary import Summary, Terms, over, rank, summary_of
from monitor.config import load_config
from policies.course import Position, latest_first
from policies.recorded import Costs, Run
from policies.replay import replay
from store.config_file import parse_yaml
from store.errors import ConfigError, UsageError

_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Of the recorded interval, that are tried."""

_THRESHOLDS = 10
"""Halvings of the range in which a threshold is looked for."""

_SECTIONS = ("every", "policy", "encoding", "packing", "differences", "budget", "bounds", "resume")


@dataclass(frozen=True)
class Limits:
    """What is allowed; None: not limited. exact: no encoding that rounds.

    bytes_per_hour: all ranks, without the first save of a store. max_loss_minutes: of training that is redone, at the
    worst moment."""

    bytes_per_hour: float | None = None
    stall_share: float | None = None
    max_loss_minutes: float | None = None
    exact: bool = False

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return any(one is not None for one in (self.bytes_per_hour, self.stall_share, self.max_loss_minutes))

    def hold(self, one: Summary) -> bool:
        """Whether it keeps within them, and saves more than once."""
        if one.saves < 2:
            return False
        return (
            _within(later_per_hour(one), self.bytes_per_hour)
            and _within(one.stall_share, self.stall_share)
            and (self.max_loss_minutes is None or one.rewound.worst * one.step_seconds / 60 <= self.max_loss_minutes)
        )


def _within(value: float, most: float | None) -> bool:
    return most is None or value <= most


@dataclass(frozen=True)
class Recommended:
    """chosen: of ``tried``, least damage first. settings: to paste. limits: as they were used; ``max_loss_minutes``
    alone is taken as the bytes of the plainest configuration that keeps it. since: from where on all are compared.
    notes: what has to be said of replaying the chosen one."""

    chosen: Summary
    tried: tuple[Summary, ...]
    settings: Mapping[str, Any]
    limits: Limits
    since: Position | None = None
    notes: tuple[str, ...] = ()

    @property
    def yaml(self) -> str:
        """The settings as a configuration has them."""
        return _text(self.settings)


def _text(settings: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(settings), sort_keys=False)


@dataclass(frozen=True)
class _Tried:
    settings: Mapping[str, Any]
    summary: Summary


class _Trials:
    def __init__(self, run: Run, terms: Terms, costs: Costs | None) -> None:
        self._run, self._terms, self._costs = run, terms, costs
        self.every = recorded_interval(run)
        self._made: dict[str, _Tried | None] = {}

    def of(self, name: str, settings: Mapping[str, Any]) -> _Tried | None:
        """None where the rest of the recorded configuration forbids it."""
        if name not in self._made:
            self._made[name] = self._try(name, settings)
        return self._made[name]

    def _try(self, name: str, settings: Mapping[str, Any]) -> _Tried | None:
        values = {
            **{key: value for key, value in recorded_settings(self._run).items() if key not in ("budget", "auto")},
            "every": self.every,
            **settings,
        }
        try:
            plan = plan_of(Asked(name, load_config(values)), self._run, self._costs)
        except ConfigError:
            return None
        shown = {key: values[key] for key in _SECTIONS if key in values}
        return _Tried(shown, summary_of(replay(self._run, plan), self._run, self._terms))


def recommend(
    run: Run, terms: Terms, limits: Limits, costs: Costs | None = None, beside: Sequence[Summary] = ()
) -> Recommended:
    """The configuration of least expected damage within the limits. UsageError where none keeps them.

    beside: what else is compared, over the same steps."""
    if not limits.any:
        raise UsageError("--recommend needs a limit: --bytes-per-hour, --stall-share or --max-loss-minutes")
    trials = _Trials(run, terms, costs)
    if limits.bytes_per_hour is None and limits.stall_share is None:
        limits = _as_bytes(trials, limits)
    found = [one for one in _candidates(trials, limits) if one is not None and limits.hold(one.summary)]
    if not found:
        raise UsageError(
            f"no configuration keeps these limits, deciding every {trials.every} steps as the trace does: allow more, "
            "or record a trace with a smaller `every`"
        )
    settings = {one.summary.name: one.settings for one in found}
    since = latest_first(one.replayed.course for one in (*beside, *(one.summary for one in found)))
    tried = over(tuple({one.summary.name: one.summary for one in found}.values()), since)
    for chosen in sorted(tried, key=rank):
        asked = Asked(chosen.name, load_config(parse_yaml(_text(settings[chosen.name]), "the recommendation").values))
        again = summary_of(replay(run, plan_of(asked, run, costs)), run, terms)
        if limits.hold(again):
            ordered = sorted(tried, key=lambda one: one.exposure.total.mean)
            notes = tuple(remarks(asked, run))
            return Recommended(chosen, tuple(ordered), settings[chosen.name], limits, since, notes)
    raise UsageError(
        "what keeps these limits does so by settings of the recorded run that a recommendation does not print: replay "
        "configurations with --policy FILE instead"
    )


def later_per_hour(one: Summary) -> float:
    """Bytes an hour without the first save of a store, which is full whatever the configuration."""
    return one.later / one.hours if one.hours else math.inf


def _as_bytes(trials: _Trials, limits: Limits) -> Limits:
    """Time alone would let everything be saved every time: the bytes that saving everything takes are the limit."""
    kept = [one for one in _seldom(trials, {"policy": "full"}, "full raw") if limits.hold(one.summary)]
    if not kept:
        return limits
    return replace(limits, bytes_per_hour=min(later_per_hour(one.summary) for one in kept))


def _candidates(trials: _Trials, limits: Limits) -> Iterator[_Tried | None]:
    for encoding in ("raw",) if limits.exact else ("raw", "careful", "compact"):
        yield _first(trials, {"policy": "full", "encoding": encoding}, f"full {encoding}", limits)
        for k in (2, 4):
            policy = {"name": "parity", "k": k}
            yield _first(trials, {"policy": policy, "encoding": encoding}, f"parity k={k} {encoding}", limits)
        yield _threshold(trials, encoding, limits)
        spend = {
            key: value
            for key, value in (("bytes_per_hour", limits.bytes_per_hour), ("stall_share", limits.stall_share))
            if value is not None
        }
        yield trials.of(f"budget {encoding}", {"policy": "budget", "encoding": encoding, "budget": spend})


def _seldom(trials: _Trials, settings: Mapping[str, Any], name: str) -> Iterator[_Tried]:
    for multiple in _MULTIPLES:
        every = trials.every * multiple
        found = trials.of(f"{name}, every {every}", {**settings, "every": every})
        if found is None or found.summary.saves < 2:
            return
        yield found


def _first(trials: _Trials, settings: Mapping[str, Any], name: str, limits: Limits) -> _Tried | None:
    """The most often that the limits allow."""
    return next((one for one in _seldom(trials, settings, name) if limits.hold(one.summary)), None)


def _threshold(trials: _Trials, encoding: str, limits: Limits) -> _Tried | None:
    """The lowest that the limits allow, to within some per cent."""
    held: _Tried | None = None

    def tried(level: float) -> _Tried | None:
        value = float(f"{math.exp(level):.3g}")
        policy = {"name": "threshold", "threshold": value}
        return trials.of(f"threshold {value:g} {encoding}", {"policy": policy, "encoding": encoding})

    low, high = math.log(1e-7), math.log(10.0)
    for _ in range(_THRESHOLDS):
        middle = (low + high) / 2
        found = tried(middle)
        if found is None:
            return None
        if limits.hold(found.summary):
            held, high = found, middle
        else:
            low = middle
    return held
