"""Replay a run under several configurations, and recommend one within limits.

The baseline saves everything raw at every decision. A recommendation replays four families, each in lossless and lossy
encodings: full at longer intervals, parity, one threshold, and ``budget``. It takes from each the one that saves most
within the limits, and then the one with the least expected damage (docs/budget.md)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from deploy.simulate import plans
from deploy.simulate.summary import Summary, Terms, over, summary_of
from monitor.config.load import Config, load_config
from policies.accounting import Fitted
from policies.replay.failure_cost import Position, latest_first
from policies.replay.recorded_run import Costs, Run, run_of
from policies.replay.replay import replay
from store.config_file import parse_yaml
from store.errors import ConfigError, UsageError, system_errors
from store.trace import Trace, opened, read_lines

_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Multiples of the recorded interval that are tried."""

_THRESHOLDS = 10  # bisection steps when searching for a threshold
_SECTIONS = ("every", "policy", "encoding", "packing", "differences", "budget", "bounds", "resume")
BASELINE = "full, raw"


@dataclass(frozen=True)
class Limits:
    """Limits of a recommendation; None means unlimited."""

    bytes_per_hour: float | None = None  # of all ranks, without the first save of a store
    stall_share: float | None = None
    max_loss_minutes: float | None = None  # of training lost by a failure at the worst moment
    exact: bool = False  # lossless encodings only

    @property
    def any(self) -> bool:
        return any(one is not None for one in (self.bytes_per_hour, self.stall_share, self.max_loss_minutes))

    def hold(self, one: Summary) -> bool:
        """Return whether a replay keeps the limits and saves more than once."""
        found = (
            (later_per_hour(one), self.bytes_per_hour),
            (one.stall_share, self.stall_share),
            (one.rewound.worst * one.step_seconds / 60, self.max_loss_minutes),
        )
        return one.saves >= 2 and all(most is None or value <= most for value, most in found)


@dataclass(frozen=True)
class Recommendation:
    """The recommended configuration."""

    chosen: Summary
    tried: tuple[Summary, ...]  # candidates, least damage first
    settings: Mapping[str, Any]  # configuration to paste
    limits: Limits  # limits as used; ``max_loss_minutes`` alone is converted to bytes per hour
    since: Position | None = None  # position from which all are compared
    notes: tuple[str, ...] = ()  # caveats of replaying the chosen one

    @property
    def yaml(self) -> str:
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
        self.every = plans.recorded_interval(run)
        self._made: dict[str, _Tried | None] = {}

    def of(self, name: str, settings: Mapping[str, Any]) -> _Tried | None:
        """Replay a configuration; None if the rest of the recorded configuration forbids it."""
        if name not in self._made:
            self._made[name] = self._try(name, settings)
        return self._made[name]

    def _try(self, name: str, settings: Mapping[str, Any]) -> _Tried | None:
        recorded = plans.recorded_settings(self._run)
        values = {
            **{key: value for key, value in recorded.items() if key not in ("budget", "auto")},
            "every": self.every,
            **settings,
        }
        try:
            plan = plans.plan_of(plans.SimulationRequest(name, load_config(values)), self._run, self._costs)
        except ConfigError:
            return None
        shown = {key: values[key] for key in _SECTIONS if key in values}
        return _Tried(shown, summary_of(replay(self._run, plan), self._run, self._terms))


def recommend(
    run: Run, terms: Terms, limits: Limits, costs: Costs | None = None, beside: Sequence[Summary] = ()
) -> Recommendation:
    """Return the configuration with the least expected damage within the limits.

    ``beside`` are further replays to compare over the same steps. Raises UsageError if nothing keeps the limits."""
    if not limits.any:
        raise UsageError("--recommend needs a limit: --bytes-per-hour, --stall-share or --max-loss-minutes")
    trials = _Trials(run, terms, costs)
    if limits.bytes_per_hour is None and limits.stall_share is None:
        limits = _as_bytes(trials, limits)
    found = [one for one in _candidates(trials, limits) if one is not None and limits.hold(one.summary)]
    if not found:
        raise UsageError(
            f"no configuration keeps these limits at the trace's interval of {trials.every} steps: raise the limits, "
            "or record a trace with a smaller `every`"
        )
    settings = {one.summary.name: one.settings for one in found}
    since = latest_first(one.replayed.timeline for one in (*beside, *(one.summary for one in found)))
    tried = over(tuple({one.summary.name: one.summary for one in found}.values()), since)
    for chosen in sorted(tried, key=lambda one: (one.exposure.total.mean, one.written)):
        request = plans.SimulationRequest(
            chosen.name, load_config(parse_yaml(_text(settings[chosen.name]), "the recommendation").values)
        )
        again = summary_of(replay(run, plans.plan_of(request, run, costs)), run, terms)
        if limits.hold(again):
            ordered = sorted(tried, key=lambda one: one.exposure.total.mean)
            notes = tuple(plans.remarks(request, run))
            return Recommendation(chosen, tuple(ordered), settings[chosen.name], limits, since, notes)
    raise UsageError(
        "these limits are kept only by settings of the recorded run that a recommendation omits: replay "
        "configurations with --policy FILE instead"
    )


