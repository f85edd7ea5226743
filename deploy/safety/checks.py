"""One judgement for each thing that decides whether a run is safe, in words and with what to do. Pure.

Levels: ``good``; ``plain``, nothing to judge; ``look``, a person should look at it some time; ``bad``, work is being
lost or would be.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from deploy.cli.text import drift_text, plural, size_text
from deploy.safety.facts import Facts, moment
from deploy.safety.loss import loss_of_node, loss_of_process, remembered
from deploy.safety.words import ago_text, clock, span_text, steps_text

Level = Literal["good", "plain", "look", "bad"]
ORDER: tuple[Level, ...] = ("plain", "good", "look", "bad")
"""Worst last."""

_LATE, _VERY_LATE = 3.0, 10.0
"""How many times the usual time between commits may pass."""

_FLOOR = 60.0
"""Seconds that nobody is alarmed about."""

_LOG = "look at the job's log for the reason: a full or read-only disk, or a rank that hangs"

_FEW_SAVES = 3
"""Full saves that a disk should have room for."""


@dataclass(frozen=True)
class Check:
    """name: of the thing, short. text: how it stands. note: more of it. todo: what to type or do, '' where nothing."""

    name: str
    level: Level
    text: str
    note: str = ""
    todo: str = ""


def checks(facts: Facts) -> Iterator[Check]:
    """All of them, most telling first."""
    if facts.status is None:
        yield Check("Store", "bad", "cannot be opened", facts.trouble)
    else:
        yield _commit(facts)
        yield _loss(facts)
        yield _kind(facts)
        yield _saving(facts)
        yield _bytes(facts)
        yield _proven(facts)
        yield _memory(facts)
    yield _disk(facts)
    if facts.status is not None:
        yield _kept(facts)
        yield _finite(facts)
    yield _job(facts)


def _commit(facts: Facts) -> Check:
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
    level = _lateness(facts, age, usual)
    todo = "" if level == "good" else "look at the job's log: saves are late, failing, or training stands still"
    return Check("Newest commit", level, text, note, todo)


def _lateness(facts: Facts, age: float | None, usual: float | None) -> Level:
    if age is None or usual is None or not facts.running:
        return "good"
    late = age / max(usual, _FLOOR / _LATE)
    return "bad" if late > _VERY_LATE else "look" if late > _LATE else "good"


def usual_gap(facts: Facts) -> float | None:
    """Seconds between two commits: by the trace, else by the commits that are kept, of one epoch."""
    if facts.pulse is not None and not facts.strange and facts.pulse.save_gap is not None:
        return facts.pulse.save_gap
    if facts.pulse is not None and facts.pulse.decision_gap is not None:
        return facts.pulse.decision_gap
    return None


def _loss(facts: Facts) -> Check:
    loss, process = loss_of_node(facts), loss_of_process(facts)
    name = "Lost by a failure now" if facts.running else "Lost by the last end"
    if loss.back_to is None:
        return Check(name, "bad" if facts.running else "plain", "everything since the beginning")
    text = _cost(loss.steps, loss.seconds)
    if facts.pulse is None or facts.strange:
        return Check(name, "plain", text, "how far the job is, only its drift trace tells")
    if process.memory is not None and process.steps is not None:
        kept = f"with this node; {_cost(process.steps, process.seconds)} where only the processes die"
        return Check(name, "good", text, kept)
    return Check(name, "good", text, _where(facts, loss.at))


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


def _kind(facts: Facts) -> Check:
    status = facts.status
    assert status is not None
    resume, name = status.resume, "A resume gives"
    if resume is None:
        todo = _typed("verify", facts) if status.saves else ""
        level: Level = "bad" if status.saves else "look"
        return Check(name, level, "nothing", status.problems[0] if status.problems else "", todo)
    if resume.fallbacks:
        units = plural(len(resume.fallbacks), "layer slot")
        note = f"{units} in an older version than committed, because of damage: {_listed(resume.fallbacks)}"
        return Check(name, "look", f"step {resume.step}, with damage worked around", note, _verify(facts))
    if status.newest is None or resume.save != status.newest.save.name or resume.save != status.saves[0].name:
        why = "jobs died of newer ones" if status.suspects else "newer ones are damaged"
        told = status.problems[0] if status.problems else ""
        return Check(name, "look", f"step {resume.step}, not the newest commit: {why}", told, _typed("status", facts))
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


def _saving(facts: Facts) -> Check:
    pulse, name = facts.pulse, "Saves"
    if pulse is None or facts.strange:
        return Check(name, "plain", "not known", "the drift trace tells whether they come about")
    if pulse.failed:
        level: Level = "bad" if len(pulse.failed) > 2 else "look"
        reasons = ", ".join(dict.fromkeys(pulse.failed))
        return Check(name, level, f"{plural(len(pulse.failed), 'save')} failed since", reasons, _LOG)
    if pulse.job.observing:
        return Check(name, "look", "none: policy observe saves nothing", "it tells what would be saved", "")
    if not pulse.saves:
        return Check(name, "plain", "none yet by this incarnation")
    written, full = sum(one.written for one in pulse.saves), sum(one.full for one in pulse.saves)
    text = f"{size_text(round(written / len(pulse.saves)))} each"
    if full:
        text += f", {100 * written / full:.0f} % of a full one"
    return Check(name, "good", text, f"the last {plural(len(pulse.saves), 'save')} all committed")


def _bytes(facts: Facts) -> Check:
    checked, name = facts.checked, "Bytes"
    status = facts.status
    assert status is not None
    if checked is None:
        return Check(name, "plain", "not read again since written", "records and sizes are in order", _verify(facts))
    if checked.damaged:
        worst: Level = "look" if status.resume is not None else "bad"
        return Check(
            name, worst, f"{plural(len(checked.damaged), 'commit')} damaged", _listed(checked.damaged), _verify(facts)
        )
    text = f"{checked.commits} of {plural(len(status.saves), 'commit')} read, all as written"
    return Check(name, "good", text, f"read by {checked.who}" if checked.who != "just now" else "read just now")


def _proven(facts: Facts) -> Check:
    if facts.proven is None:
        return Check("Proven", "plain", "no commit yet", "none was resumed from so far; driftpoint merge tries one out")
    return Check("Proven", "good", f"step {facts.proven.step}", "a job resumed from it and took a step")


def _memory(facts: Facts) -> Check:
    memory, name = facts.memory, "Memory of this node"
    if memory is None or (memory.newest is None and memory.part is None):
        problem = "" if memory is None or not memory.problems else memory.problems[0]
        return Check(name, "look" if problem else "plain", "holds nothing", problem)
    alive = "its job lives" if memory.alive else "its job is gone: a restart here, or driftpoint rescue, takes it"
    if memory.newest is None or (memory.part is not None and not memory.alive):
        assert memory.part is not None
        save, there, world = memory.part
        return Check(name, "plain", f"step {save.step} of {there} of {world} ranks", "the others are on other nodes")
    newer = "newer than every commit" if remembered(facts) is not None else "no newer than the commits"
    return Check(name, "good", f"step {memory.newest.step}, all {plural(memory.ranks, 'rank')}", f"{newer}; {alive}")


def _disk(facts: Facts) -> Check:
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
    todo = f"free space, or {_typed('prune --dry-run', facts)}" if level != "good" else ""
    shown = "more than 9999" if room > 9999 else str(room)
    return Check(name, level, text, f"room for {shown} full saves of {size_text(need)}", todo)


def full_bytes(facts: Facts) -> int:
    """Of a save of everything: raw by the trace, else as stored now. 0: not known."""
    if facts.pulse is not None and not facts.strange and facts.pulse.full_bytes:
        return facts.pulse.full_bytes
    certificate = None if facts.status is None else facts.status.certificate
    return 0 if certificate is None else sum(unit.nbytes for unit in certificate.units)


def _kept(facts: Facts) -> Check:
    status = facts.status
    assert status is not None
    saves = status.saves
    if not saves:
        return Check("Kept", "plain", "nothing yet")
    steps = [save.step for save in saves]
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"
    size = f", {size_text(status.size_bytes)}" if status.size_bytes else ""
    note = f"{span}{size}"
    died = f"; jobs died of {_listed([save.name for save in status.suspects])}" if status.suspects else ""
    return Check("Kept", "good", plural(len(saves), "commit"), note + died + retention_text(facts))


def retention_text(facts: Facts) -> str:
    """The rule that decides which commits stay, where the trace tells it."""
    if facts.pulse is None or facts.strange:
        return ""
    found = facts.pulse.job.settings.get("retention") or {}
    last, every, spaced = found.get("keep_last", 3), found.get("keep_every"), found.get("log_spaced", True)
    rule = f"; keeps the last {last}"
    rule += f", one every {every} steps" if every else ""
    return rule + (", and ever sparser ones further back" if spaced else "")


def _finite(facts: Facts) -> Check:
    pulse = facts.pulse
    if pulse is None or facts.strange or not pulse.decisions:
        return Check("Finite", "plain", "not known", "the drift trace tells")
    if pulse.sick:
        units = sorted(map(str, pulse.sick))
        text = f"{plural(len(units), 'layer slot')} with NaN or Inf"
        note = f"{_listed(units)}; the last finite version is kept, nothing replaces it"
        return Check("Finite", "bad", text, note, "stop the job, find the cause, and let it resume")
    return Check("Finite", "good", "all layers", "no NaN, no Inf at the last decision")


def _job(facts: Facts) -> Check:
    status, pulse, name = facts.status, facts.pulse, "Job"
    if not facts.running:
        ended = "ended as it was meant to" if facts.closed else "none on this machine"
        return Check(name, "plain", ended, _last_heard(facts))
    pid = None if status is None else status.in_use_by
    text = f"process {pid}" if pid else "training"
    if pulse is None or facts.strange or pulse.newest is None:
        return Check(name, "good", text)
    quiet, usual = facts.now - pulse.heard, pulse.decision_gap
    at = pulse.step_at(facts.now)
    note = f"at about step {at:.0f}" if at is not None else ""
    if pulse.step_seconds is not None:
        note += f", {span_text(pulse.step_seconds)} a step"
    if usual is not None and quiet > max(_FLOOR, _LATE * usual):
        todo = "look whether it hangs: a rank that died, a collective, a disk that does not answer"
        return Check(
            name, "look", f"{text}: no decision for {span_text(quiet)}", f"usually one every {span_text(usual)}", todo
        )
    return Check(name, "good", text, note)


def _last_heard(facts: Facts) -> str:
    pulse = facts.pulse
    if pulse is None or facts.strange:
        return ""
    return f"last heard of {ago_text(facts.now - pulse.heard)}"


def _verify(facts: Facts) -> str:
    """What to do about damage: find out what is damaged, or, where that is known, why."""
    if facts.checked is None or not facts.checked.damaged:
        return _typed("verify", facts)
    return "look at the disk, and who deletes files there; what is damaged goes as newer saves take its place"


def _typed(command: str, facts: Facts) -> str:
    return f"driftpoint {command} {shlex.quote(str(facts.root))}"


def _listed(names: Iterable[object], most: int = 4) -> str:
    found = [str(name) for name in names]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
