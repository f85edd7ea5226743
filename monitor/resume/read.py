"""Read fragments into host memory; compatibility checks.

Whether what a store holds can be put into the live job at all: same tensors, same slots, same kind of optimizer,
dtypes that hold the values. Changes nothing; ModelMismatchError, with what to do, where it cannot.

It knows records and tensors, no files and no ranks.

Reading a commit's tensors into host memory, as far as this rank needs them: checked, and nothing live touched.

Reading is interval arithmetic over stored fragments, so another world size, ZeRO stage or framework is nothing
special. What cannot be read is told to the caller, who falls back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from monitor.adapters.base import Adapter, FragmentPlace
from monitor.adapters.module_tensors import torch_dtype
from monitor.save.staging import as_bytes
from store.catalog import Catalog
from store.errors import DamagedError, MissingError, ModelMismatchError, StorageError, UnreachableError
from store.fragments import Copy, FragmentIndex, FragmentReader, ReadAhead, Source, stored_slot
from store.names import BUFFER, FROZEN, RAW, WEIGHTS, Fragment, SaveId
from store.resolve import RejectedVersion, Resolution
from store.schema import ManifestRecord
from store.segment import read_entry
from store.storage.local import Files
from store.text import listed

Slots = dict[str, dict[str, str]]
"""fqn -> slot -> dtype as stored."""

_TELLING = frozenset({"betas", "momentum", "alpha", "rho", "lr_decay", "etas", "lambd", "nesterov"})
"""Hyperparameters that tell one kind of optimizer from another, whoever implements it."""


def require_model(manifest: ManifestRecord, adapter: Adapter) -> None:
    """The same tensors in the same shapes."""
    infos = adapter.tensors()
    live = {fqn: info.shape for fqn, info in infos.items()}
    stored = {fqn: record.shape for fqn, record in manifest.tensors.items()}
    resized = sorted(fqn for fqn in live.keys() & stored.keys() if live[fqn] != stored[fqn])
    differences = [
        *_some("only in the store", sorted(stored.keys() - live.keys())),
        *_some("only in this model", sorted(live.keys() - stored.keys())),
        *_some("of another shape", [f"{fqn} {stored[fqn]} -> {live[fqn]}" for fqn in resized]),
    ]
    if not differences:
        return
    buffers = [fqn for fqn in resized if infos[fqn].kind == "buffer"]
    only_grown = buffers == resized and len(differences) == 1
    advice = (
        _sized(buffers[0], stored[buffers[0]]) if buffers and only_grown else "Name another `store:`, or fix the model"
    )
    raise ModelMismatchError("the store holds another model: " + "; ".join(differences) + ". " + advice)


def _sized(fqn: str, shape: tuple[int, ...]) -> str:
    return (
        f"Buffers that grow while training need the size they had: make {fqn} of shape {shape} before resume(), or "
        "register it with persistent=False and give an object in state=[...] whose load_state_dict makes it"
    )


def _some(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {listed(sorted(names))}"] if names else []


def require_slots(stored: Iterable[str], live: Iterable[str]) -> None:
    """Nothing stored may be left behind in silence, and nothing wanted may be missing for good.

    stored, live: slots over all ranks; live ones as they will be after the load."""
    plain = {WEIGHTS, FROZEN, BUFFER}
    saved, kept = set(stored) - plain, set(live) - plain
    if saved != kept and saved and kept:
        raise ModelMismatchError(
            f"the store holds optimizer state {sorted(saved)}, this optimizer keeps {sorted(kept)}: "
            "resume with the optimizer that it was saved with"
        )


def require_optimizer(saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """The same kind of optimizer. saved, live: what :meth:`monitor.adapters.base.Adapter.run_state` gave and gives."""
    if _telling(saved) != _telling(live):
        raise ModelMismatchError(
            f"the store holds the state of optimizer {saved['optimizer']}, this job has {live['optimizer']}: "
            "resume with the kind of optimizer that it was saved with, or name another `store:`"
        )


def _telling(framework: Mapping[str, Any]) -> set[str]:
    return {key for group in framework["param_groups"] for key in group["hyper"] if key in _TELLING}


_CHUNK = 1 << 22
"""Elements looked at together: the checks need several times the memory of what they check."""


def encoding_loss(host: torch.Tensor, place: FragmentPlace) -> str | None:
    """What the live dtype cannot hold of stored values, for people; None where it holds them all, NaN included.

    Rounding is told, and so is the one case where a finite value becomes infinite. ModelMismatchError for values that
    would become others: too large, fractions in a tensor of whole numbers, complex ones in a real tensor."""
    if place.dtype == host.dtype:
        return None
    where = f"{place.fragment.fqn}/{place.fragment.slot}"
    chunks = (host[start : start + _CHUNK] for start in range(0, host.numel(), _CHUNK))
    found = {_loss_of(chunk, place.dtype, place.fragment.slot == BUFFER) for chunk in chunks}
    if _Loss.ANOTHER in found:
        raise ModelMismatchError(
            f"{where}: values of {host.dtype} are too large for the live {place.dtype}, or of a kind that it does not "
            "have; resume with a wider dtype"
        )
    if _Loss.INFINITE in found:
        return f"the extremes of {host.dtype} in {where} became infinite in {place.dtype}"
    return f"{where} was rounded from {host.dtype} to {place.dtype}" if _Loss.ROUNDED in found else None


class _Loss(Enum):
    NONE, ROUNDED, INFINITE, ANOTHER = range(4)


def _loss_of(host: torch.Tensor, dtype: torch.dtype, buffer: bool) -> _Loss:
    if host.is_complex():
        return _Loss.ANOTHER
    live = host.to(dtype)
    back = live.to(host.dtype)
    lost = (back != host) & ~(back.isnan() & host.isnan())
    if not bool(lost.any()):
        return _Loss.NONE
    if not dtype.is_floating_point:
        return _Loss.ANOTHER
    before, after = host[lost], live[lost]
    distorted = _distorted(before, after)
    if not bool(distorted.any()):
        return _Loss.ROUNDED
    only_masks = buffer and not bool((distorted & ~_is_a_mask(before, after)).any())
    return _Loss.INFINITE if only_masks else _Loss.ANOTHER


def _distorted(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Where more than rounding happened: infinite, or cut off at the largest number that there is."""
    wanted, found = before.double(), after.double()
    cut_off = (wanted.abs() > 1) & (found.abs() < wanted.abs() / 2)
    return (wanted.isfinite() != found.isfinite()) | found.isnan() | cut_off


