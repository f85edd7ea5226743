"""Judge every aspect of a run: its commits, its saves, its memory, and the cost of a failure. Pure.

The cost is derived from the newest commit, the newest snapshot in memory and the job's position in the trace.
Quantities that the trace does not give stay unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deploy.format import ago_text, clock, drift_text, plural, size_text, span_text, steps_text
from deploy.health.facts import AHEAD, FLOOR, LATE, LONG, VERY_LATE, Check, Facts, InMemory, Level, moment, typed
from store.names import SaveId
from store.text import listed

_FEW_SAVES = 3
"""Full saves for which a disk should have space."""


def check_commit(facts: Facts) -> Check:
    """Check the age of the newest commit."""
    newest = facts.newest
    if newest is None:
        level: Level = "bad" if facts.running or (facts.status is not None and facts.status.saves) else "look"
        text = "none that can be read" if facts.status is not None and facts.status.saves else "none yet"
        return Check("Newest commit", level, text)
    made, usual = moment(newest.created), usual_gap(facts)
    age = None if made is None else facts.now - made
    note = newest.save.name + ("" if made is None else f", {clock(made)} UTC")
    if usual is not None:
        note += f"; usually one every {span_text(usual)}"
    text = f"step {newest.step}" + ("" if age is None else f", {ago_text(age)}")
    if age is not None and age < -AHEAD:
        return Check("Newest commit", "look", text, note, "set the clocks: nobody can tell whether commits are late")
    level = _lateness(facts, age, usual)
    todo = "" if level == "good" else "look at the job's log: saves are late, failing, or training stands still"
    return Check("Newest commit", level, text, note, todo)


def check_kind(facts: Facts) -> Check:
    """Check the commit that a resume would take."""
    status = facts.status
    assert status is not None
    resume, name = status.resume, "A resume gives"
    if resume is None:
        todo = typed("verify", facts.root) if status.saves else ""
        level: Level = "bad" if status.saves else "look"
        return Check(name, level, "nothing", status.problems[0] if status.problems else "", todo)
    if resume.fallbacks:
        units = plural(len(resume.fallbacks), "layer slot")
        note = f"{units} in an older version than committed, because of damage: {listed(resume.fallbacks, 4)}"
        return Check(name, "look", f"step {resume.step}, with damage worked around", note, _verify(facts))
    if status.newest is None or resume.save != status.newest.save.name or resume.save != status.saves[0].name:
        why = "jobs died of newer ones" if status.suspects else "newer ones are damaged"
        told = status.problems[0] if status.problems else ""
        return Check(
            name, "look", f"step {resume.step}, not the newest commit: {why}", told, typed("status", facts.root)
        )
    if resume.exact:
        return Check(name, "good", f"step {resume.step}, exact", "every layer as it was, to the last bit")
    if resume.max_staleness <= 0:
        rounded = ", ".join(resume.lossy)
        return Check(
            name, "good", f"step {resume.step}, rounded", f"to {rounded}; drift up to {drift_text(resume.max_drift)}"
        )
    note = f"layers up to {plural(resume.max_staleness, 'step')} old, drift up to {drift_text(resume.max_drift)}"
    if resume.lossy:
        note += f", rounded to {', '.join(resume.lossy)}"
    if resume.goes_on_at != resume.step:
        note += f"; goes on at step {resume.goes_on_at}"
    return Check(name, "good", f"a composite of step {resume.step}", note)


def check_bytes(facts: Facts) -> Check:
    """Check whether the stored bytes were verified."""
    checked, name = facts.checked, "Bytes"
    status = facts.status
    assert status is not None
    worst: Level = "look" if status.resume is not None or not status.saves else "bad"
    if checked is not None and checked.damaged:
        return Check(
            name, worst, f"{plural(len(checked.damaged), 'commit')} damaged", listed(checked.damaged, 4), _verify(facts)
        )
    problems = list(dict.fromkeys((*status.problems, *(() if checked is None else checked.problems))))
    if problems:
        return Check(name, worst, f"{plural(len(problems), 'problem')} found", problems[0], _verify(facts))
    if checked is None:
        return Check(name, "plain", "not read again since written", "records and sizes are in order", _verify(facts))
    text = f"{checked.commits} of {plural(len(status.saves), 'commit')} read, all as written"
    return Check(name, "good", text, f"read by {checked.who}" if checked.who != "just now" else "read just now")


def check_proven(facts: Facts) -> Check:
    """Report the newest commit from which a job has resumed."""
    if facts.proven is None:
        return Check("Proven", "plain", "no commit yet", "none was resumed from so far; driftpoint merge tries one out")
    return Check("Proven", "good", f"step {facts.proven.step}", "a job resumed from it and took a step")


def check_disk(facts: Facts) -> Check:
    """Check the free disk space."""
    disk, name = facts.disk, "Disk"
    if disk is None:
        return Check(name, "plain", "not known")
    text = f"{size_text(disk.free)} free"
    need = full_bytes(facts)
    if disk.files is not None and disk.files < 1000:
        return Check(name, "bad", f"room for {plural(disk.files, 'file')} only", "out of inodes", "remove small files")
    if not need:
        return Check(name, "plain", text)
    room = disk.free // need
    level: Level = "bad" if room < 1 else "look" if room < _FEW_SAVES else "good"
    todo = f"free space, or {typed('prune --dry-run', facts.root)}" if level != "good" else ""
    shown = "more than 9999" if room > 9999 else str(room)
    return Check(name, level, text, f"room for {shown} full saves of {size_text(need)}", todo)


def check_kept(facts: Facts) -> Check:
    """Report the commits that retention keeps."""
    status = facts.status
    assert status is not None
    saves = status.saves
    if not saves:
        return Check("Kept", "plain", "nothing yet")
    steps = [save.step for save in saves]
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"
    size = f", {size_text(status.size_bytes)}" if status.size_bytes else ""
    note = f"{span}{size}"
    died = f"; jobs died of {listed([save.name for save in status.suspects], 4)}" if status.suspects else ""
    return Check("Kept", "good", plural(len(saves), "commit"), note + died + retention_text(facts))


def _lateness(facts: Facts, age: float | None, usual: float | None) -> Level:
    if age is None or not facts.running:
        return "good"
    if usual is None:
        return "look" if age > LONG else "good"
    late = age / max(usual, FLOOR / LATE)
    return "bad" if late > VERY_LATE else "look" if late > LATE else "good"


def usual_gap(facts: Facts) -> float | None:
    """Return the usual seconds between commits, at least the time to the next decision; None if unknown.

    Taken from this run's trace, else from the store's records, else from the interval between decisions.
    """
    pulse = facts.current
    if pulse is None:
        return facts.commit_gap
    found = next((gap for gap in (pulse.save_gap, facts.commit_gap, pulse.decision_gap) if gap is not None), None)
    gaps = [gap for gap in (found, pulse.next_gap) if gap is not None]
    return max(gaps, default=None)


def full_bytes(facts: Facts) -> int:
    """Return the bytes of a full save: raw by the trace, else as stored; 0 if unknown."""
    if facts.current is not None and facts.current.full_bytes:
        return facts.current.full_bytes
    certificate = None if facts.status is None else facts.status.certificate
    return 0 if certificate is None else sum(unit.nbytes for unit in certificate.units)


def retention_text(facts: Facts) -> str:
    """Describe the retention rule, if the trace has it."""
    if facts.current is None:
        return ""
    found = facts.current.job.settings.get("retention")
    rule = found if isinstance(found, Mapping) else {}
    last, every, spaced = rule.get("keep_last", 3), rule.get("keep_every"), rule.get("log_spaced", True)
    text = f"; keeps the last {last}"
    text += f", one every {every} steps" if every else ""
    return text + (", and ever sparser ones further back" if spaced else "")


def _verify(facts: Facts) -> str:
    """Return the advice: verify first or, if the damage is known, find its cause."""
    if facts.checked is None or not facts.checked.damaged:
        return typed("verify", facts.root)
    return "look at the disk, and who deletes files there; what is damaged goes as newer saves take its place"


@dataclass(frozen=True)
class Loss:
    """Training lost by a failure.

    Attributes:
        back_to: step of the resume, None if nothing can be resumed.
        at: current step of the job, as far as known.
        steps, seconds: training lost, None if unknown.
        memory: snapshot that the resume would use, which exists as long as the node runs.
    """

    back_to: int | None
    at: float | None = None
    steps: float | None = None
    seconds: float | None = None
    memory: SaveId | None = None


def loss_of_node(facts: Facts) -> Loss:
    """Return the loss if this node fails, so that only the store remains."""
    resume = None if facts.status is None else facts.status.resume
    at = _at(facts)
    if resume is None:
        steps = at if at is not None else None
        return Loss(None, at, steps, _seconds(facts, steps, None))
    steps = None if at is None else max(0.0, at - resume.goes_on_at)
    newest = facts.newest
    made = None if newest is None or newest.save.name != resume.save else moment(newest.created)
    return Loss(resume.goes_on_at, at, steps, _seconds(facts, steps, made))


def loss_of_process(facts: Facts) -> Loss:
    """Return the loss if only the processes fail and restart on this node, so that newer snapshots remain."""
    stored = loss_of_node(facts)
    save = in_memory_versions(facts)
    if save is None:
        return stored
    steps = None if stored.at is None else max(0.0, stored.at - save.step)
    return Loss(save.step, stored.at, steps, _seconds(facts, steps, None), save)


def in_memory_versions(facts: Facts) -> SaveId | None:
    """Return the snapshot in memory that a restart on this node would take, if newer than every commit."""
    if facts.memory is None or facts.memory.newest is None or facts.status is None:
        return None
    newest, status = facts.memory.newest, facts.status
    return newest if all(newest > save for save in status.saves) else None


def _at(facts: Facts) -> float | None:
    """Return the step of training now, or when it ended."""
    pulse = facts.current
    if pulse is None:
        return None
    at = pulse.step_at(facts.now) if facts.running else None if pulse.newest is None else float(pulse.newest.step)
    # The store may have been looked at after the trace.
    own = facts.newest is not None and facts.newest.epoch == pulse.job.epoch
    return max(at, float(facts.newest.step)) if at is not None and own and facts.newest is not None else at


def _seconds(facts: Facts, steps: float | None, made: float | None) -> float | None:
    """Return the seconds of lost training: by the job's pace, else since the commit."""
    pulse = facts.current
    if steps is not None and pulse is not None and pulse.step_seconds is not None:
        return steps * pulse.step_seconds
    if made is not None and facts.running:
        return max(0.0, facts.now - made)
    return None


