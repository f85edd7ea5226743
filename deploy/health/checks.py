"""Judge every aspect of a run: its commits, its saves, its memory, and the cost of a failure. Pure.

The cost is derived from the newest commit, the newest snapshot in memory and the job's position in the trace.
Quantities that the trace does not give stay unknown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deploy.format import ago_text, clock, plural, size_text, span_text, steps_text
from deploy.health.facts import FLOOR, LATE, ORDER, SKIPPED, Check, Facts, Level, parse_time, shell_command
from deploy.store_status import Resume, StoreStatus, resume_kind
from store.certificate import FOUND
from store.names import SaveId
from store.text import listed

_VERY_LATE = 10.0  # multiple of the usual interval after which a commit is very late (``bad``)
_LONG = 3600.0  # seconds without a commit that need attention if the usual interval is unknown
_AHEAD = 120.0  # accepted difference between the clocks of two machines, in seconds
_FEW_SAVES = 3  # full saves for which a disk should have space
_LOG = "read the job's log: the disk may be full or read-only, or a rank may hang"


def check_commit(facts: Facts) -> Check:
    """Check the age of the newest commit."""
    if (newest := facts.newest) is None:
        level: Level = "bad" if facts.running or (facts.status is not None and facts.status.saves) else "look"
        text = "none that can be read" if facts.status is not None and facts.status.saves else "none yet"
        return Check("Newest commit", level, text)
    made, usual = parse_time(newest.created), usual_gap(facts)
    age = None if made is None else facts.now - made
    note = newest.save.name + ("" if made is None else f", {clock(made)} UTC")
    if usual is not None:
        note += f"; usually one every {span_text(usual)}"
    text = f"step {newest.step}" + ("" if age is None else f", {ago_text(age)}")
    if age is not None and age < -_AHEAD:
        return Check("Newest commit", "look", text, note, "synchronise the clocks: otherwise late commits go unnoticed")
    level = _lateness(facts, age, usual)
    todo = "" if level == "good" else "read the job's log: saves are late or failing, or training hangs"
    return Check("Newest commit", level, text, note, todo)


def check_kind(facts: Facts, status: StoreStatus) -> Check:
    """Check the commit that a resume would take."""
    resume, name = status.resume, "A resume gives"
    if resume is None:
        todo = shell_command("verify", facts.root) if status.saves else ""
        level: Level = "bad" if status.saves else "look"
        return Check(name, level, "nothing", status.problems[0] if status.problems else "", todo)
    if (hurt := _not_as_saved(facts, status, resume, name)) is not None:
        return hurt
    word, _, note = resume_kind(resume).partition(": ")
    note = "every layer bit for bit" if resume.exact else note
    if resume.goes_on_at != resume.step:
        note += f"; resumes at step {resume.goes_on_at}"
    if resume.journal is not None:
        note += f"; the journal leads to step {resume.journal}"
    chosen = not any(problem.startswith(FOUND) for problem in resume.problems)
    return Check(name, "good" if chosen else "look", f"step {resume.step}, {word}", note)


def _not_as_saved(facts: Facts, status: StoreStatus, resume: Resume, name: str) -> Check | None:
    """Return the check of a resume that does not take the newest commit as it was saved."""
    if facts.checked is not None and resume.save in facts.checked.damaged:
        level: Level = "look" if len(facts.checked.damaged) < len(facts.checked.commits) else "bad"
        note = "a resume checks every byte, and takes older versions of what is damaged, or an older commit"
        return Check(name, level, f"not what was saved at step {resume.step}: bytes are damaged", note, _verify(facts))
    if resume.fallbacks:
        units = plural(len(resume.fallbacks), "layer slot")
        note = f"{units} in an older version because of damage: {listed(resume.fallbacks, 4)}"
        return Check(name, "look", f"step {resume.step}, with older versions of damaged slots", note, _verify(facts))
    if status.newest is None or resume.save != status.newest.save.name or resume.save != status.saves[0].name:
        why = "newer ones are suspect" if status.saves[0] in status.suspects else "newer ones are damaged"
        told = status.problems[0] if status.problems else ""
        text = f"step {resume.step}, not the newest commit: {why}"
        return Check(name, "look", text, told, shell_command("status", facts.root))
    return None


def check_bytes(facts: Facts, status: StoreStatus) -> Check:
    """Check whether the stored bytes were verified."""
    checked, name = facts.checked, "Bytes"
    worst: Level = "look" if status.resume is not None or not status.saves else "bad"
    if checked is not None and checked.damaged:
        text = f"{plural(len(checked.damaged), 'commit')} damaged"
        return Check(name, worst, text, listed(checked.damaged, 4), _verify(facts))
    if problems := list(dict.fromkeys((*status.problems, *(() if checked is None else checked.problems)))):
        return Check(name, worst, f"{plural(len(problems), 'problem')} found", problems[0], _verify(facts))
    if checked is None:
        return Check(name, "plain", "not verified for this page", "records and sizes are consistent", _verify(facts))
    text = f"{len(checked.commits)} of {plural(len(status.saves), 'commit')} verified, all intact"
    return Check(name, "good", text, "verified just now")


def check_proven(facts: Facts) -> Check:
    """Report the newest commit from which a job has resumed."""
    if facts.proven is None:
        return Check("Proven", "plain", "no commit yet", "no job has resumed yet; driftpoint merge tests a commit")
    return Check("Proven", "good", f"step {facts.proven.step}", "a job resumed from it and completed a step")


def check_disk(facts: Facts) -> Check:
    """Check the free disk space."""
    disk, name = facts.disk, "Disk"
    if disk is None:
        return Check(name, "plain", "unknown")
    text, need = f"{size_text(disk.free)} free", full_bytes(facts)
    if disk.files is not None and disk.files < 1000:
        text = f"only {plural(disk.files, 'file')} can be created"
        return Check(name, "bad", text, "few inodes left", "remove small files")
    if not need:
        return Check(name, "plain", text)
    room = disk.free // need
    level: Level = "bad" if room < 1 else "look" if room < _FEW_SAVES else "good"
    todo = "free space, or see what the store can give: " + shell_command("prune --minimum --dry-run", facts.root)
    if facts.status is not None and len(facts.status.saves) < 2:
        todo = "free space: no commit of the store can be spared"
    todo = todo if level != "good" else ""
    shown = "more than 9999" if room > 9999 else str(room)
    return Check(name, level, text, f"space for {shown} full saves of {size_text(need)}", todo)


def check_kept(facts: Facts, status: StoreStatus) -> Check:
    """Report the commits that retention keeps."""
    saves = status.saves
    if not saves:
        return Check("Kept", "plain", "nothing yet")
    steps = [save.step for save in saves]
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"
    note = f"{span}, {size_text(status.size_bytes)}" if status.size_bytes else span
    died = f"; suspect: {listed([save.name for save in status.suspects], 4)}" if status.suspects else ""
    return Check("Kept", "good", plural(len(saves), "commit"), note + died + retention_text(facts))


def _lateness(facts: Facts, age: float | None, usual: float | None) -> Level:
    if age is None or not facts.running:
        return "good"
    if usual is None:
        return "look" if age > _LONG else "good"
    late = age / max(usual, FLOOR / LATE)
    return "bad" if late > _VERY_LATE else "look" if late > LATE else "good"


def usual_gap(facts: Facts) -> float | None:
    """Return the usual seconds between commits, at least the time to the next decision; None if unknown.

    Taken from this run's trace, else from the store's records, else from the interval between decisions."""
    if (current := facts.current) is None:
        return facts.commit_gap
    found = next((gap for gap in (current.save_gap, facts.commit_gap, current.decision_gap) if gap is not None), None)
    return max([gap for gap in (found, current.next_gap) if gap is not None], default=None)


def full_bytes(facts: Facts) -> int:
    """Return the bytes of a full save: raw by the trace, else as stored; 0 if unknown."""
    if facts.current is not None and facts.current.full_bytes:
        return facts.current.full_bytes
    certificate = None if facts.status is None else facts.status.resume
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
    return text + (", and older ones at increasing distances" if spaced else "")


def _verify(facts: Facts) -> str:
    """Return the advice: verify first or, if the damage is known, find its cause."""
    if facts.checked is None or not facts.checked.damaged:
        return shell_command("verify", facts.root)
    return "check the disk and find what deletes files there; newer saves replace the damaged ones"


@dataclass(frozen=True)
class Loss:
    """Training lost by a failure. ``steps`` and ``seconds`` are None if unknown."""

    back_to: int | None  # step of the resume, None if nothing can be resumed
    at: float | None = None  # current step of the job, as far as known
    steps: float | None = None
    seconds: float | None = None
    memory: SaveId | None = None  # snapshot that the resume would use, which exists as long as the node runs


def loss_of_node(facts: Facts) -> Loss:
    """Return the loss if this node fails, so that only the store remains."""
    resume = None if facts.status is None else facts.status.resume
    at = _at(facts)
    if resume is None:
        return Loss(None, at, at, _seconds(facts, at, None))
    back_to = max(resume.goes_on_at, resume.journal or 0)
    steps = None if at is None else max(0.0, at - back_to)
    newest = facts.newest
    made = None if newest is None or newest.save.name != resume.save else parse_time(newest.created)
    return Loss(back_to, at, steps, _seconds(facts, steps, made))


def loss_of_process(facts: Facts) -> Loss:
    """Return the loss if only the processes fail and restart on this node, so that newer snapshots remain."""
    stored, save = loss_of_node(facts), in_memory_versions(facts)
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
    if (current := facts.current) is None:
        return None
    ended = None if current.newest is None else float(current.newest.step)
    at = current.step_at(facts.now) if facts.running else ended
    # The store may have been looked at after the trace.
    own = facts.newest is not None and facts.newest.epoch == current.job.epoch
    return max(at, float(facts.newest.step)) if at is not None and own and facts.newest is not None else at


def _seconds(facts: Facts, steps: float | None, made: float | None) -> float | None:
    """Return the seconds of lost training: by the job's pace, else since the commit."""
    current = facts.current
    if steps is not None and current is not None and current.step_seconds is not None:
        return steps * current.step_seconds
    return max(0.0, facts.now - made) if made is not None and facts.running else None


