"""Resume in place; certificate; reset the ledger.

Resume in place: all ranks agree on one commit, read and check everything, and only then change their state.

Whatever can be known to stand in the way is known before the first change, on every rank: a resume that is refused
leaves the job as it was. A unit whose bytes do not match their hash falls back to its previous version, on every
rank alike. Used from the training thread, before training. Collective.

What a job stands on after a resume, and what its next saves therefore build on. Training thread; collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from monitor.adapters.base import Adapter, FragmentPlace
from monitor.config.schema import ResumeSettings
from monitor.context import JobContext
from monitor.distributed import Group, run_on_all_ranks, run_on_rank0
from monitor.memory.recovery import MemoryCandidate, newest_on_disk
from monitor.resume.read import (
    ReadBuffers,
    ReadResult,
    Slots,
    read_fragments,
    require_model,
    require_optimizer,
    require_slots,
)
from monitor.resume.select import ResumePoint, resolved, select_commit, select_run_state, slots_of
from monitor.run_state import StateLoader, UserState, restore_rng
from store.catalog import Catalog
from store.certificate import Certificate, certify, mark_memory_sources
from store.errors import DriftpointError, ModelMismatchError, NothingToResumeError, StorageError
from store.names import SaveId, Unit
from store.resolve import RejectedVersion, Resolution
from store.schema import digest, seal


@dataclass(frozen=True)
class ResumeResult:
    """What the job stands on now.

    onward: the save whose run state it has, and so the step that it goes on from. notes: what was damaged, skipped or
    converted, for people. rounded: what the live dtypes could not hold, over all ranks; the state is not exact then.
    memory: the version in memory that this is, if it is one. kept: that, and an older one that it consists of in part.
    replicas: ranks of it that peers had kept it of.
    passed_over: how many newer commits it is not, since they are damaged or suspect."""

    resolution: Resolution
    onward: ResumePoint
    notes: tuple[str, ...]
    rounded: tuple[str, ...]
    memory: SaveId | None = None
    kept: frozenset[SaveId] = frozenset()
    replicas: frozenset[int] = frozenset()
    passed_over: int = 0


@dataclass(frozen=True)
class _Plan:
    """One commit, whole, and where its values are to go on this rank."""

    resolution: Resolution
    slots: Slots
    places: Sequence[FragmentPlace]


def resume(
    catalog: Catalog, adapter: Adapter, group: Group, user: UserState, room: ReadBuffers, *, settings: ResumeSettings
) -> ResumeResult | None:
    """Bring the newest resumable commit into the live job, through ``room``. None where the store holds no commit.

    Raises, on all ranks, before anything has changed: NothingToResumeError where there are commits but none is
    whole; ModelMismatchError; UsageError where an object of the user's does not take its state; DamagedError or
    StorageError where ranks do not see the same store."""
    bad: frozenset[RejectedVersion] = frozenset()
    notes: list[str] = []
    while True:
        name, passed_over, newer = run_on_rank0(group, lambda bad=bad: select_commit(catalog, bad))  # type: ignore[misc]
        if name is None:
            return None
        catalog.forget()
        plan = run_on_all_ranks(
            group,
            lambda name=name, bad=bad: _planned(catalog, SaveId.parse(name), bad, adapter),  # type: ignore[misc]
        )
        _require_alike(plan.resolution, group)
        _require_slots(plan, group)
        onward = select_run_state(catalog, plan.resolution, plan.slots, group, user=user, settings=settings)
        if isinstance(onward, RejectedVersion):
            bad |= {onward}
            continue
        found = run_on_all_ranks(group, lambda plan=plan: read_fragments(catalog, plan.resolution, plan.places, room))  # type: ignore[misc]
        newly_bad = frozenset().union(*group.all_gather(found.bad))
        if not newly_bad:
            rounded = tuple(sorted(set().union(*group.all_gather(found.rounded))))
            notes += [*passed_over, *plan.resolution.problems, *onward.notes, *found.notes, *rounded]
            notes += _afresh(onward.state, user)
            _load(plan, found, onward, adapter, user=user, group=group)
            return ResumeResult(plan.resolution, onward, tuple(dict.fromkeys(notes)), rounded, passed_over=newer)
        bad |= newly_bad


def _planned(catalog: Catalog, save: SaveId, bad: frozenset[RejectedVersion], adapter: Adapter) -> _Plan:
    adapter.check_attached()
    resolution = resolved(catalog, save, bad)
    require_model(resolution.manifest, adapter)
    slots = slots_of(resolution)
    return _Plan(resolution, slots, adapter.expected(slots))


def _require_alike(resolution: Resolution, group: Group) -> None:
    """All ranks found the same versions, each in its own view of the store: else they would load a mixture."""
    found = [[str(unit), version.record.save, *version.record.bases] for unit, version in resolution.versions.items()]
    views = group.all_gather(digest(seal([resolution.manifest.save.name, found])))
    differing = [rank for rank, view in enumerate(views) if view != views[0]]
    if differing:
        raise StorageError(
            f"rank {differing[0]} finds other versions whole in the store than rank 0: what one of them cannot read is "
            "there for the other. Nothing was resumed; check the mount on both, then start the job anew"
        )


def _require_slots(plan: _Plan, group: Group) -> None:
    mine = sorted({place.fragment.slot for place in plan.places})
    live: set[str] = set().union(*group.all_gather(mine))
    require_slots({slot for slots in plan.slots.values() for slot in slots}, live)


def _afresh(state: Mapping[str, Any], user: UserState) -> list[str]:
    """What a commit may lack: one imported from a checkpoint of others has their weights, not their generators."""
    notes = []
    if state["rng"] is None:
        notes.append(
            "the commit holds no random states (imported checkpoints have none): dropout and shuffling start afresh "
            "from this job's own seeds"
        )
    if state["user"] is None and len(user):
        notes.append(f"the commit holds no state of the {len(user)} objects in state=[...]: they start afresh")
    return notes


def _load(
    plan: _Plan, found: ReadResult, onward: ResumePoint, adapter: Adapter, *, user: UserState, group: Group
) -> None:
    """From the last checks to the last change. The objects come first, since only trying tells whether they can;
    what is known here to the bit comes after them and has the last word."""
    state, generators = onward.state, onward.generators
    run_on_all_ranks(group, lambda: _require_fit(state, adapter, user))
    loading = run_on_all_ranks(group, lambda: StateLoader(state, adapter, user, generators))
    try:
        run_on_all_ranks(group, loading.load)
        run_on_all_ranks(group, lambda: _require_unmoved(plan, state, adapter))
    except BaseException:
        loading.undo()
        raise
    run_on_all_ranks(group, lambda: _change(plan, found, state["framework"], adapter))
    adapter.finish_load()
    if generators:
        restore_rng(state["rng"])


def _require_fit(state: Mapping[str, Any], adapter: Adapter, user: UserState) -> None:
    if state["user"] is not None:
        user.require(state["user"])
    require_optimizer(state["framework"], adapter.run_state())
    adapter.check_run_state(state["framework"])


def _require_unmoved(plan: _Plan, state: Mapping[str, Any], adapter: Adapter) -> None:
    """The plan still holds after the user's objects have loaded their state, whatever they reached."""
    if set(adapter.expected(plan.slots)) != set(plan.places):
        raise ModelMismatchError(
            "loading the objects in state=[...] changed the model's or the optimizer's tensors, so that the store fits "
            "them no more; leave out of state=[...] what changes the shape or the dtype of either"
        )
    adapter.check_run_state(state["framework"])