_REFUSED: Mapping[str, tuple[Level, str]] = {
    "storage": ("look", "the store could not be claimed"),
    "disagree": ("bad", "the ranks are at different steps"),
    "unsupported": ("bad", "the job is not what was attached any more"),
    "fenced": ("bad", "another job took the store over"),
    "withheld": ("bad", "layers that were never saved hold NaN or Inf"),
}
"""Level and text for each reason why a decision began no save."""

_LOG = "look at the job's log for the reason: a full or read-only disk, or a rank that hangs"


def check_loss(facts: Facts) -> Check:
    """Check the cost of a failure now."""
    loss, process = loss_of_node(facts), loss_of_process(facts)
    name = "Lost by a failure now" if facts.running else "Lost by the last end"
    if loss.back_to is None:
        return Check(name, "bad" if facts.running else "plain", "everything since the beginning")
    text = _cost(loss.steps, loss.seconds)
    if facts.current is None:
        return Check(name, "plain", text, "how far the job is, only its drift trace tells")
    if process.memory is not None and process.steps is not None:
        kept = f"with this node; {_cost(process.steps, process.seconds)} where only the processes die"
        return Check(name, "good", text, kept)
    return Check(name, "good", text, _where(facts, loss.at))


def check_saving(facts: Facts) -> Check:
    """Check that saves succeed, and report their size."""
    pulse, name = facts.current, "Saves"
    if pulse is None:
        return Check(name, "plain", "not known", "the drift trace tells whether they come about")
    if pulse.failed:
        level: Level = "bad" if len(pulse.failed) > 2 else "look"
        reasons = ", ".join(dict.fromkeys(pulse.failed))
        return Check(name, level, f"{plural(len(pulse.failed), 'save')} failed since", reasons, _LOG)
    refused = None if pulse.newest is None or pulse.newest.skipped is None else _REFUSED.get(pulse.newest.skipped)
    if refused is not None:
        return Check(name, refused[0], "the last decision began none", refused[1], _LOG)
    if pulse.job.observing:
        return Check(name, "look", "none: policy observe saves nothing", "it tells what would be saved", "")
    if not pulse.saves:
        return Check(name, "plain", "none yet by this incarnation")
    written, full = sum(one.written for one in pulse.saves), sum(one.full for one in pulse.saves)
    text = f"{size_text(round(written / len(pulse.saves)))} each"
    if full:
        text += f", {100 * written / full:.0f} % of a full one"
    return Check(name, "good", text, f"the last {plural(len(pulse.saves), 'save')} all committed")