def check_loss(facts: Facts) -> Check:
    """Check the cost of a failure now."""
    loss, process = loss_of_node(facts), loss_of_process(facts)
    name = "Lost by a failure now" if facts.running else "Lost by the last end"
    if loss.back_to is None:
        return Check(name, "bad" if facts.running else "plain", "all training so far")
    text = _cost(loss.steps, loss.seconds)
    if facts.current is None:
        return Check(name, "plain", text, "the job's step is only in its drift trace")
    if process.memory is not None and process.steps is not None:
        kept = f"if this node fails; {_cost(process.steps, process.seconds)} if only the processes die"
        return Check(name, "good", text, kept)
    verb = "is" if facts.running else "ended"
    return Check(name, "good", text, "" if loss.at is None else f"training {verb} at about step {loss.at:.0f}")


def check_saving(facts: Facts) -> Check:
    """Check that saves succeed, and report their size."""
    current, name = facts.current, "Saves"
    if current is None:
        return Check(name, "plain", "unknown", "needs the drift trace")
    if current.failed:
        level: Level = "bad" if len(current.failed) > 2 else "look"
        reasons = ", ".join(dict.fromkeys(current.failed))
        return Check(name, level, f"{plural(len(current.failed), 'save')} failed since", reasons, _LOG)
    newest = current.newest
    refused = None if newest is None else SKIPPED.get(newest.skipped)
    if refused is not None and refused[0] != "plain":
        return Check(name, refused[0], "none at the last decision", refused[1], _LOG)
    if current.job.observing:
        return Check(name, "look", "none: policy observe saves nothing", "it reports what would be saved", "")
    if not current.saves:
        return Check(name, "plain", "none yet since the last start")
    written, full = sum(one.written for one in current.saves), sum(one.full for one in current.saves)
    text = f"{size_text(round(written / len(current.saves)))} each"
    if full:
        text += f", {100 * written / full:.0f} % of a full one"
    return Check(name, "good", text, f"the last {plural(len(current.saves), 'save')} all committed")


