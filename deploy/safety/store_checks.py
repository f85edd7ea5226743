"""Judgements of what a store holds: its newest commit, what a resume gives, its bytes, its disk. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.cli.text import drift_text, plural, size_text
from deploy.safety.check import AHEAD, FLOOR, LATE, LONG, VERY_LATE, Check, Level, typed
from deploy.safety.facts import Facts, moment
from deploy.safety.words import ago_text, clock, span_text
from store.text import listed

_FEW_SAVES = 3
"""Full saves that a disk should have room for."""


def check_commit(facts: Facts) -> Check:
    """The newest commit, and whether it is late."""
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
    """What a resume gives."""
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
    """Whether anybody read the bytes again."""
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
    """The newest commit that a job went on from."""
    if facts.proven is None:
        return Check("Proven", "plain", "no commit yet", "none was resumed from so far; driftpoint merge tries one out")
    return Check("Proven", "good", f"step {facts.proven.step}", "a job resumed from it and took a step")


def check_disk(facts: Facts) -> Check:
    """Room for more."""
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
    """The commits that retention left."""
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
    """Seconds between two commits: of this incarnation, by its trace, else of those that the store keeps; where there
    were not two yet, between decisions. At least the time to the next decision. None where nobody knows."""
    pulse = facts.current
    if pulse is None:
        return facts.commit_gap
    found = next((gap for gap in (pulse.save_gap, facts.commit_gap, pulse.decision_gap) if gap is not None), None)
    gaps = [gap for gap in (found, pulse.next_gap) if gap is not None]
    return max(gaps, default=None)


def full_bytes(facts: Facts) -> int:
    """Of a save of everything: raw by the trace, else as stored now. 0: not known."""
    if facts.current is not None and facts.current.full_bytes:
        return facts.current.full_bytes
    certificate = None if facts.status is None else facts.status.certificate
    return 0 if certificate is None else sum(unit.nbytes for unit in certificate.units)


def retention_text(facts: Facts) -> str:
    """The rule that decides which commits stay, where the trace tells it."""
    if facts.current is None:
        return ""
    found = facts.current.job.settings.get("retention")
    rule = found if isinstance(found, Mapping) else {}
    last, every, spaced = rule.get("keep_last", 3), rule.get("keep_every"), rule.get("log_spaced", True)
    text = f"; keeps the last {last}"
    text += f", one every {every} steps" if every else ""
    return text + (", and ever sparser ones further back" if spaced else "")


def _verify(facts: Facts) -> str:
    """What to do about damage: find out what is damaged, or, where that is known, why."""
    if facts.checked is None or not facts.checked.damaged:
        return typed("verify", facts.root)
    return "look at the disk, and who deletes files there; what is damaged goes as newer saves take its place"
