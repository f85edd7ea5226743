"""Which commit, and which save's run state.

Which save's run state a resume goes on with: the one nearest to the effective step that is whole and fits.

Counters, schedules, random states and the user's objects exist only as they were at a save, so they are taken from one
save whole: no scheduler is wound back, nothing is computed. All ranks read theirs and check it, none changes anything;
what cannot be used on one rank is used on none. Knows no tensors of the model. Training thread; collective.

Which commit a resume takes: the newest that is whole. Reads records and no payload; knows no live job.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from monitor.config.schema import ResumeSettings
from monitor.distributed import Group, run_on_all_ranks
from monitor.resume.read import Slots, read_with_retries
from monitor.run_state import UserState, from_tree
from store.catalog import Catalog
from store.certificate import certify, run_saves
from store.errors import DamagedError, NothingToResumeError, StorageError, UnreachableError
from store.names import BUFFER, FROZEN, WEIGHTS, SaveId
from store.resolve import RejectedVersion, Resolution, newest_resumable, resolve
from store.schema import GroupRecord, PartRecord
from store.segment import read_leaves


@dataclass(frozen=True)
class ResumePoint:
    """Where the job goes on.

    save: whose run state this is; its step is the one to go on from. state: ``framework``, ``user`` and ``rng``, as
    this rank is to load them. generators: whether ``rng`` is this rank's. notes: nearer saves that cannot be used."""

    save: SaveId
    state: Mapping[str, Any]
    generators: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Read:
    """One rank's run state in one save. problem: why it is none."""

    state: Mapping[str, Any]
    generators: bool
    problem: str = ""


def select_run_state(
    catalog: Catalog, resolution: Resolution, slots: Slots, group: Group, *, user: UserState, settings: ResumeSettings
) -> ResumePoint | RejectedVersion:
    """Where a job that resumes ``resolution`` goes on; or what is bad: the run state of the commit itself. Collective.

    slots: those stored, by parameter."""
    own = resolution.manifest.save
    effective = certify(resolution).effective_step
    saves = run_saves(resolution, effective if settings.at == "effective" else own.step)
    notes: list[str] = []
    for save, record in saves.items():
        found = _everywhere_read(catalog, save, record, group)
        problem = found.problem or ("" if save == own else _everywhere_unfit(found.state, slots, user, group))
        if problem and save == own:
            break
        if problem:
            notes.append(
                f"the run state of {save}, next to the effective step {effective:.4g}, is passed over: {problem}"
            )
            continue
        onward = ResumePoint(save, found.state, found.generators, tuple(notes))
        if save == own or settings.data == "back":
            return onward
        latest = _everywhere_read(catalog, own, saves[own], group)
        if latest.problem:
            return RejectedVersion(own)
        return run_on_all_ranks(group, partial(_data_goes_on, onward, latest, user))
    return RejectedVersion(own)


def read_run_state(catalog: Catalog, save: SaveId, record: GroupRecord, group: Group) -> Mapping[str, Any] | None:
    """This rank's run state of a save; None, on all ranks, where any of them has none. Collective."""
    found = _everywhere_read(catalog, save, record, group)
    return None if found.problem else found.state


def is_schedule(item: Any) -> bool:
    """Whether an object of the user's is a learning-rate schedule, which counts steps and not data."""
    if isinstance(item, torch.optim.lr_scheduler.LRScheduler) or getattr(item, "counts_steps", False):
        return True
    if hasattr(item, "step_with_optimizer"):  # Accelerate's wrapper
        return is_schedule(item.scheduler)
    return any(base.__module__ == "deepspeed.runtime.lr_schedules" for base in type(item).__mro__)


def _data_goes_on(onward: ResumePoint, latest: _Read, user: UserState) -> ResumePoint:
    """Schedules from the save that the job goes on from; generators and other objects from the commit itself."""
    then, now = onward.state["user"], latest.state["user"]
    if then is not None and now is not None:
        user.require(then)
        user.require(now)
        now = [old if is_schedule(item) else new for item, old, new in zip(user.objects, then, now, strict=True)]
    state = {**onward.state, "user": now, "rng": latest.state["rng"]}
    return replace(onward, state=state, generators=latest.generators)


