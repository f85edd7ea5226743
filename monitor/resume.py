"""Resume in place: all ranks agree on one commit, read and check everything, and only then change their state.

Reading is interval arithmetic over stored fragments, so another world size, ZeRO stage or framework is nothing
special. A unit whose bytes do not match their hash falls back to its previous version, on every rank alike.
Used from the training thread, before training. Collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from monitor.adapters.base import Adapter, Piece
from monitor.agree import everywhere, on_first
from monitor.dtypes import torch_dtype
from monitor.group import Group
from monitor.run_state import UserState, from_tree, restore_rng
from monitor.staging import as_bytes
from store.catalog import Catalog
from store.coverage import Copy, FragmentIndex
from store.errors import DamagedError, ModelMismatchError, NothingToResumeError, StorageError
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment, SaveId
from store.schema import ManifestRecord
from store.segments import read_entry, read_leaves
from store.versions import Bad, Resolution, newest_resumable, resolve


@dataclass(frozen=True)
class Resumed:
    """What the job stands on now. ``notes``: what was damaged, skipped or converted, for people."""

    resolution: Resolution
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Read:
    """Everything a rank needs, in host memory and checked."""

    loads: list[tuple[Piece, torch.Tensor]]
    run_state: dict[str, Any] | None
    bad: frozenset[Bad]
    notes: tuple[str, ...]


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
            notes += [*passed_over, *resolution.problems, *read.notes]
            _apply(read, adapter, user, resolution.manifest, group)
            return Resumed(resolution, tuple(dict.fromkeys(notes)))
        bad |= newly_bad


def _choose(catalog: Catalog, bad: frozenset[Bad]) -> tuple[str | None, tuple[str, ...]]:
    if not catalog.saves():
        return None, ()
    try:
        resolution, passed_over = newest_resumable(catalog, bad)
    except NothingToResumeError as error:
        raise NothingToResumeError(
            f"{error}. Look with `driftpoint verify STORE`; to start over on purpose, name another `store:`"
        ) from error
    return resolution.manifest.save.name, passed_over


def _prepared(catalog: Catalog, save: SaveId, bad: frozenset[Bad], adapter: Adapter) -> Resolution:
    resolution = resolve(catalog, save, bad)
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
    for piece in adapter.held():
        slot = _stored_slot(index, piece.fragment)
        if slot is None:
            notes.append(f"{piece.fragment.fqn}/{piece.fragment.slot} is not in the store and starts afresh")
            continue
        wanted = Fragment(piece.fragment.fqn, slot, piece.fragment.start, piece.fragment.numel)
        dtype = torch_dtype(index.dtype(wanted.fqn, slot) or "")
        host = torch.empty(wanted.numel, dtype=dtype)
        _fill(catalog, index.cover(wanted), host, bad)
        if piece.tensor.dtype != dtype and piece.tensor.element_size() < host.element_size():
            notes.append(f"{wanted.fqn}/{slot} was rounded from {dtype} to {piece.tensor.dtype}")
        loads.append((piece, host))
    run_state = _read_run_state(catalog, resolution, rank, bad)
    return _Read(loads, run_state, frozenset(bad), tuple(notes))


def _stored_slot(index: FragmentIndex, fragment: Fragment) -> str | None:
    # A parameter may have been frozen or unfrozen since; its values are its values.
    options = {WEIGHTS: (WEIGHTS, FROZEN), FROZEN: (FROZEN, WEIGHTS)}.get(fragment.slot, (fragment.slot,))
    return next((slot for slot in options if index.dtype(fragment.fqn, slot) is not None), None)


def _fill(catalog: Catalog, copies: Iterable[Copy], host: torch.Tensor, bad: set[Bad]) -> None:
    for copy in copies:
        part, entry = copy.source.part, copy.source.entry
        target = host[copy.target_start : copy.target_start + copy.numel]
        try:
            if copy.numel == entry.numel:
                read_entry(catalog.files, part, entry, as_bytes(target))
            else:
                whole = torch.empty(entry.numel, dtype=host.dtype)
                read_entry(catalog.files, part, entry, as_bytes(whole))
                target.copy_(whole[copy.source_start : copy.source_start + copy.numel])
        except (DamagedError, StorageError):
            bad.add(Bad(part.save, entry.unit))


def _read_run_state(catalog: Catalog, resolution: Resolution, rank: int, bad: set[Bad]) -> dict[str, Any] | None:
    part = resolution.run_parts[rank if rank in resolution.run_parts else 0]
    try:
        state: dict[str, Any] = from_tree(part.run_state, read_leaves(catalog.files, part))
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
