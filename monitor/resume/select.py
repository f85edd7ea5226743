"""Select the commit to resume and the save whose run state it continues from; check that they match the live job.

Counters, schedules, random states and user objects are taken whole from one save: the one closest to the effective step
that all ranks can read. Nothing is interpolated and no scheduler is rewound. Reads records and run states, no model
tensors, and changes no state. Training thread; collective, except :func:`resolve_commit`."""

import logging
import time
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from monitor.adapters.base import Adapter
from monitor.adapters.hyperparameters import is_schedule
from monitor.config.schema import ResumeSettings
from monitor.distributed import Group, run_on_all_ranks
from monitor.resume.read import OpenPayloads, Slots, read_with_retries
from monitor.run_state import RunState, UserState, from_tree, parse_run_state
from store.catalog import Catalog
from store.certificate import certify, run_saves
from store.errors import DamagedError, ModelMismatchError, NothingToResumeError, StorageError, UnreachableError
from store.names import BUFFER, FROZEN, JOURNAL, SEGMENTS, WEIGHTS, SaveId, parse_save_dir, payload_path
from store.resolve import RejectedVersion, Resolution, newest_resumable, resolve
from store.schema import GroupRecord, ManifestRecord, PartRecord
from store.segment import read_leaves
from store.state_tree import join_stages
from store.storage.local import list_or_empty
from store.text import listed

_log = logging.getLogger("driftpoint")

_OPTIMIZER_MARKERS = frozenset({"betas", "momentum", "alpha", "rho", "lr_decay", "etas", "lambd", "nesterov"})
"""Hyperparameters that distinguish kinds of optimizers, in all implementations."""


@dataclass(frozen=True)
class ResumePoint:
    """The run state that a job continues from."""

    save: SaveId  # the save of this run state; the job continues from its step
    state: RunState  # of this rank
    generators: bool  # whether its generators and buffers belong to this rank
    world_size: int  # of the save
    notes: tuple[str, ...] = ()  # closer saves that cannot be used


@dataclass(frozen=True)
class RunStateRead:
    """One rank's run state of a save. problem: why that of any rank cannot be used; empty if all can."""

    state: RunState | None
    generators: bool
    problem: str = ""


def select_run_state(
    catalog: Catalog,
    resolution: Resolution,
    slots: Slots,
    group: Group,
    *,
    user: UserState,
    settings: ResumeSettings,
    at: int | None = None,
) -> ResumePoint | RejectedVersion:
    """Return the resume point of ``resolution``, or the commit as rejected if its run state is unusable. Collective.

    slots: stored slots of each parameter. at: the step to continue from; None: as the settings say."""
    commit = resolution.manifest.save
    effective = certify(resolution).effective_step
    wanted = effective if settings.at == "effective" else commit.step
    saves = run_saves(resolution, wanted if at is None else at)
    notes: list[str] = []
    for save, record in saves.items():
        read = read_run_state(catalog, save, record, group)
        problem, state = read.problem, read.state
        if state is not None and save != commit:
            problem = _first_problem(group, run_on_all_ranks(group, partial(_mismatch, state, slots, user)))
        if problem and save == commit:
            return RejectedVersion(commit, why=problem)
        if problem or state is None:
            notes.append(f"skipped the run state of {save}, near the effective step {effective:.4g}: {problem}")
            continue
        point = ResumePoint(save, state, read.generators, record.world_size, tuple(notes))
        if save == commit or settings.data == "back" or at is not None:
            return point
        latest = read_run_state(catalog, commit, saves[commit], group)
        if latest.state is None:
            return RejectedVersion(commit, why=latest.problem)
        combine = partial(_keep_newest_data_position, point, latest.state, latest.generators, user)
        return run_on_all_ranks(group, combine)
    return RejectedVersion(commit)


def _keep_newest_data_position(point: ResumePoint, latest: RunState, generators: bool, user: UserState) -> ResumePoint:
    """Combine the schedules of the resume point with the generators and other objects of the commit itself."""
    then, now = point.state.user, latest.user
    if then is not None and now is not None:
        matched = zip(user.objects, user.match(then), user.match(now), strict=True)
        older = {id(new): old.state for item, old, new in matched if old and new and is_schedule(item)}
        now = tuple(replace(one, state=older.get(id(one), one.state)) for one in now)
    return replace(point, state=replace(point.state, user=now, rng=latest.rng), generators=generators)


def read_run_state(catalog: Catalog, save: SaveId, record: GroupRecord, group: Group) -> RunStateRead:
    """Read this rank's run state of a save; ``problem`` is that of the first rank that has one. Collective."""
    found = run_on_all_ranks(group, lambda: read_own_run_state(catalog, save, record, group.rank))
    problem = _first_problem(group, found.problem)
    return replace(found, problem=problem, state=None if problem else found.state)


