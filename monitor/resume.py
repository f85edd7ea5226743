"""Resume in place: all ranks agree on one commit, read and check everything, and only then change their state.

Reading is interval arithmetic over stored fragments, so another world size, ZeRO stage or framework is nothing
special. A unit whose bytes do not match their hash falls back to its previous version, on every rank alike.
Used from the training thread, before training. Collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from monitor.adapters.base import Adapter, Piece
from monitor.agree import everywhere, on_first
from monitor.dtypes import torch_dtype
from monitor.group import Group
from monitor.run_state import UserState, from_tree, restore_rng
from monitor.staging import as_bytes
from store.catalog import Catalog
from store.coverage import Copy, FragmentIndex, Source
from store.errors import DamagedError, MissingError, ModelMismatchError, NothingToResumeError, StorageError
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment, SaveId
from store.schema import ManifestRecord
from store.segments import read_entry, read_leaves
from store.versions import Bad, Resolution, newest_resumable, resolve

T = TypeVar("T")


@dataclass(frozen=True)
class Resumed:
    """What the job stands on now.

    notes: what was damaged, skipped or converted, for people. rounded: what the live dtypes could not hold, over
    all ranks; the state is not exact then."""

    resolution: Resolution
    notes: tuple[str, ...]
    rounded: tuple[str, ...]


@dataclass(frozen=True)
class _Read:
    """Everything a rank needs, in host memory and checked."""

    loads: list[tuple[Piece, torch.Tensor]]
    run_state: dict[str, Any] | None
    bad: frozenset[Bad]
    notes: tuple[str, ...]
    rounded: tuple[str, ...]


def resume(catalog: Catalog, adapter: Adapter, group: Group, user: UserState) -> Resumed | None:
    """Bring the newest resumable commit into the live job. None where the store holds no commit at all.

    Raises, on all ranks: NothingToResumeError where there are commits but none is whole; ModelMismatchError;
    DamagedError or StorageError where ranks do not see the same store."""
    bad: frozenset[Bad] = frozenset()
    notes: list[str] = []
    while True:
        name, passed_over = on_first(group, lambda bad=bad: _choose(catalog, bad))  # type: ignore[misc]
        if name is None:
            return None
        catalog.forget()
        resolution = everywhere(
            group,
            lambda name=name, bad=bad: _prepared(catalog, SaveId.parse(name), bad, adapter),  # type: ignore[misc]
        )
        _require_slots(resolution, adapter, group)
        read = everywhere(group, lambda found=resolution: _read(catalog, found, adapter, group.rank))  # type: ignore[misc]
        newly_bad = frozenset().union(*group.gather(read.bad))
        if not newly_bad:
            everywhere(group, lambda read=read: _require_fit(read, adapter, user))  # type: ignore[misc]
            rounded = tuple(sorted(set().union(*group.gather(read.rounded))))
            notes += [*passed_over, *resolution.problems, *read.notes, *rounded]
            _apply(read, adapter, user, resolution.manifest, group)
            return Resumed(resolution, tuple(dict.fromkeys(notes)), rounded)
        bad |= newly_bad


def _choose(catalog: Catalog, bad: frozenset[Bad]) -> tuple[str | None, tuple[str, ...]]:
    catalog.forget()
    if not catalog.saves():
        return None, ()
    try:
        resolution, passed_over = newest_resumable(catalog, bad)
        if passed_over or resolution.problems:
            _pause(catalog)
            resolution, passed_over = newest_resumable(catalog, bad)
    except NothingToResumeError as error:
        raise NothingToResumeError(
            f"{error}. Look with `driftpoint verify STORE`; to start over on purpose, name another `store:`"
        ) from error
    return resolution.manifest.save.name, passed_over


def _resolved(catalog: Catalog, save: SaveId, bad: frozenset[Bad]) -> Resolution:
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


def _prepared(catalog: Catalog, save: SaveId, bad: frozenset[Bad], adapter: Adapter) -> Resolution:
    resolution = _resolved(catalog, save, bad)
    _require_model(resolution.manifest, adapter)
    slots: dict[str, dict[str, str]] = {}
    for source in resolution.sources():
        slots.setdefault(source.entry.fqn, {})[source.entry.slot] = source.entry.dtype
    adapter.prepare_load(slots)
    return resolution


def _require_model(manifest: ManifestRecord, adapter: Adapter) -> None:
    live = {fqn: info.shape for fqn, info in adapter.tensors().items()}
    stored = {fqn: record.shape for fqn, record in manifest.tensors.items()}
    differences = [
        *_some("only in the store", sorted(stored.keys() - live.keys())),
        *_some("only in this model", sorted(live.keys() - stored.keys())),
        *_some(
            "of another shape",
            [f"{fqn} {stored[fqn]} -> {live[fqn]}" for fqn in live.keys() & stored.keys() if live[fqn] != stored[fqn]],
        ),
    ]
    if differences:
        raise ModelMismatchError(
            "the store holds another model: " + "; ".join(differences) + ". Name another `store:`, or fix the model"
        )


def _some(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [f"{what}: {shown}"]


def _require_slots(resolution: Resolution, adapter: Adapter, group: Group) -> None:
    """Nothing stored may be left behind in silence, and nothing wanted may be missing for good."""
    plain = {WEIGHTS, FROZEN, BUFFER}
    stored = {source.entry.slot for source in resolution.sources()} - plain
    live = {piece.fragment.slot for piece in adapter.held()} - plain
    live = set().union(*group.gather(sorted(live)))
    if stored != live and live and stored:
        raise ModelMismatchError(
            f"the store holds optimizer state {sorted(stored)}, this optimizer keeps {sorted(live)}: "
            "resume with the optimizer that it was saved with"
        )


_TELLING = frozenset({"betas", "momentum", "alpha", "rho", "lr_decay", "etas", "lambd", "nesterov"})
"""Hyperparameters that tell one kind of optimizer from another, whoever implements it."""


def _require_fit(read: _Read, adapter: Adapter, user: UserState) -> None:
    """The last check before anything changes: the run state is for this optimizer and these objects."""
    state = read.run_state or {}
    user.require(state["user"])
    saved, live = state["framework"], adapter.run_state()
    if _telling(saved) != _telling(live):
        raise ModelMismatchError(
            f"the store holds the state of optimizer {saved['optimizer']}, this job has {live['optimizer']}: "
            "resume with the kind of optimizer that it was saved with, or name another `store:`"
        )


def _telling(framework: Mapping[str, Any]) -> set[str]:
    return {key for group in framework["param_groups"] for key in group["hyper"] if key in _TELLING}


def _read(catalog: Catalog, resolution: Resolution, adapter: Adapter, rank: int) -> _Read:
    index = FragmentIndex(resolution.sources())
    bad: set[Bad] = set()
    notes: list[str] = []
    loads = []
    rounded: set[str] = set()
    for piece in adapter.held():
        slot = _stored_slot(index, piece.fragment)
        if slot is None and piece.fragment.slot in (WEIGHTS, FROZEN, BUFFER):
            raise ModelMismatchError(f"the store holds no values of {piece.fragment.fqn}, though it names it")
        if slot is None:
            notes.append(f"{piece.fragment.fqn}/{piece.fragment.slot} is not in the store and starts afresh")
            continue
        wanted = Fragment(piece.fragment.fqn, slot, piece.fragment.start, piece.fragment.numel)
        dtype = torch_dtype(index.dtype(wanted.fqn, slot) or "")
        host = torch.empty(wanted.numel, dtype=dtype)
        _fill(catalog, index.cover(wanted), host, bad)
        if _is_rounded(host, piece):
            rounded.add(f"{wanted.fqn}/{slot} was rounded from {dtype} to {piece.tensor.dtype}")
        loads.append((piece, host))
    run_state = _read_run_state(catalog, resolution, rank, bad)
    return _Read(loads, run_state, frozenset(bad), tuple(notes), tuple(sorted(rounded)))


def _is_rounded(host: torch.Tensor, piece: Piece) -> bool:
    """Whether the live dtype cannot hold the stored values. ModelMismatchError where it makes them infinite."""
    if piece.tensor.dtype == host.dtype:
        return False
    cast = host.to(piece.tensor.dtype)
    if bool((cast.isfinite() != host.isfinite()).any()):
        raise ModelMismatchError(
            f"{piece.fragment.fqn}/{piece.fragment.slot}: values of {host.dtype} are too large for the live "
            f"{piece.tensor.dtype}; resume with a wider dtype"
        )
    return not torch.equal(cast.to(host.dtype), host)


def _stored_slot(index: FragmentIndex[Source], fragment: Fragment) -> str | None:
    # A parameter may have been frozen or unfrozen since; its values are its values.
    options = {WEIGHTS: (WEIGHTS, FROZEN), FROZEN: (FROZEN, WEIGHTS)}.get(fragment.slot, (fragment.slot,))
    stored = [slot for slot in options if index.dtype(fragment.fqn, slot) is not None]
    return max(stored, key=lambda slot: index.names()[fragment.fqn, slot][0].part.save, default=None)


def _fill(catalog: Catalog, copies: Iterable[Copy[Source]], host: torch.Tensor, bad: set[Bad]) -> None:
    for copy in copies:
        part, entry = copy.source.part, copy.source.entry
        target = host[copy.target_start : copy.target_start + copy.numel]
        try:
            if copy.numel == entry.numel:
                _patiently(lambda: read_entry(catalog.files, part, entry, as_bytes(target)))  # noqa: B023
            else:
                whole = torch.empty(entry.numel, dtype=host.dtype)
                _patiently(lambda: read_entry(catalog.files, part, entry, as_bytes(whole)))  # noqa: B023
                target.copy_(whole[copy.source_start : copy.source_start + copy.numel])
        except (DamagedError, StorageError):
            bad.add(Bad(part.save, entry.unit))


def _patiently(read: Callable[[], T]) -> T:
    """What a disk refuses once it may give the next time; what it keeps refusing is treated like damage."""
    for pause in (0.1, 1.0):
        try:
            return read()
        except MissingError:
            raise
        except StorageError:
            time.sleep(pause)
    return read()


def _read_run_state(catalog: Catalog, resolution: Resolution, rank: int, bad: set[Bad]) -> dict[str, Any] | None:
    part = resolution.run_parts[rank if rank in resolution.run_parts else 0]
    try:
        leaves = _patiently(lambda: read_leaves(catalog.files, part))
        state: dict[str, Any] = from_tree(part.run_state, leaves)
    except (DamagedError, StorageError):
        bad.add(Bad(part.save))
        return None
    return state


def _apply(read: _Read, adapter: Adapter, user: UserState, manifest: ManifestRecord, group: Group) -> None:
    with torch.no_grad():
        for piece, host in read.loads:
            piece.tensor.copy_(host)
    state: Mapping[str, Any] = read.run_state or {}
    adapter.load_run_state(state["framework"])
    adapter.finish_load()
    user.restore(state["user"])
    if group.rank < manifest.world_size:
        restore_rng(state["rng"])
