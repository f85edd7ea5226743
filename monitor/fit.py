"""Whether what a store holds can be put into the live job at all: same tensors, same slots, same kind of optimizer,
dtypes that hold the values. Changes nothing; ModelMismatchError, with what to do, where it cannot.

It knows records and tensors, no files and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch

from monitor.adapters.base import Adapter, Place
from store.errors import ModelMismatchError
from store.names import BUFFER, FROZEN, WEIGHTS
from store.schema import ManifestRecord
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


def loss(host: torch.Tensor, place: Place) -> str | None:
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