def _first_problem(group: Group, problem: str) -> str:
    return next((one for one in group.all_gather(problem) if one), "")


def read_own_run_state(catalog: Catalog, save: SaveId, record: GroupRecord, rank: int) -> RunStateRead:
    """Read the run state of a save for one rank. Not collective."""
    parts = catalog.group(save, record)
    if parts.problems or len(parts.parts) != record.world_size:
        return RunStateRead(None, False, "; ".join(parts.problems) or "parts are missing")
    first = parts.parts[0]
    try:
        # Additional ranks get rank 0's objects and keep their own generators.
        tree = read_tree(catalog, parts.parts.get(rank, first))
        if tree.get("framework") is None:  # only rank 0 stores it, except in older stores
            tree["framework"] = read_tree(catalog, first).get("framework")
        state = parse_run_state(join_stages(tree, lambda leader: read_tree(catalog, parts.parts[leader])))
    except UnreachableError:
        raise
    except (DamagedError, StorageError) as error:
        return RunStateRead(None, False, f"{save}, rank {rank}: {error}")
    return RunStateRead(state, rank < record.world_size and state.rng is not None)


def read_tree(catalog: Catalog, part: PartRecord) -> dict[str, Any]:
    """Read the whole run state of a part, unchecked except for its hashes."""
    with OpenPayloads(catalog.files) as payloads:
        payloads.repeatable(payload_path(part.save, part.rank))  # opens it once for thousands of small tensors
        leaves = read_with_retries(lambda: read_leaves(payloads, part))
    tree = from_tree(part.run_state, leaves)
    if not isinstance(tree, dict):
        raise DamagedError(f"the run state is a {type(tree).__name__}, no mapping")
    return tree


def _mismatch(state: RunState, slots: Slots, user: UserState) -> str:
    """Return why an older save's run state does not match the resumed tensors; empty if it does."""
    if state.rng is None or (state.user is None and len(user)):
        return "it has no random states or no user objects (an imported checkpoint)"
    try:
        new = [user.label(index) for index, one in enumerate(user.match(state.user or ())) if one is None]
    except ModelMismatchError as error:
        return str(error)
    if new:
        return f"it has no state of {new[0]}"
    known = state.framework.get("slots")
    if known is None:
        return ""
    for fqn, stored in slots.items():
        added = sorted(set(stored) - {WEIGHTS, FROZEN, BUFFER} - set(known.get(fqn, ())))
        if added:  # loading would drop optimizer state that did not exist at that save
            return f"the optimizer had no {added[0]} for {fqn} yet"
    return ""


def select_commit(
    catalog: Catalog,
    bad: frozenset[RejectedVersion],
    chosen: list[Resolution] | None = None,
    skip: Set[SaveId] = frozenset(),
) -> tuple[str | None, tuple[str, ...], int]:
    """Return the name of the newest complete commit (None in an empty store), problems of newer ones, and their number.

    ``chosen`` gets the resolution of that commit, if all records were whole. skip: commits to pass over. Raises
    NothingToResumeError if there are commits, but none is complete."""
    catalog.forget()
    if not catalog.saves():
        for lost in catalog.lost():
            _log.warning("resume: %s", lost)
        return None, (), 0
    try:
        resolution, passed_over = newest_resumable(catalog, bad, skip)
        if passed_over or resolution.problems:
            _retry_later(catalog)
            resolution, passed_over = newest_resumable(catalog, bad, skip)
    except NothingToResumeError as error:
        raise NothingToResumeError(f"{error}; to start over, set another `store:`") from error
    if chosen is not None and not (passed_over or resolution.problems):
        chosen.append(resolution)
    newest = resolution.manifest.save
    return newest.name, passed_over, sum(save > newest for save in catalog.saves())


def records_ahead(catalog: Catalog, save: SaveId) -> tuple[str, ...]:
    """Return a note if the journal, which is off, has records of steps after a commit."""
    with suppress(StorageError):
        names = map(parse_save_dir, list_or_empty(catalog.files, f"{JOURNAL}/{SEGMENTS}"))
        steps = [one.step for one in names if one is not None and one.epoch >= save.epoch and one.step > save.step]
        text = "the journal, which is off, has records up to step {}: `journal: {{enabled: true}}` follows them"
        return (text.format(max(steps)),) if steps else ()
    return ()


def resolve_commit(catalog: Catalog, save: SaveId, bad: frozenset[RejectedVersion]) -> Resolution:
    """Resolve the versions of a commit, with one retry. Raises DamagedError or StorageError if this rank cannot."""
    with suppress(DamagedError, StorageError):
        resolution = resolve(catalog, save, bad)
        if not resolution.problems:
            return resolution
    _retry_later(catalog)
    return resolve(catalog, save, bad)


