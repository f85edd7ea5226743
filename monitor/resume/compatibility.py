"""Check that a store matches the live job: its tensors, its optimizer, and what the live dtypes can hold."""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch

from monitor.adapters.base import Adapter, FragmentPlace
from store.errors import ModelMismatchError
from store.names import BUFFER, FROZEN, WEIGHTS
from store.schema import ManifestRecord
from store.text import listed

_OPTIMIZER_MARKERS = frozenset({"betas", "momentum", "alpha", "rho", "lr_decay", "etas", "lambd", "nesterov"})
"""Hyperparameters that distinguish kinds of optimizers, in all implementations."""

_CHUNK = 1 << 22  # elements checked at once: the checks need several times the memory of their input


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
    if _markers(saved) != _markers(live):
        raise ModelMismatchError(
            f"the store has the state of optimizer {saved['optimizer']}, this job has {live['optimizer']}: "
            "use the same kind of optimizer, or set another `store:`"
        )
    # Where the live value is a tensor, the adapter checks the shape.
    numbers = {key for key, value in _hyper(live) if isinstance(value, bool | int | float)}
    for key, value in _hyper(saved):
        if key in numbers and not isinstance(value, bool | int | float | torch.Tensor | None):
            raise ModelMismatchError(
                f"the store has the hyperparameter {key} = {value!r}, which is a number in this optimizer: resume with "
                "the optimizer of the run that saved it"
            )


def _hyper(framework: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return (item for group in framework["param_groups"] for item in group["hyper"].items())


def _markers(framework: Mapping[str, Any]) -> set[str]:
    return {key for group in framework["param_groups"] for key in group["hyper"] if key in _OPTIMIZER_MARKERS}


def encoding_loss(host: torch.Tensor, place: FragmentPlace) -> str | None:
    """Describe the values that the live dtype cannot hold; None if it holds all of them, NaN included.

    Rounding is described, and so is a mask value that becomes infinite (see :func:`_is_mask_value`).

    Raises:
        ModelMismatchError: Values would change otherwise: too large, fractions in an integer tensor, complex values in
            a real tensor.
    """
    if place.dtype == host.dtype:
        return None
    where = f"{place.fragment.fqn}/{place.fragment.slot}"
    chunks = (host[start : start + _CHUNK] for start in range(0, host.numel(), _CHUNK))
    losses = {_chunk_loss(chunk, place.dtype, place.fragment.slot == BUFFER) for chunk in chunks}
    if _Loss.CHANGED in losses:
        raise ModelMismatchError(
            f"{where}: values of {host.dtype} are too large for the live {place.dtype}, or of a kind that it cannot "
            "represent; resume with a wider dtype"
        )
    if _Loss.INFINITE in losses:
        return f"the extremes of {host.dtype} in {where} became infinite in {place.dtype}"
    return f"{where} was rounded from {host.dtype} to {place.dtype}" if _Loss.ROUNDED in losses else None


class _Loss(Enum):
    NONE, ROUNDED, INFINITE, CHANGED = range(4)


def _chunk_loss(host: torch.Tensor, dtype: torch.dtype, buffer: bool) -> _Loss:
    if host.is_complex():
        return _Loss.CHANGED
    live = host.to(dtype)
    back = live.to(host.dtype)
    lost = (back != host) & ~(back.isnan() & host.isnan())
    if not bool(lost.any()):
        return _Loss.NONE
    if not dtype.is_floating_point:
        return _Loss.CHANGED
    before, after = host[lost], live[lost]
    distorted = _is_distorted(before, after)
    if not bool(distorted.any()):
        return _Loss.ROUNDED
    only_masks = buffer and not bool((distorted & ~_is_mask_value(before, after)).any())
    return _Loss.INFINITE if only_masks else _Loss.CHANGED


def _is_distorted(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return where a value changed by more than rounding: became infinite or NaN, or was clipped."""
    wide, narrow = before.double(), after.double()
    clipped = (wide.abs() > 1) & (narrow.abs() < wide.abs() / 2)
    return (wide.isfinite() != narrow.isfinite()) | narrow.isnan() | clipped


def _is_mask_value(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return where a buffer holds the lowest or largest number of its dtype, which becomes infinite in the live dtype.

    Attention masks use that number. ``buffer.to(dtype)`` makes it infinite as well, so the live model would hold the
    same. It is reported and the state is not exact, since a softmax over -inf alone is NaN and one over equal finite
    numbers is not. Any other value that is too large, such as 1e6 in a running variance, is refused as in a weight."""
    if not before.is_floating_point():
        return torch.zeros_like(before, dtype=torch.bool)
    return (before.double().abs() == torch.finfo(before.dtype).max) & after.double().isinf()
