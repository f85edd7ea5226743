"""Turn ``--policy`` values into configurations, and configurations into replay plans.

A YAML file is a whole configuration. A name, ``{name: parity, k: 4}`` or ``{policy: full, every: 50}`` changes the
recorded configuration."""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitor.config.load import Config, load_config
from monitor.config.schema import ENCODINGS
from policies.accounting import Account
from policies.budget import spends
from policies.builtin import Observe
from policies.registry import POLICIES, policy_from
from policies.replay.recorded_run import Costs, Run, chosen, widest
from policies.replay.state import ReplayPlan
from store.config_file import parse_yaml
from store.errors import ConfigError, UsageError
from store.names import RAW

ELSEWHERE = {"store", "metrics", "retention", "timeouts", "trace", "resume", "layers", "drift"}
"""Sections of the configuration that do not affect which units are saved at which step."""


@dataclass(frozen=True)
class SimulationRequest:
    """A named configuration to replay."""

    name: str
    config: Config


def recorded_settings(run: Run) -> Mapping[str, Any]:
    """Return the recorded configuration, as far as set, without a custom policy.

    A trace is untrusted and must not run code: a custom policy counts as ``full`` unless ``--policy`` names it."""
    left_out = () if knows_policy(run) else ("policy", "budget")
    return {key: value for key, value in {**run.settings, **_recorded_preset(run)}.items() if key not in left_out}


def knows_policy(run: Run) -> bool:
    """Return whether the recorded policy is a built-in one."""
    return _is_built_in(run.settings.get("policy", "full"))


def _recorded_preset(run: Run) -> Mapping[str, Any]:
    """Return the setting ``encoding`` by slot if, by its name, an earlier release stored it in other encodings."""
    name, stored = run.settings.get("encoding"), defaultdict[str, set[str]](set)
    preset = ENCODINGS.get(name, {}) if isinstance(name, str) else {}
    for segment in run.segments:
        for index, encoding in itertools.chain(*(point.line.saved.items() for point in segment.decisions)):
            stored[segment.units[index].slot] |= {encoding} - {RAW}
    others = {slot for slot, now in preset.items() if stored[slot] and now not in stored[slot]}
    return {"encoding": {**preset, **{slot: min(stored[slot]) for slot in others}}} if others else {}


def recorded_config(run: Run) -> Config:
    """Return the recorded configuration, validated. Raises UsageError if this release cannot read it."""
    try:
        return load_config(dict(recorded_settings(run)))
    except ConfigError as error:
        raise UsageError(f"this release cannot read the trace's configuration: {error}") from error


def requests_for(text: str, recorded: Mapping[str, Any]) -> SimulationRequest:
    """Parse one ``--policy`` value. Raises ConfigError or UsageError."""
    path = Path(text)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return SimulationRequest(path.stem, load_config(path))
    if not text.strip().startswith("{"):
        return SimulationRequest(text, load_config(changed(recorded, {"policy": text})))
    try:
        values = parse_yaml(text, f"--policy {text!r}").values
    except ConfigError as error:
        raise UsageError(f"{error}; write for example '{{name: parity, k: 4}}'") from error
    settings = {"policy": values} if "name" in values else values
    return SimulationRequest(_short(values), load_config(changed(recorded, settings)))


def changed(recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded configuration with changed settings, without its budget if the policy does not use it."""
    values = {**recorded, **settings}
    if values.get("every") != "auto":
        values.pop("auto", None)
    if "budget" not in settings and not spends(policy_from(values.get("policy", "full"))):
        values.pop("budget", None)
    return values


def plan_of(one: SimulationRequest, run: Run, costs: Costs | None = None) -> ReplayPlan:
    """Return a configuration's replay plan. Raises ConfigError if its bounds cannot hold at the recorded decisions."""
    config, every = one.config, _every(one.config, run)
    bounded = config
    if config.bounds.max_staleness and every is not None:
        gap = max((widest(chosen(segment.decisions, every)) or 0 for segment in run.segments), default=0)
        bounded = config.model_copy(update={"every": max(every, gap)})
    recorded, policy = recorded_config(run), bounded.bounded_policy()
    return ReplayPlan(
        name=one.name,
        policy=policy.inner if isinstance(policy, Observe) else policy,
        account=lambda clock: Account({}) if not config.budget.limited else config.budget.account(clock),
        every=every,
        same_offers=(config.budget, config.policy) == (recorded.budget, recorded.policy),
        same_sizes=(config.packing, config.differences) == (recorded.packing, recorded.differences),
        costs=costs,
        sees_all=isinstance(policy, Observe),
        varying=config.every == "auto",
        bounded=bounded.in_bounds,
        goes_back=config.resume.at == "effective",
    )


def remarks(one: SimulationRequest, run: Run) -> list[str]:
    """Return caveats of replaying this configuration on this run."""
    recorded, notes, every = recorded_config(run), [], _every(one.config, run)
    steps = [[point.line.step for point in segment.decisions] for segment in run.segments]
    gap = min((b - a for of_segment in steps for a, b in itertools.pairwise(of_segment) if b > a), default=0)
    if gap and every is not None and every < gap:
        notes.append(f"{one.name}: the trace has decisions every {gap} steps, so every {every} is replayed as {gap}")
    elif gap and every is not None and every % gap:
        notes.append(
            f"{one.name}: every {every} is not a multiple of the {gap} steps between recorded decisions: the nearest "
            "ones are taken"
        )
    if one.config.every == "auto" and recorded.every != "auto":
        notes.append(f"{one.name}: every auto is replayed at the recorded decisions, not at its own")
    packing = (one.config.packing, one.config.differences)
    if one.config.packing != "none" and packing != (recorded.packing, recorded.differences):
        notes.append(f"{one.name}: the recorded run packed differently, so the bytes are those before packing")
    return notes


def _is_built_in(policy: object) -> bool:
    if isinstance(policy, Mapping):
        return _is_built_in(policy.get("name")) and _is_built_in(policy.get("inner", "full"))
    return policy in POLICIES


def _every(config: Config, run: Run) -> int | None:
    """Return the interval to replay with; None: at the recorded decisions."""
    return config.every if isinstance(config.every, int) and config.every != recorded_config(run).every else None


def _short(values: Mapping[str, Any]) -> str:
    words = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            words.append(_short(value))
        else:
            words.append(str(value) if key in ("name", "policy", "encoding") else f"{key}={value}")
    return " ".join(words)
