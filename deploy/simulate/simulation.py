"""Replay a run under several configurations and summarise each: bytes, stall, cost of a failure, money.

The baseline saves everything raw at every decision."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.simulate import plans
from monitor.config.load import Config
from policies.accounting import Fitted
from policies.replay.failure_cost import Position, Spread, goodput, latest_first
from policies.replay.recorded_run import Costs, Run, run_of
from policies.replay.replay import replay
from policies.replay.state import ReplayResult
from store.errors import UsageError, system_errors
from store.names import WEIGHTS
from store.text import listed
from store.trace import Trace, opened, read_lines

BASELINE = "full, raw"
Speeds = Mapping[str, float | None]


@dataclass(frozen=True)
class Terms:
    """Assumed failures, and prices in any one currency."""

    mtbf_hours: tuple[float, ...] | None = None  # mean times between failures of the job, None for 3 h, 12 h and 2 days
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
    def rewound(self) -> Spread:
        """Return the steps that a resume repeats: from the effective step, or the newest if `resume: {at: newest}`."""
        return self.replayed.exposure.rewound if self.replayed.plan.goes_back else self.replayed.exposure.lost

    @property
    def lost_seconds(self) -> float:
        """Return the mean training time lost by a failure, infinite without any commit."""
        return self.rewound.mean * self.step_seconds if self.rewound.weight else math.inf

    def drift(self, weights: bool) -> Spread:
        """Return the drift of the weights, or of all other slots."""
        merged = Spread()
        for slot, spread in self.replayed.exposure.drift.items():
            if (slot == WEIGHTS) == weights:
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


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation. baseline: the first of ``summaries``, everything raw at every recorded decision."""

    run: Run
    summaries: tuple[Summary, ...]
    notes: tuple[str, ...]  # what limits the figures

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
    remedy = "; give the file STORE.trace.jsonl"
    with system_errors("read", f"the trace {path}", remedy, UsageError), opened(path) as file:
        trace = read_lines(file)
    if not trace.lines:
        raise UsageError(f"{path} is not a drift trace: give the file that a job writes, STORE.trace.jsonl")
    return trace


def simulated(trace: Trace, policies: Sequence[str], terms: Terms, speeds: Speeds | None = None) -> Simulation:
    """Replay ``trace`` under the given policies, or as recorded if there are none.

    ``speeds``: ``storage_gbps`` and ``copy_gbps``, instead of the recorded speeds."""
    run = run_of(trace)
    costs, settings = _costs(run, speeds or {}), plans.recorded_settings(run)
    wanted = [plans.requests_for(text, settings) for text in policies] or [_by_default(run)]
    recorded = plans.recorded_config(run)
    notes = list(_notes(trace, run, recorded, costs))
    summaries = []
    for one in (plans.SimulationRequest(BASELINE, Config(every=recorded.every)), *wanted):
        notes += plans.remarks(one, run)
        replayed = replay(run, plans.plan_of(one, run, costs))
        ranks = run.segments[-1].job.world_size
        summaries.append(Summary(one.name, replayed, run.seconds, step_seconds(run), ranks, terms))
        if replayed.failures:
            first = replayed.failures[0]
            notes.append(
                f"{one.name}: the policy failed at {len(replayed.failures)} of {len(replayed.decisions)} decisions (it "
                f"{first.what}{f' at {first.place}' if first.place else ''}); everything is saved there, as in a job"
            )
        known = plans.knows_policy(run) and costs is None
        same = known and one.config.model_dump(exclude=plans.ELSEWHERE) == recorded.model_dump(exclude=plans.ELSEWHERE)
        if same and not replayed.as_recorded:
            notes.append(f"{one.name}: this is the recorded configuration, but the replay differs from the recording")
        if replayed.exposure.unknown:
            notes.append(
                f"{one.name}: {listed(replayed.exposure.left_out)}: the trace of a job has no distance from an earlier "
                "version of theirs (it ended too soon, or they were never saved), so they are left out there"
            )
    compared = over(summaries, latest_first(one.replayed.timeline for one in summaries))
    return Simulation(run, compared, tuple(dict.fromkeys((*notes, *_window_notes(compared)))))


def _window_notes(summaries: Sequence[Summary]) -> Iterator[str]:
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


def _by_default(run: Run) -> plans.SimulationRequest:
    config = plans.recorded_config(run)
    name = config.policy if isinstance(config.policy, str) else str(config.policy.get("name"))
    known = plans.knows_policy(run)
    return plans.SimulationRequest(f"as recorded ({name})" if known else f"{name}, for the recorded policy", config)


def _costs(run: Run, speeds: Speeds) -> Costs | None:
    storage, copies = speeds.get("storage_gbps"), speeds.get("copy_gbps")
    if storage is None and copies is None:
        return None
    stall = run.costs.stall if copies is None else _at_speed(1e9 * copies * run.segments[-1].job.world_size)
    write = run.costs.write if storage is None else _at_speed(1e9 * storage)
    return Costs(stall, write, run.costs.overhead)


def _at_speed(bytes_per_second: float) -> Fitted:
    seconds = Fitted()
    for nbytes in (1e12, 2e12):
        seconds.learn(nbytes, nbytes / bytes_per_second)
    return seconds


def _notes(trace: Trace, run: Run, recorded: Config, costs: Costs | None) -> Iterator[str]:
    if not plans.knows_policy(run):
        yield "the recorded policy is not built in, and a trace must not run code: name it with --policy to replay it"
    if trace.skipped:
        yield f"{trace.skipped} lines of the trace are torn or of a later release and are skipped"
    if not any(segment.moved for segment in run.segments):
        yield (
            "the trace holds no movement over several ages (`trace: {anchors: ...}` was 0): "
            "drift is taken to grow like age^0.75 from the one age that was recorded"
        )
    if costs is None and run.costs.write.cost(1e9) == 0.0:
        yield "nothing was written in this run, so save durations are unknown and taken as 0: give --storage-gbps"
    if (costs is None or costs.stall is run.costs.stall) and any(segment.job.observing for segment in run.segments):
        yield "an observing run copies nothing, so the stall is that of measuring alone: give --copy-gbps"
    if recorded.encode == "staging":
        yield "stall is computed from raw bytes, though this run copied encoded ones"


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


def summary_json(summary: Summary, baseline: Summary) -> dict[str, Any]:
    """Return a configuration's entry in the JSON output."""
    exposure = summary.replayed.exposure
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