def check_memory(facts: Facts) -> Check:
    """Report the snapshots in this node's memory."""
    memory, name = facts.memory, "Memory of this node"
    if memory is None or (memory.newest is None and memory.part is None):
        problem = "" if memory is None or not memory.problems else memory.problems[0]
        return Check(name, "look" if problem else "plain", "no snapshot", problem)
    alive = "its job is running" if memory.alive else "its job ended: a restart here or driftpoint rescue uses it"
    if memory.newest is None or (memory.part is not None and not memory.alive):
        assert memory.part is not None
        save, there, world = memory.part
        return Check(name, "plain", f"step {save.step}, {there} of {world} ranks", "the others are on other nodes")
    newer = "newer than every commit" if in_memory_versions(facts) is not None else "not newer than the commits"
    ranks = f", all {memory.ranks} ranks" if memory.ranks > 1 else ""
    return Check(name, "good", f"step {memory.newest.step}{ranks}", f"{newer}; {alive}")


def check_finite(facts: Facts) -> Check:
    """Check that all layers are finite."""
    current = facts.current
    if current is None or current.newest is None:
        return Check("Finite", "plain", "unknown", "needs the drift trace")
    if current.sick:
        units = sorted(map(str, current.sick))
        text = f"{plural(len(units), 'layer slot')} with NaN or Inf"
        note = f"{listed(units, 4)}; their last finite version is kept"
        return Check("Finite", "bad", text, note, "stop the job, fix the cause, and resume")
    return Check("Finite", "good", "all layers", "no NaN or Inf at the last decision")