def check_memory(facts: Facts) -> Check:
    """Report the snapshots in this node's memory."""
    memory, name = facts.memory, "Memory of this node"
    if memory is None or (memory.newest is None and memory.part is None):
        problem = "" if memory is None or not memory.problems else memory.problems[0]
        return Check(name, "look" if problem else "plain", "holds nothing", problem)
    alive = "its job lives" if memory.alive else "its job is gone: a restart here, or driftpoint rescue, takes it"
    if memory.newest is None or (memory.part is not None and not memory.alive):
        assert memory.part is not None
        save, there, world = memory.part
        return Check(name, "plain", f"step {save.step} of {there} of {world} ranks", "the others are on other nodes")
    newer = "newer than every commit" if in_memory_versions(facts) is not None else "no newer than the commits"
    return Check(name, "good", _version(memory), f"{newer}; {alive}")


def check_finite(facts: Facts) -> Check:
    """Check that all layers are finite."""
    pulse = facts.current
    if pulse is None or not pulse.decisions:
        return Check("Finite", "plain", "not known", "the drift trace tells")
    if pulse.sick:
        units = sorted(map(str, pulse.sick))
        text = f"{plural(len(units), 'layer slot')} with NaN or Inf"
        note = f"{listed(units, 4)}; the last finite version is kept, nothing replaces it"
        return Check("Finite", "bad", text, note, "stop the job, find the cause, and let it resume")
    return Check("Finite", "good", "all layers", "no NaN, no Inf at the last decision")


