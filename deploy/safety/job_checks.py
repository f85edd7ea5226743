"""Judgements of the job: what a failure would cost it, whether its saves come about, whether it gets on. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.cli.text import plural, size_text
from deploy.safety.check import FLOOR, LATE, LONG, Check, Level
from deploy.safety.facts import Facts
from deploy.safety.loss import loss_of_node, loss_of_process, remembered
from deploy.safety.memory import InMemory
from deploy.safety.store_checks import usual_gap
from deploy.safety.words import ago_text, span_text, steps_text
from store.text import listed

_REFUSED: Mapping[str, tuple[Level, str]] = {
    "storage": ("look", "the store could not be claimed"),
    "disagree": ("bad", "the ranks are at different steps"),
    "unsupported": ("bad", "the job is not what was attached any more"),
    "fenced": ("bad", "another job took the store over"),
    "withheld": ("bad", "layers that were never saved hold NaN or Inf"),
}
"""Why a decision began no save: those that come to no good."""

_LOG = "look at the job's log for the reason: a full or read-only disk, or a rank that hangs"


def check_loss(facts: Facts) -> Check:
    """What a failure now would cost."""
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
    """Whether saves come about, and how large they are."""
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
    """What the memory of this node holds."""
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
    return Check(name, "good", _version(memory), f"{newer}; {alive}")


def check_finite(facts: Facts) -> Check:
    """Whether all layers are."""
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
    """Whether a job trains, and gets on."""
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
