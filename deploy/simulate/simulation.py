"""Replay a run under several configurations, beside a baseline that saves everything raw at every decision."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.simulate import plans
from deploy.simulate.summary import Summary, Terms, over, summary_of
from monitor.config.load import Config
from policies.accounting import Fitted
from policies.replay.failure_cost import latest_first
from policies.replay.recorded_run import Costs, Run, run_of
from policies.replay.replay import replay
from store.errors import UsageError, system_errors
from store.trace import Trace, opened, read_lines

BASELINE = "full, raw"


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
    trace: Trace, policies: Sequence[str], terms: Terms, speeds: Mapping[str, float | None] | None = None
) -> Simulation:
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
    return Simulation(run, compared, tuple(dict.fromkeys((*notes, *_window_notes(compared)))))


def _window_notes(summaries: Sequence[Summary]) -> Iterator[str]:
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


def _by_default(run: Run) -> plans.SimulationRequest:
    config = plans.recorded_config(run)
    name = config.policy if isinstance(config.policy, str) else str(config.policy.get("name"))
    known = plans.knows_policy(run)
    return plans.SimulationRequest(f"as recorded ({name})" if known else f"{name}, for the recorded policy", config)


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
