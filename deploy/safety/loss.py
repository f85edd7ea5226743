"""What a failure at this moment would cost: the steps to train again, and the time that takes. Pure.

Told from the newest commit, the newest version in memory, and how far the trace says the job is. What the trace does
not tell stays unknown; nothing is made up.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.safety.facts import Facts, moment
from store.names import SaveId


@dataclass(frozen=True)
class Loss:
    """back_to: the step that a resume goes on at; None where nothing can be resumed. steps, seconds: of training that
    is gone; None where nobody knows. at: the step that the job is at, as far as it is known. memory: the version in
    memory that it is told of, which is there as long as the node is."""

    back_to: int | None
    at: float | None = None
    steps: float | None = None
    seconds: float | None = None
    memory: SaveId | None = None


def loss_of_node(facts: Facts) -> Loss:
    """Were everything on this node lost: what the store gives back."""
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
    """Were only the processes lost, and came back to this node: what memory gives back, where it is newer."""
    stored = loss_of_node(facts)
    save = remembered(facts)
    if save is None:
        return stored
    steps = None if stored.at is None else max(0.0, stored.at - save.step)
    return Loss(save.step, stored.at, steps, _seconds(facts, steps, None), save)


def remembered(facts: Facts) -> SaveId | None:
    """The version in memory that a restart on this node would take: one that is newer than every commit."""
    if facts.memory is None or facts.memory.newest is None or facts.status is None:
        return None
    newest, status = facts.memory.newest, facts.status
    return newest if all(newest > save for save in status.saves) else None


def _at(facts: Facts) -> float | None:
    """The step that training is at, or was when it ended."""
    pulse = facts.current
    if pulse is None:
        return None
    at = pulse.step_at(facts.now) if facts.running else None if pulse.newest is None else float(pulse.newest.step)
    # The store may have been looked at after the trace.
    own = facts.newest is not None and facts.newest.epoch == pulse.job.epoch
    return max(at, float(facts.newest.step)) if at is not None and own and facts.newest is not None else at


def _seconds(facts: Facts, steps: float | None, made: float | None) -> float | None:
    """Of training that has to be done again: by the pace of the job, else since the commit was made."""
    pulse = facts.current
    if steps is not None and pulse is not None and pulse.step_seconds is not None:
        return steps * pulse.step_seconds
    if made is not None and facts.running:
        return max(0.0, facts.now - made)
    return None