def _is_a_mask(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Where a buffer holds the lowest (or largest) number of its dtype, and the live dtype has nothing as low.

    That is no measured value but a mask's way to say never, and what it says in a narrower dtype is -inf: the same as
    ``buffer.to(dtype)`` gives, and so what the live model itself would hold had it been made in the stored dtype. A
    mask stored as -inf stays -inf for the same reason. (A softmax over nothing but -inf is NaN, over equal finite
    numbers it is not: hence it is told, and the state not exact.) Any other value that is too large, 1e6 in a running
    variance say, was measured: infinity in its place would be another network, and is refused as in a weight."""
    if not before.is_floating_point():
        return torch.zeros_like(before, dtype=torch.bool)
    return (before.double().abs() == torch.finfo(before.dtype).max) & after.double().isinf()


T = TypeVar("T")


class ReadBuffers:
    """Host memory to read into, by fragment. What is not there is made, and stays for whoever gave the room."""

    def __init__(self, buffers: Mapping[Fragment, torch.Tensor] = MappingProxyType({})) -> None:
        self.buffers = dict(buffers)

    def at(self, fragment: Fragment, dtype: torch.dtype) -> torch.Tensor:
        """1-d, of the fragment's size and ``dtype``; contents undefined."""
        found = self.buffers.get(fragment)
        if found is None or found.dtype != dtype or found.numel() != fragment.numel:
            found = self.buffers[fragment] = torch.empty(fragment.numel, dtype=dtype)
        return found


@dataclass(frozen=True)
class ReadResult:
    """Every value that a rank needs, in host memory and checked.

    values: for each live fragment, 1-d, in the dtype as stored. bad: what is not as it was committed, or what storage
    keeps refusing; the rest is no use then. notes: what starts afresh. rounded: what the live dtypes cannot hold."""

    values: Mapping[Fragment, torch.Tensor]
    bad: frozenset[RejectedVersion]
    notes: tuple[str, ...]
    rounded: tuple[str, ...]


def read_fragments(
    catalog: Catalog, resolution: Resolution, places: Sequence[FragmentPlace], room: ReadBuffers
) -> ReadResult:
    """Read what ``places`` need. ModelMismatchError where the live dtypes cannot take it; UnreachableError."""
    index = FragmentIndex(resolution.sources())
    bad: set[RejectedVersion] = set()
    notes: list[str] = []
    values: dict[Fragment, torch.Tensor] = {}
    rounded: set[str] = set()
    found = [(place, _wanted(index, place.fragment, notes)) for place in places]
    covers = [(place, wanted, index.cover(wanted)) for place, wanted in found if wanted is not None]
    ahead = ReadAhead(catalog.files, (copy.source for _, _, copies in covers for copy in copies))
    for place, wanted, copies in covers:
        fragment = place.fragment
        host = room.at(fragment, torch_dtype(index.dtype(wanted.fqn, wanted.slot) or ""))
        ahead.reading(sum(copy.source.entry.nbytes for copy in copies))
        _fill(catalog, copies, host, bad)
        lost = encoding_loss(host, place)
        if lost is not None:
            rounded.add(lost)
        values[fragment] = host
    return ReadResult(values, frozenset(bad), tuple(notes), tuple(sorted(rounded)))


def _wanted(index: FragmentIndex[Source], fragment: Fragment, notes: list[str]) -> Fragment | None:
    """What of the store a live fragment needs; None, and a note, where it starts afresh."""
    slot = stored_slot(index, fragment)
    if slot is None and fragment.slot in (WEIGHTS, FROZEN, BUFFER):
        raise ModelMismatchError(f"the store holds no values of {fragment.fqn}, though it names it")
    if slot is None:
        notes.append(f"{fragment.fqn}/{fragment.slot} is not in the store and starts afresh")
        return None
    return Fragment(fragment.fqn, slot, fragment.start, fragment.numel)


def _fill(catalog: Catalog, copies: Iterable[Copy[Source]], host: torch.Tensor, bad: set[RejectedVersion]) -> None:
    for copy in copies:
        target = host[copy.target_start : copy.target_start + copy.numel]
        fault = _Fault(copy.source.part.save)
        try:
            read_with_retries(lambda: _fetch(catalog.files, copy, target, fault))  # noqa: B023
        except UnreachableError:
            raise
        except (DamagedError, StorageError):
            bad.add(RejectedVersion(fault.save, copy.source.entry.unit))


@dataclass
class _Fault:
    """The save whose bytes were wrong, where any are: that of the fragment, or of its base."""

    save: SaveId


def _fetch(files: Files, copy: Copy[Source], target: torch.Tensor, fault: _Fault) -> None:
    part, entry = copy.source.part, copy.source.entry
    if entry.encoding == RAW and entry.packing is None and copy.numel == entry.numel:
        read_entry(files, part, entry, as_bytes(target))
        return
    reader, position = FragmentReader(files, copy.source), -copy.source_start
    try:
        for chunk in reader.chunks():
            values = torch.from_numpy(chunk).view(target.dtype)
            first, after = max(0, -position), min(values.numel(), target.numel() - position)
            if first < after:
                target[position + first : position + after] = values[first:after]
            position += values.numel()
    except (DamagedError, StorageError):
        fault.save = reader.at_fault
        raise


def read_with_retries(attempt: Callable[[], T]) -> T:
    """The attempt's result. What a disk refuses once it may give the next time; what a bucket does, was asked for."""
    for pause in (0.1, 1.0):
        try:
            return attempt()
        except (MissingError, UnreachableError):
            raise
        except StorageError:
            time.sleep(pause)
    return attempt()
