"""A whole simulation: the configurations asked for, beside everything saved raw every time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.simulate.plans import Asked, asked, plan_of, recorded_config, recorded_settings, remarks, same_configuration
from deploy.simulate.recommend import Limits, Recommended, recommend
from deploy.simulate.summary import Summary, Terms, over, summary_of
from monitor.config import Config
from policies.course import latest_first
from policies.pricing import Fitted
from policies.recorded import Costs, Run, run_of
from policies.replay import replay
from store.errors import UsageError
from store.trace import Trace, read_lines

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
        """The first one."""
        return self.summaries[0]

    @property
    def window(self) -> tuple[float, float]:
        """The steps that all are compared over: from the latest of their first commits to the last decision."""
        replayed = self.baseline.replayed
        end = replayed.course.end[1]
        return (end if replayed.since is None else replayed.since[1]), end


def read_trace(path: Path) -> Trace:
    """The trace in a file. UsageError where it cannot be read, or is none."""
    try:
        with path.open("rb") as file:
            trace = read_lines(file)
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror}; give the file STORE.trace.jsonl") from error
    if not trace.lines:
        raise UsageError(f"{path} is no drift trace: give the file that a job writes, STORE.trace.jsonl")
    return trace


def simulated(
    trace: Trace,
    policies: Sequence[str],
    terms: Terms,
    limits: Limits | None = None,
    speeds: Mapping[str, float | None] | None = None,
) -> tuple[Simulation, Recommended | None]:
    """Replay ``trace`` under each of the configurations that ``policies`` name, and look for a better one within
    ``limits`` where there are any. speeds: ``storage_gbps`` and ``copy_gbps``, instead of what was recorded."""
    run = run_of(trace)
    costs = _costs(run, speeds or {})
    wanted = [asked(text, recorded_settings(run)) for text in policies] or ([] if limits else _by_default(run))
    found = simulate(trace, run, wanted, terms, costs)
    if limits is None:
        return found, None
    chosen = recommend(run, found.baseline.terms, limits, costs, found.summaries)
    summaries = over(found.summaries, chosen.since)
    notes = (*found.notes, *window_notes((*summaries, *chosen.tried)), *chosen.notes)
    return replace(found, summaries=summaries, notes=tuple(dict.fromkeys(notes))), chosen


def simulate(trace: Trace, run: Run, wanted: Sequence[Asked], terms: Terms, costs: Costs | None = None) -> Simulation:
    """Replay the run of a trace under each configuration. costs: of saves, instead of the recorded ones."""
    recorded = recorded_config(run)
    notes = list(_notes(trace, run, recorded, costs))
    summaries = []
    for one in (Asked(BASELINE, baseline_config(recorded)), *wanted):
        notes += remarks(one, run)
        replayed = replay(run, plan_of(one, run, costs))
        summaries.append(summary_of(replayed, run, terms))
        if replayed.failures:
            first = replayed.failures[0]
            notes.append(
                f"{one.name}: the policy failed at {len(replayed.failures)} of {len(replayed.made)} decisions (it "
                f"{first.what}{f' at {first.place}' if first.place else ''}); everything is saved there, as live"
            )
        known = recorded_settings(run) is run.settings
        if known and same_configuration(one.config, recorded) and not replayed.as_recorded and costs is None:
            notes.append(f"{one.name}: this is the recorded configuration, and the replay left the recorded path")
        if replayed.exposure.unknown:
            notes.append(f"{one.name}: the movement of some layer slots is not in the trace; they are left out")
    compared = over(summaries, latest_first(one.replayed.course for one in summaries))
    return Simulation(run, compared, tuple(dict.fromkeys((*notes, *window_notes(compared)))))


def window_notes(summaries: Sequence[Summary]) -> Iterator[str]:
    """What is weak about comparing these over the steps that they are compared over."""
    for one in summaries:
        if one.saves < 2:
            yield f"{one.name}: commits {('never', 'once')[one.saves]} in this run, too seldom to be judged by it"
    since, course = summaries[0].replayed.since, summaries[0].replayed.course
    inside, whole = course.steps(since), course.steps()
    if since is not None and 2 * inside < whole:
        late = next(one.name for one in summaries if one.replayed.course.first == since)
        yield (
            f"configurations are compared over {inside:.0f} of {whole:.0f} steps only: {late} has its first commit at "
            f"step {since[1]:.0f}; leave it out, or record a longer run"
        )


def _by_default(run: Run) -> list[Asked]:
    config = recorded_config(run)
    name = config.policy if isinstance(config.policy, str) else str(config.policy.get("name"))
    known = recorded_settings(run) is run.settings
    return [Asked(f"as recorded ({name})" if known else f"{name}, for the recorded policy", config)]


def _costs(run: Run, speeds: Mapping[str, float | None]) -> Costs | None:
    storage, copies = speeds.get("storage_gbps"), speeds.get("copy_gbps")
    if storage is None and copies is None:
        return None
    stall = run.costs.stall if copies is None else _at(1e9 * copies * run.eras[-1].job.world_size)
    write = run.costs.write if storage is None else _at(1e9 * storage)
    return Costs(stall, write, run.costs.overhead)


def _at(bytes_per_second: float) -> Fitted:
    if bytes_per_second <= 0:
        raise UsageError("--storage-gbps and --copy-gbps must be above 0")
    found = Fitted()
    for nbytes in (1e12, 2e12):
        found.learn(nbytes, nbytes / bytes_per_second)
    return found


def baseline_config(recorded: Config) -> Config:
    """Everything, raw, at every recorded decision."""
    return Config(every=recorded.every)


def _notes(trace: Trace, run: Run, recorded: Config, costs: Costs | None) -> list[str]:
    found = []
    if recorded_settings(run) is not run.settings:
        found.append(
            "the recorded policy is not one of ours, and a trace runs no code: name it with --policy to replay it"
        )
    if trace.skipped:
        found.append(f"{trace.skipped} lines of the trace are torn or of a later release, and left out")
    if not any(era.moved for era in run.eras):
        found.append(
            "the trace holds no movement over several ages (`trace: {anchors: ...}` was 0, or drift.method exact): "
            "drift is taken to grow like age^0.75 from the one age that was recorded"
        )
    if costs is None and run.costs.write.cost(1e9) == 0.0:
        found.append(
            "nothing was written in this run, so how long saves take is not known and taken as 0: give --storage-gbps"
        )
    if (costs is None or costs.stall is run.costs.stall) and any(era.job.observing for era in run.eras):
        found.append(
            "a run that only observes copies nothing, so the stall told here is that of measuring alone: "
            "give --copy-gbps"
        )
    if recorded.encode == "staging":
        found.append("stall is told from raw bytes copied, though this run copied encoded ones")
    return found