def later_per_hour(one: Summary) -> float:
    """Return bytes per hour without the first save of a store, which is always full."""
    return one.later / one.hours if one.hours else math.inf


def _as_bytes(trials: _Trials, limits: Limits) -> Limits:
    """Limit bytes to those of full saves that keep the loss; a time limit alone permits saving everything."""
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
        most = {"bytes_per_hour": limits.bytes_per_hour, "stall_share": limits.stall_share}
        spend = {key: value for key, value in most.items() if value is not None}
        yield trials.of(f"budget {encoding}", {"policy": "budget", "encoding": encoding, "budget": spend})


def _seldom(trials: _Trials, settings: Mapping[str, Any], name: str) -> Iterator[_Tried]:
    for multiple in _MULTIPLES:
        every = trials.every * multiple
        found = trials.of(f"{name}, every {every}", {**settings, "every": every})
        if found is None or found.summary.saves < 2:
            return
        yield found


def _first(trials: _Trials, settings: Mapping[str, Any], name: str, limits: Limits) -> _Tried | None:
    """Return the most frequent saving within the limits."""
    return next((one for one in _seldom(trials, settings, name) if limits.hold(one.summary)), None)


def _threshold(trials: _Trials, encoding: str, limits: Limits) -> _Tried | None:
    """Return the lowest threshold within the limits, by bisection."""
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


@dataclass(frozen=True)
class Simulation:
    """What came out. baseline: everything raw at every recorded decision, which ``summaries`` begins with.

    notes: what limits the figures."""

    run: Run
    summaries: tuple[Summary, ...]
    notes: tuple[str, ...]

    @property
    def baseline(self) -> Summary:
        return self.summaries[0]

    @property
    def window(self) -> tuple[float, float]:
        """Return the steps of the comparison: from the latest first commit to the last decision."""
        replayed = self.baseline.replayed
        end = replayed.timeline.end[1]
        return (end if replayed.since is None else replayed.since[1]), end


def read_trace(path: Path) -> Trace:
    """Read a trace file, after the full one before it. Raises UsageError if it is unreadable or not a trace."""
    with (
        system_errors("read", f"the trace {path}", "; give the file STORE.trace.jsonl", UsageError),
        opened(path) as file,
    ):
        trace = read_lines(file)
    if not trace.lines:
        raise UsageError(f"{path} is not a drift trace: give the file that a job writes, STORE.trace.jsonl")
    return trace


def simulated(
    trace: Trace,
    policies: Sequence[str],
    terms: Terms,
    limits: Limits | None = None,
    speeds: Mapping[str, float | None] | None = None,
) -> tuple[Simulation, Recommendation | None]:
    """Replay ``trace`` under the given policies and, with ``limits``, recommend a configuration.

    ``speeds``: ``storage_gbps`` and ``copy_gbps``, instead of the recorded speeds."""
    run = run_of(trace)
    costs, recorded = _costs(run, speeds or {}), plans.recorded_settings(run)
    wanted = [plans.requests_for(text, recorded) for text in policies] or ([] if limits else _by_default(run))
    found = simulate(trace, run, wanted, terms, costs)
    if limits is None:
        return found, None
    chosen = recommend(run, found.baseline.terms, limits, costs, found.summaries)
    summaries = over(found.summaries, chosen.since)
    notes = (*found.notes, *window_notes((*summaries, *chosen.tried)), *chosen.notes)
    return replace(found, summaries=summaries, notes=tuple(dict.fromkeys(notes))), chosen