def _retry_later(catalog: Catalog) -> None:
    """Wait and drop cached records: a read error may be transient."""
    time.sleep(0.2)
    catalog.forget()


def require_model(manifest: ManifestRecord, adapter: Adapter) -> None:
    """Raise ModelMismatchError unless store and model have the same tensors in the same shapes."""
    infos = adapter.tensors()
    live = {fqn: info.shape for fqn, info in infos.items()}
    stored = {fqn: record.shape for fqn, record in manifest.tensors.items()}
    resized = sorted(fqn for fqn in live.keys() & stored.keys() if live[fqn] != stored[fqn])
    found = {
        "only in the store": stored.keys() - live.keys(),
        "only in this model": live.keys() - stored.keys(),
        "other shapes (store -> model)": [f"{fqn} {stored[fqn]} -> {live[fqn]}" for fqn in resized],
    }
    differences = [f"{kind}: {listed(sorted(names))}" for kind, names in found.items() if names]
    if not differences:
        return
    buffers = [fqn for fqn in resized if infos[fqn].kind == "buffer"]
    advice = "Set another `store:`, or fix the model"
    if buffers and buffers == resized and len(differences) == 1:
        advice = (
            f"Buffers that grow during training need their saved size: give {buffers[0]} the shape "
            f"{stored[buffers[0]]} before resume(), or register it with persistent=False and pass an object in "
            "state=[...] whose load_state_dict creates it"
        )
    raise ModelMismatchError("the store holds another model: " + "; ".join(differences) + ". " + advice)


def require_slots(stored: Iterable[str], live: Iterable[str]) -> None:
    """Raise ModelMismatchError if stored and live optimizer slots differ, unless one of them has none.

    stored, live: slots over all ranks; the live ones as they will be after the load."""
    plain = {WEIGHTS, FROZEN, BUFFER}
    saved, needed = set(stored) - plain, set(live) - plain
    if saved != needed and saved and needed:
        raise ModelMismatchError(
            f"the store has optimizer state {sorted(saved)}, this optimizer needs {sorted(needed)}: "
            "resume with the optimizer of the run that saved it"
        )


def require_optimizer(saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Raise ModelMismatchError unless both are the same kind of optimizer, with hyperparameters of the same kinds.

    saved, live: results of :meth:`monitor.adapters.base.Adapter.run_state`."""
    held = {fqn for group in live["param_groups"] for fqn in group["params"]}
    groups = [group for group in saved["param_groups"] if not held.isdisjoint(group["params"])]  # of this rank's stage
    saved = {**saved, "param_groups": groups or saved["param_groups"]}
    _require_same_split(saved, live)
    if _markers(saved) != _markers(live):
        raise ModelMismatchError(
            f"the store has the state of optimizer {saved['optimizer']}, this job has {live['optimizer']}: "
            "use the same kind of optimizer, or set another `store:`"
        )
    # Where the live value is a tensor, the adapter checks the shape.
    before = {fqn: group["hyper"] for group in saved["param_groups"] for fqn in group["params"]}
    for group in live["param_groups"]:
        for key, value in next((before[fqn] for fqn in group["params"] if fqn in before), {}).items():
            number = isinstance(group["hyper"].get(key), bool | int | float)
            if number and not isinstance(value, bool | int | float | torch.Tensor | None):
                raise ModelMismatchError(
                    f"the store has the hyperparameter {key} = {value!r}, which is a number in this optimizer: resume "
                    "with the optimizer of the run that saved it"
                )


def _require_same_split(saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Raise ModelMismatchError if a parameter of several optimizers is updated by another class than when saved."""
    if all(" + " not in str(framework.get("optimizer")) for framework in (saved, live)):
        return
    before, now = (  # the class of the optimizer of each parameter
        {fqn: str(one.get("optimizer") or run.get("optimizer")) for one in run["param_groups"] for fqn in one["params"]}
        for run in (saved, live)
    )
    moved = [fqn for fqn in now if before.get(fqn, now[fqn]) not in (now[fqn], "None")]  # None: a foreign checkpoint's
    if moved:
        raise ModelMismatchError(
            f"{listed(moved)}: updated by {before[moved[0]]} in the run that was saved, and by {now[moved[0]]} in this "
            "job: give each optimizer the parameters that it had, or set another `store:`"
        )


def _markers(framework: Mapping[str, Any]) -> set[str]:
    return {key for group in framework["param_groups"] for key in group["hyper"] if key in _OPTIMIZER_MARKERS}