def _everywhere_read(catalog: Catalog, save: SaveId, record: GroupRecord, group: Group) -> _Read:
    """This rank's run state of a save, once every rank has its own."""
    found = run_on_all_ranks(group, lambda: _read(catalog, save, record, group.rank))
    return replace(found, problem=_first(group, found.problem))


def _everywhere_unfit(state: Mapping[str, Any], slots: Slots, user: UserState, group: Group) -> str:
    return _first(group, run_on_all_ranks(group, lambda: _unfit(state, slots, user)))


def _first(group: Group, problem: str) -> str:
    return next((told for told in group.all_gather(problem) if told), "")


def _read(catalog: Catalog, save: SaveId, record: GroupRecord, rank: int) -> _Read:
    parts = catalog.group(save, record)
    if parts.problems or len(parts.parts) != record.world_size:
        return _Read({}, False, "; ".join(parts.problems) or "its parts are not all there")
    first = parts.parts[0]
    try:
        # A job with more ranks than there were gives the others rank 0's objects, and generators of their own.
        state = _tree(catalog, parts.parts.get(rank, first))
        if state.get("framework") is None:  # rank 0 alone stores it; older stores have it on every rank
            state["framework"] = _tree(catalog, first)["framework"]
    except UnreachableError:
        raise
    except (DamagedError, StorageError) as error:
        return _Read({}, False, str(error))
    return _Read(state, rank < record.world_size and state["rng"] is not None)


def _tree(catalog: Catalog, part: PartRecord) -> dict[str, Any]:
    leaves = read_with_retries(lambda: read_leaves(catalog.files, part))
    tree: dict[str, Any] = from_tree(part.run_state, leaves)
    return tree


def _unfit(state: Mapping[str, Any], slots: Slots, user: UserState) -> str:
    """Why an older save's run state does not go with the state that is resumed; nothing where it does."""
    if state["rng"] is None or (state["user"] is None and len(user)):
        return "it holds no random states or no objects, as imported checkpoints do"
    if state["user"] is not None and len(state["user"]) != len(user):
        return f"it holds the state of {len(state['user'])} objects, and state=[...] has {len(user)}"
    known = state["framework"].get("slots")
    for fqn, stored in slots.items() if known is not None else ():
        more = sorted(set(stored) - {WEIGHTS, FROZEN, BUFFER} - set(known.get(fqn, ())))
        if more:  # a load would take the optimizer's state for one that was not there yet, and drop it
            return f"the optimizer had no {more[0]} for {fqn} yet"
    return ""


def select_commit(catalog: Catalog, bad: frozenset[RejectedVersion]) -> tuple[str | None, tuple[str, ...], int]:
    """The name of the newest commit that is whole, None where there is no commit; what was wrong with newer ones; and
    how many of them are passed over.

    NothingToResumeError where there are commits and none is whole."""
    catalog.forget()
    if not catalog.saves():
        return None, (), 0
    try:
        resolution, passed_over = newest_resumable(catalog, bad)
        if passed_over or resolution.problems:
            _pause(catalog)
            resolution, passed_over = newest_resumable(catalog, bad)
    except NothingToResumeError as error:
        raise NothingToResumeError(
            f"{error}. Look with `driftpoint verify STORE`; to start over on purpose, name another `store:`"
        ) from error
    chosen = resolution.manifest.save
    return chosen.name, passed_over, sum(save > chosen for save in catalog.saves())


def resolved(catalog: Catalog, save: SaveId, bad: frozenset[RejectedVersion]) -> Resolution:
    """The versions of that commit. DamagedError or StorageError where this rank does not find them whole."""
    try:
        resolution = resolve(catalog, save, bad)
    except (DamagedError, StorageError):
        _pause(catalog)
        return resolve(catalog, save, bad)
    if resolution.problems:
        _pause(catalog)
        return resolve(catalog, save, bad)
    return resolution


def _pause(catalog: Catalog) -> None:
    """Before a second look: what a disk refuses once it may give the next time."""
    time.sleep(0.2)
    catalog.forget()


def slots_of(resolution: Resolution) -> Slots:
    """What is stored of each parameter."""
    slots: Slots = {}
    for source in resolution.sources():
        slots.setdefault(source.entry.fqn, {})[source.entry.slot] = source.entry.dtype
    return slots
