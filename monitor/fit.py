"""Whether what a store holds can be put into the live job at all: same tensors, same slots, same kind of optimizer,
dtypes that hold the values. Changes nothing; ModelMismatchError, with what to do, where it cannot.

It knows records and tensors, no files and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from monitor.adapters.base import Adapter, Place
from store.errors import ModelMismatchError
from store.names import BUFFER, FROZEN, WEIGHTS
from store.schema import ManifestRecord

Slots = dict[str, dict[str, str]]
"""fqn -> slot -> dtype as stored."""

_TELLING = frozenset({"betas", "momentum", "alpha", "rho", "lr_decay", "etas", "lambd", "nesterov"})
"""Hyperparameters that tell one kind of optimizer from another, whoever implements it."""


def require_model(manifest: ManifestRecord, adapter: Adapter) -> None:
    """The same tensors in the same shapes."""
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


def is_rounded(host: torch.Tensor, place: Place) -> bool:
    """Whether the live dtype cannot hold the stored values. ModelMismatchError where it makes them infinite."""
    if place.dtype == host.dtype:
        return False
    cast = host.to(place.dtype)
    if bool((cast.isfinite() != host.isfinite()).any()):
        raise ModelMismatchError(
            f"{place.fragment.fqn}/{place.fragment.slot}: values of {host.dtype} are too large for the live "
            f"{place.dtype}; resume with a wider dtype"
        )
    return not torch.equal(cast.to(host.dtype), host)