def simulate(
    trace: Trace, run: Run, wanted: Sequence[plans.SimulationRequest], terms: Terms, costs: Costs | None = None
) -> Simulation:
    """Replay the run under each configuration; ``costs`` replace the recorded ones."""
    recorded = plans.recorded_config(run)
    notes = list(_notes(trace, run, recorded, costs))
    summaries = []
    for one in (plans.SimulationRequest(BASELINE, Config(every=recorded.every)), *wanted):
        notes += plans.remarks(one, run)
        replayed = replay(run, plans.plan_of(one, run, costs))
        summaries.append(summary_of(replayed, run, terms))
        if replayed.failures:
            first = replayed.failures[0]
            notes.append(
                f"{one.name}: the policy failed at {len(replayed.failures)} of {len(replayed.decisions)} decisions (it "
                f"{first.what}{f' at {first.place}' if first.place else ''}); everything is saved there, as in a job"
            )
        known = plans.knows_policy(run) and costs is None
        if known and plans.same_configuration(one.config, recorded) and not replayed.as_recorded:
            notes.append(f"{one.name}: this is the recorded configuration, but the replay differs from the recording")
        if replayed.exposure.unknown:
            notes.append(f"{one.name}: some layer slots have no movement in the trace and are left out")
    compared = over(summaries, latest_first(one.replayed.timeline for one in summaries))
    return Simulation(run, compared, tuple(dict.fromkeys((*notes, *window_notes(compared)))))


def window_notes(summaries: Sequence[Summary]) -> Iterator[str]:
    """Yield caveats of the comparison window."""
    for one in summaries:
        if one.saves < 2:
            yield f"{one.name}: commits {('never', 'once')[one.saves]} in this run, too rarely to compare"
    since, timeline = summaries[0].replayed.since, summaries[0].replayed.timeline
    inside, whole = timeline.steps(since), timeline.steps()
    if since is not None and 2 * inside < whole:
        late = next(one.name for one in summaries if one.replayed.timeline.first == since)
        yield (
            f"configurations are compared over {inside:.0f} of {whole:.0f} steps only: {late} has its first commit at "
            f"step {since[1]:.0f}; leave it out, or record a longer run"
        )


def _by_default(run: Run) -> list[plans.SimulationRequest]:
    config = plans.recorded_config(run)
    name = config.policy if isinstance(config.policy, str) else str(config.policy.get("name"))
    known = plans.knows_policy(run)
    return [plans.SimulationRequest(f"as recorded ({name})" if known else f"{name}, for the recorded policy", config)]


def _costs(run: Run, speeds: Mapping[str, float | None]) -> Costs | None:
    storage, copies = speeds.get("storage_gbps"), speeds.get("copy_gbps")
    if storage is None and copies is None:
        return None
    stall = run.costs.stall if copies is None else _at(1e9 * copies * run.segments[-1].job.world_size)
    write = run.costs.write if storage is None else _at(1e9 * storage)
    return Costs(stall, write, run.costs.overhead)


def _at(bytes_per_second: float) -> Fitted:
    if bytes_per_second <= 0:
        raise UsageError("--storage-gbps and --copy-gbps must be above 0")
    found = Fitted()
    for nbytes in (1e12, 2e12):
        found.learn(nbytes, nbytes / bytes_per_second)
    return found


def _notes(trace: Trace, run: Run, recorded: Config, costs: Costs | None) -> list[str]:
    found = []
    if not plans.knows_policy(run):
        found.append(
            "the recorded policy is not built in, and a trace must not run code: name it with --policy to replay it"
        )
    if trace.skipped:
        found.append(f"{trace.skipped} lines of the trace are torn or of a later release and are skipped")
    if not any(segment.moved for segment in run.segments):
        found.append(
            "the trace holds no movement over several ages (`trace: {anchors: ...}` was 0): "
            "drift is taken to grow like age^0.75 from the one age that was recorded"
        )
    if costs is None and run.costs.write.cost(1e9) == 0.0:
        found.append(
            "nothing was written in this run, so save durations are unknown and taken as 0: give --storage-gbps"
        )
    if (costs is None or costs.stall is run.costs.stall) and any(segment.job.observing for segment in run.segments):
        found.append("an observing run copies nothing, so the stall is that of measuring alone: give --copy-gbps")
    if recorded.encode == "staging":
        found.append("stall is computed from raw bytes, though this run copied encoded ones")
    return found
