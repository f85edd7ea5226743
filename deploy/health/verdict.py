"""Summarise all checks in one sentence: whether the run is safe now. Pure."""

from dataclasses import dataclass

from deploy.format import plural, span_text, steps_text
from deploy.health.checks import Loss, checks, loss_of_node, loss_of_process
from deploy.health.facts import ORDER, Check, Facts, Level

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
        """Return the checks that need attention, worst first."""
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
    status = facts.status
    if status is None:
        return f"The store cannot be opened: {facts.trouble}"
    node = loss_of_node(facts)
    if status.resume is None:
        return _nothing(facts, node)
    how = _how(facts)
    if not facts.running:
        behind = f", {steps_text(node.steps)} before the last known step" if node.steps and round(node.steps) else ""
        seen = (
            "No job is running"
            if not facts.remote_host or facts.current or facts.closed
            else "No running job is visible from here"
        )
        return f"{seen}. A restart now resumes at step {node.back_to}{behind}, {how}."
    process = loss_of_process(facts)
    if process.memory is not None:
        return (
            f"If the job failed now, it would resume from memory at step {process.back_to}{_lost(process)}; if this "
            f"node failed, at step {node.back_to}{_lost(node)}, {how}."
        )
    return f"If the job failed now, it would resume at step {node.back_to}{_lost(node)}, {how}."


def _nothing(facts: Facts, node: Loss) -> str:
    status = facts.status
    assert status is not None
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


def _how(facts: Facts) -> str:
    assert facts.status is not None and facts.status.resume is not None
    resume = facts.status.resume
    if resume.exact or resume.as_found:
        return "bit for bit" if resume.exact else "as it was imported"
    if resume.fallbacks:
        units = plural(len(resume.fallbacks), "layer slot")
        return f"with {units} in an older version because of damage"
    if resume.max_staleness > 0:
        return f"as a composite whose layers are up to {plural(resume.max_staleness, 'step')} old"
    return "rounded by its lossy encoding"
