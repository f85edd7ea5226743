"""What the certificate of exported weights says: nothing of what is left out, and in which dtype they are written.

A cast that rounds makes weights less than exact, by how much nobody has measured. One to the dtype that was trained in
gives the working weights, which are what the run computes with, and not its master weights. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch

from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from merger.stored import Stored
from merger.tensors import torch_dtype
from store.certificate import Certificate, CertifiedUnit, is_exact, is_lossy
from store.text import listed

_NAMED = 6
"""Layers that a note names before it only counts them."""


@dataclass(frozen=True)
class Written:
    """Weights that are held in one dtype and written in another that cannot hold all values of it.

    held, written: torch's names. working: ``written`` is what the model was trained in, so that the values are, to the
    last bit, those that the run computes with; otherwise they are rounded.
    """

    held: str
    written: str
    working: bool
    layers: tuple[str, ...]


@dataclass(frozen=True)
class WeightsCertificate(Certificate):
    """A certificate of weights alone, which says where their dtype is another than that of the training state."""

    written: tuple[Written, ...] = ()


def weights_certificate(checkpoint: Checkpoint, weights: Mapping[str, Stored]) -> WeightsCertificate:
    """The certificate of an output that holds ``weights`` and no optimizer."""
    casts = dict.fromkeys(_casts(checkpoint, weights))
    layers: dict[tuple[str, str, bool], dict[str, None]] = {}
    rounded: dict[tuple[str, str], str] = {}
    for cast in casts:
        layers.setdefault((cast.held, cast.written, cast.working), {})[cast.layer] = None
        if not cast.working:
            rounded[cast.layer, cast.slot] = cast.written
    whole = checkpoint.certificate
    kept = tuple(unit for unit in whole.units if unit.slot in SLOT_OF_KIND.values())
    values = {one.name: getattr(whole, one.name) for one in fields(Certificate)}
    values["units"] = tuple(_rounded(unit, rounded.get((unit.layer, unit.slot))) for unit in kept)
    values["exact"] = _is_exact(whole, kept) and not rounded
    written = tuple(Written(*cast, tuple(names)) for cast, names in layers.items())
    return WeightsCertificate(**values, written=written)


def working_dtypes(certificate: Certificate) -> tuple[str, ...]:
    """Torch's names of the dtypes in which working weights are written in place of master weights."""
    written = certificate.written if isinstance(certificate, WeightsCertificate) else ()
    return tuple(dict.fromkeys(one.written for one in written if one.working))


def dtype_notes(certificate: WeightsCertificate) -> Iterator[str]:
    """What to know about the dtypes, for people."""
    for one in certificate.written:
        if one.working:
            yield (
                f"these are the working weights, which the run computes with: its {one.held} master weights rounded "
                f"to {one.written}; --dtype {one.held} writes the master weights themselves"
            )
        else:
            yield (
                f"weights held in {one.held} are written in {one.written}, which rounds them, very small ones to zero: "
                f"this is not exact ({listed(one.layers, _NAMED)}); without a dtype they are written as they were "
                "trained"
            )


@dataclass(frozen=True)
class _Cast:
    """As in :class:`Written`, of one (layer, slot)."""

    layer: str
    slot: str
    held: str
    written: str
    working: bool


def _casts(checkpoint: Checkpoint, weights: Mapping[str, Stored]) -> Iterator[_Cast]:
    for stored in weights.values():
        for fqn, slot in ((placed.fragment.fqn, placed.fragment.slot) for placed in stored.placed):
            held, record = torch_dtype(checkpoint.dtype(fqn, slot)), checkpoint.record(fqn)
            if not _holds(stored.dtype, held):
                working = stored.dtype == torch_dtype(record.dtype)
                yield _Cast(record.layer, slot, _text(held), _text(stored.dtype), working)


def _holds(target: torch.dtype, source: torch.dtype) -> bool:
    """Whether every value of ``source`` is one of ``target``."""
    if target == source:
        return True
    if not (target.is_floating_point and source.is_floating_point):
        return False
    ours, theirs = torch.finfo(target), torch.finfo(source)
    least = ours.tiny * ours.eps <= theirs.tiny * theirs.eps  # the smallest values that are not zero
    return ours.eps <= theirs.eps and ours.max >= theirs.max and least


def _is_exact(whole: Certificate, kept: tuple[CertifiedUnit, ...]) -> bool:
    """Whether the weights are exact where all of the state need not be: what is left out may be old or rounded.

    Only a commit of a store is exact just where all of its units are. Another checkpoint that is not may be so for
    reasons that no unit shows, and so may a composite, from which only weights were taken in the first place.
    """
    of_one_commit = bool(whole.store_id) and len(kept) < len(whole.units)
    return whole.exact or (of_one_commit and bool(kept) and all(is_exact(unit, whole.save) for unit in kept))


def _rounded(unit: CertifiedUnit, dtype: str | None) -> CertifiedUnit:
    if dtype is None:
        return unit
    encoding = f"{unit.encoding}, {dtype}" if is_lossy(unit.encoding) else dtype
    return replace(unit, encoding=encoding, error=None)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
