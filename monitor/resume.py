"""Resume in place: all ranks agree on one commit, read and check everything, and only then change their state.

Whatever can be known to stand in the way is known before the first change, on every rank: a resume that is refused
leaves the job as it was. A unit whose bytes do not match their hash falls back to its previous version, on every
rank alike. Used from the training thread, before training. Collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monitor.adapters.base import Adapter, Place
from monitor.agree import everywhere, on_first
from monitor.chosen import choose, resolved, slots_of
from monitor.fit import Slots, require_model, require_optimizer, require_slots
from monitor.group import Group
from monitor.objects import Loading
from monitor.onward import Onward, find_onward
from monitor.reading import Read, Room, read
from monitor.run_state import UserState, restore_rng
from monitor.settings import ResumeSettings
from store.catalog import Catalog
from store.errors import DriftpointError, ModelMismatchError, StorageError
from store.names import SaveId
from store.record import digest, seal
from store.versions import Bad, Resolution


@dataclass(frozen=True)
class Resumed:
    """What the job stands on now.

    onward: the save whose run state it has, and so the step that it goes on from. notes: what was damaged, skipped or
    converted, for people. rounded: what the live dtypes could not hold, over all ranks; the state is not exact then.
    memory: the version in memory that this is, if it is one. kept: that, and an older one that it consists of in part.
    replicas: ranks of it that peers had kept it of.
    passed_over: how many newer commits it is not, since they are damaged or suspect."""

    resolution: Resolution
    onward: Onward
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
    places: Sequence[Place]


def resume(
    catalog: Catalog, adapter: Adapter, group: Group, user: UserState, room: Room, *, settings: ResumeSettings
) -> Resumed | None:
    """Bring the newest resumable commit into the live job, through ``room``. None where the store holds no commit.

    Raises, on all ranks, before anything has changed: NothingToResumeError where there are commits but none is
    whole; ModelMismatchError; UsageError where an object of the user's does not take its state; DamagedError or
    StorageError where ranks do not see the same store."""
    bad: frozenset[Bad] = frozenset()
    notes: list[str] = []
    while True:
        name, passed_over, newer = on_first(group, lambda bad=bad: choose(catalog, bad))  # type: ignore[misc]
        if name is None:
            return None
        catalog.forget()
        plan = everywhere(
            group,
            lambda name=name, bad=bad: _planned(catalog, SaveId.parse(name), bad, adapter),  # type: ignore[misc]
        )
        _require_alike(plan.resolution, group)
        _require_slots(plan, group)
        onward = find_onward(catalog, plan.resolution, plan.slots, group, user=user, settings=settings)
        if isinstance(onward, Bad):
            bad |= {onward}
            continue
        found = everywhere(group, lambda plan=plan: read(catalog, plan.resolution, plan.places, room))  # type: ignore[misc]
        newly_bad = frozenset().union(*group.gather(found.bad))
        if not newly_bad:
            rounded = tuple(sorted(set().union(*group.gather(found.rounded))))
            notes += [*passed_over, *plan.resolution.problems, *onward.notes, *found.notes, *rounded]
            notes += _afresh(onward.state, user)
            _load(plan, found, onward, adapter, user=user, group=group)
            return Resumed(plan.resolution, onward, tuple(dict.fromkeys(notes)), rounded, passed_over=newer)
        bad |= newly_bad


def _planned(catalog: Catalog, save: SaveId, bad: frozenset[Bad], adapter: Adapter) -> _Plan:
    adapter.check_attached()
    resolution = resolved(catalog, save, bad)
    require_model(resolution.manifest, adapter)
    slots = slots_of(resolution)
    return _Plan(resolution, slots, adapter.expected(slots))


def _require_alike(resolution: Resolution, group: Group) -> None:
    """All ranks found the same versions, each in its own view of the store: else they would load a mixture."""
    found = [[str(unit), version.record.save, *version.record.bases] for unit, version in resolution.versions.items()]
    views = group.gather(digest(seal([resolution.manifest.save.name, found])))
    differing = [rank for rank, view in enumerate(views) if view != views[0]]
    if differing:
        raise StorageError(
            f"rank {differing[0]} finds other versions whole in the store than rank 0: what one of them cannot read is "
            "there for the other. Nothing was resumed; check the mount on both, then start the job anew"
        )


def _require_slots(plan: _Plan, group: Group) -> None:
    mine = sorted({place.fragment.slot for place in plan.places})
    live: set[str] = set().union(*group.gather(mine))
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


def _load(plan: _Plan, found: Read, onward: Onward, adapter: Adapter, *, user: UserState, group: Group) -> None:
    """From the last checks to the last change. The objects come first, since only trying tells whether they can;
    what is known here to the bit comes after them and has the last word."""
    state, generators = onward.state, onward.generators
    everywhere(group, lambda: _require_fit(state, adapter, user))
    loading = everywhere(group, lambda: Loading(state, adapter, user, generators))
    try:
        everywhere(group, loading.load)
        everywhere(group, lambda: _require_unmoved(plan, state, adapter))
    except BaseException:
        loading.undo()
        raise
    everywhere(group, lambda: _change(plan, found, state["framework"], adapter))
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


def _change(plan: _Plan, found: Read, framework: Mapping[str, Any], adapter: Adapter) -> None:
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