def check_job(facts: Facts) -> Check:
    """Check that a job trains and progresses."""
    status, pulse, name = facts.status, facts.current, "Job"
    if not facts.running:
        return _no_job(facts, name)
    pid = None if status is None else status.in_use_by
    text = f"process {pid}" if pid else "training" + (f" on {facts.unlocked}" if facts.unlocked else "")
    if pulse is None:
        return Check(name, "good", text, "how it gets on, only its drift trace tells")
    quiet = facts.now - pulse.heard
    usual = max((gap for gap in (pulse.decision_gap, pulse.next_gap) if gap is not None), default=usual_gap(facts))
    at = pulse.step_at(facts.now)
    note = f"at about step {at:.0f}" if at is not None else ""
    if pulse.step_seconds is not None:
        note += f", {span_text(pulse.step_seconds)} a step"
    if quiet > (LONG if usual is None else max(FLOOR, LATE * usual)):
        todo = "look whether it hangs: a rank that died, a collective, a disk that does not answer"
        often = "" if usual is None else f"usually one every {span_text(usual)}"
        return Check(name, "look", f"{text}: no decision for {span_text(quiet)}", often, todo)
    return Check(name, "good", text, note)


def _no_job(facts: Facts, name: str) -> Check:
    heard = _last_heard(facts)
    if facts.closed:
        return Check(name, "plain", "ended as it was meant to", heard)
    if not facts.broken_off:
        noted = "" if facts.current is None else "; how it ended is noted under every: auto alone"
        return Check(name, "plain", "none on this machine", heard + noted)
    if facts.unlocked and facts.current is None:
        note = f"the newest began on {facts.unlocked}, and neither ended as it was meant to nor commits"
        return Check(name, "look", "not known", note, f"look on {facts.unlocked}; --trace names its drift trace")
    return Check(
        name, "look", "ended before its time", heard, "find out why, and start it again; driftpoint run does so"
    )


def _where(facts: Facts, at: float | None) -> str:
    if at is None:
        return ""
    return f"training is at about step {at:.0f}" if facts.running else f"training was last seen at step {at:.0f}"


def _cost(steps: float | None, seconds: float | None) -> str:
    if steps is None:
        return "not known" if seconds is None else f"up to {span_text(seconds)} of training"
    if round(steps) == 0:
        return "nothing"
    return steps_text(steps) + (f", {span_text(seconds)} of training" if seconds is not None else "")


def _last_heard(facts: Facts) -> str:
    pulse = facts.current
    if pulse is None:
        return ""
    return f"last heard of {ago_text(facts.now - pulse.heard)}"


def _version(memory: InMemory) -> str:
    assert memory.newest is not None
    return f"step {memory.newest.step}" + (f", all {memory.ranks} ranks" if memory.ranks > 1 else "")


def checks(facts: Facts) -> Iterator[Check]:
    """Yield all checks, most important first."""
    if facts.status is None:
        yield Check("Store", "bad", "cannot be opened", facts.trouble)
    else:
        yield check_commit(facts)
        yield check_loss(facts)
        yield check_kind(facts)
        yield check_saving(facts)
        yield check_bytes(facts)
        yield check_proven(facts)
        yield check_memory(facts)
    yield check_disk(facts)
    if facts.status is not None:
        yield check_kept(facts)
        yield check_finite(facts)
    yield check_job(facts)