def check_job(facts: Facts) -> Check:
    """Check that a job trains and progresses."""
    status, current, name = facts.status, facts.current, "Job"
    if not facts.running:
        return _no_job(facts, name)
    pid = None if status is None else status.in_use_by
    text = f"process {pid}" if pid else "training" + (f" on {facts.remote_host}" if facts.remote_host else "")
    if current is None:
        return Check(name, "good", text, "its progress is only in its drift trace")
    silent = facts.now - current.last_seen
    usual = max((gap for gap in (current.decision_gap, current.next_gap) if gap is not None), default=usual_gap(facts))
    at = current.step_at(facts.now)
    note = f"at about step {at:.0f}" if at is not None else ""
    if current.step_seconds is not None:
        note += f", {span_text(current.step_seconds)} per step"
    if silent > (_LONG if usual is None else max(FLOOR, LATE * usual)):
        todo = "check for a dead rank, a hanging collective, or a disk that does not answer"
        often = "" if usual is None else f"usually one every {span_text(usual)}"
        return Check(name, "look", f"{text}: no decision for {span_text(silent)}", often, todo)
    return Check(name, "good", text, note)


def _no_job(facts: Facts, name: str) -> Check:
    last_seen = "" if facts.current is None else f"last trace line {ago_text(facts.now - facts.current.last_seen)}"
    if facts.closed:
        return Check(name, "plain", "ended cleanly", last_seen)
    owner = None if facts.status is None else facts.status.owner
    if owner is None or owner.incarnation is None:
        noted = "" if facts.current is None else "; how it ended is recorded only with every: auto"
        return Check(name, "plain", "none on this machine", last_seen + noted)
    if facts.remote_host and facts.current is None:
        note = f"the newest job started on {facts.remote_host}; it neither ended cleanly nor commits"
        return Check(name, "look", "unknown", note, f"check {facts.remote_host}; name its drift trace with --trace")
    todo = "find the cause and restart it; driftpoint run restarts it by itself"
    return Check(name, "look", "ended unexpectedly", last_seen, todo)


def _cost(steps: float | None, seconds: float | None) -> str:
    if steps is None:
        return "unknown" if seconds is None else f"up to {span_text(seconds)} of training"
    if round(steps) == 0:
        return "nothing"
    return steps_text(steps) + (f", {span_text(seconds)} of training" if seconds is not None else "")