def _change(plan: _Plan, found: ReadResult, framework: Mapping[str, Any], adapter: Adapter) -> None:
    try:
        adapter.prepare_load(plan.slots)
        with torch.no_grad():
            for piece in adapter.held():
                if piece.fragment in found.values:
                    piece.tensor.copy_(found.values[piece.fragment])
        adapter.load_run_state(framework)
    except Exception as error:
        # Everything was checked: what is left is a device out of memory and the like.
        raise DriftpointError(
            f"the resume broke off half-way: {error!r}. The state in memory is neither the old nor the new one, the "
            "store is intact: start the job anew"
        ) from error


_log = logging.getLogger("driftpoint")

T = TypeVar("T")


def mark_from_memory(found: ResumeResult, remembered: MemoryCandidate) -> ResumeResult:
    """The same, told what of it is what memory held: where bytes were wrong there, nothing may be."""
    used = {version.save for version in found.resolution.versions.values()} & {remembered.save, remembered.older}
    kept = frozenset(save for save in used if save is not None)
    if not kept:
        return found
    return replace(found, memory=max(kept), kept=kept, replicas=remembered.replicas)


def resumed(
    attempt: Callable[[Catalog], ResumeResult | None], catalog: Catalog, remembered: MemoryCandidate | None
) -> ResumeResult | None:
    """What a resume brought. attempt: resumes a store. catalog: the store's alone. Collective."""

    def told(found: Catalog) -> ResumeResult | None:
        outcome = attempt(found)
        return (
            outcome
            if remembered is None or found is catalog or outcome is None
            else mark_from_memory(outcome, remembered)
        )

    return memory_or_store(told, catalog, remembered)


def memory_or_store(
    attempt: Callable[[Catalog], T | None], catalog: Catalog, remembered: MemoryCandidate | None
) -> T | None:
    """What an attempt brings with memory on top of the store, else with the store alone. Collective.

    Where the bytes in memory are so wrong that nothing is left to resume, the store may still have something, or
    nothing at all, which is no error: the job begins anew."""
    if remembered is None:
        return attempt(catalog)
    for found in (remembered.catalog, remembered.instead):
        try:
            if found is not None:
                return attempt(found)
        except NothingToResumeError as error:  # alike on all ranks, before anything has changed
            _log.error("memory: %s", error)
    return attempt(catalog)


def build_certificate(found: ResumeResult) -> Certificate:
    """What the job goes on from, rounding by the live dtypes included."""
    certificate = certify(found.resolution)
    for save in found.kept:
        certificate = mark_memory_sources(certificate, save, _kept_by_peers(found))
    exact = certificate.exact and not found.rounded
    return replace(certificate, exact=exact, problems=certificate.problems + found.rounded)


def _kept_by_peers(found: ResumeResult) -> set[Unit]:
    """What consists, in part at least, of replicas."""
    return {
        unit
        for unit, version in found.resolution.versions.items()
        if any(source.part.save == found.memory and source.part.rank in found.replicas for source in version.sources)
    }


def reset_ledger(job: JobContext, catalog: Catalog, found: ResumeResult, step: int) -> None:
    """Have the ledger be what the job stands on at ``step``. catalog: the store's alone.

    What came from memory is no version that a commit could point to. So the ledger keeps to the newest commit, and
    how far the state is from that nobody knows: the next save stores all of it."""
    below = found.resolution
    if found.memory is not None:
        versions = found.resolution.versions.items()
        job.table.lost |= {unit for unit, version in versions if version.save in found.kept}
        newest = newest_on_disk(catalog, job.group)
        if newest is None:
            job.ledger.forget()
            return
        below = newest
    # A full save at each resume might be all that a budget pays for.
    job.ledger.adopt(below, step, renew=not job.config.budget.limited)