def checks(facts: Facts) -> Iterator[Check]:
    """Yield all checks, most important first."""
    if (status := facts.status) is None:
        yield Check("Store", "bad", "cannot be opened", facts.trouble)
    else:
        yield check_commit(facts)
        yield check_loss(facts)
        yield check_kind(facts, status)
        yield check_saving(facts)
        yield check_bytes(facts, status)
        yield check_proven(facts)
        yield check_memory(facts)
    yield check_disk(facts)
    if status is not None:
        yield check_kept(facts, status)
        yield check_finite(facts)
    yield check_job(facts)


_TITLES: dict[Level, str] = {"good": "Safe", "look": "Needs a look", "bad": "Not safe"}


@dataclass(frozen=True)
class Verdict:
    """Worst level of all checks, a title, and a sentence on the effect of a failure now."""

    level: Level
    title: str
    sentence: str
    checks: tuple[Check, ...]

    @property
    def concerns(self) -> tuple[Check, ...]:
        found = [check for check in self.checks if check.level in ("look", "bad")]
        return tuple(sorted(found, key=lambda check: -ORDER.index(check.level)))


def judge(facts: Facts) -> Verdict:
    """Judge a run."""
    found = tuple(checks(facts))
    level = max((check.level for check in found), key=ORDER.index)
    level = "good" if level == "plain" else level
    return Verdict(level, _TITLES[level], sentence(facts), found)


def sentence(facts: Facts) -> str:
    """Describe the effect of a failure now or, without a running job, of a restart."""
    if (status := facts.status) is None:
        return f"The store cannot be opened: {facts.trouble}"
    node = loss_of_node(facts)
    if status.resume is None:
        return _nothing(facts, status, node)
    how = _how(facts, status.resume)
    if not facts.running:
        behind = f", {steps_text(node.steps)} before the last known step" if node.steps and round(node.steps) else ""
        ended = not facts.remote_host or facts.current or facts.closed
        seen = "No job is running" if ended else "No running job is visible from here"
        return f"{seen}. A restart now resumes at step {node.back_to}{behind}, {how}."
    process = loss_of_process(facts)
    if process.memory is not None:
        return (
            f"If the job failed now, it would resume from memory at step {process.back_to}{_lost(process)}; if this "
            f"node failed, at step {node.back_to}{_lost(node)}, {how}."
        )
    return f"If the job failed now, it would resume at step {node.back_to}{_lost(node)}, {how}."


def _nothing(facts: Facts, status: StoreStatus, node: Loss) -> str:
    if status.saves:
        return f"None of {plural(len(status.saves), 'commit')} can be resumed: a restart now would lose the whole run."
    so_far = f" ({steps_text(node.steps)} so far)" if node.steps else ""
    if facts.running:
        return f"Nothing is saved yet: if the job failed now, it would restart at step 0{so_far}."
    return "Nothing is saved in this store yet: a job would start at step 0."


def _lost(loss: Loss) -> str:
    if loss.steps is None:
        return "" if loss.seconds is None else f" and lose up to {span_text(loss.seconds)} of training"
    if round(loss.steps) == 0:
        return " and lose nothing"
    took = f" ({span_text(loss.seconds)})" if loss.seconds is not None else ""
    return f" and lose {steps_text(loss.steps)}{took}"


def _how(facts: Facts, resume: Resume) -> str:
    if facts.checked is not None and resume.save in facts.checked.damaged:
        return "or earlier, because bytes of that commit are damaged"
    if resume.exact or resume.as_found:
        return "bit for bit" if resume.exact else "as it was imported"
    if resume.fallbacks:
        return f"with {plural(len(resume.fallbacks), 'layer slot')} in an older version because of damage"
    if resume.max_staleness > 0:
        return f"as a composite whose layers are up to {plural(resume.max_staleness, 'step')} old"
    return "rounded by its lossy encoding" if resume.lossy else "not exactly as it was"
