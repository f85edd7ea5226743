"""From a unit's copies to what its segment holds: encoded and packed while it is written, and what that lost.

A lossy encoding leaves the decoded values where the copies were: they are what a resume would give back, so drift is
measured against them from then on. Background thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from monitor.dtypes import dtype_name
from monitor.encoded_copy import EncodedCopy, Lost, within_reach
from monitor.encoders import encoder_named
from monitor.packing import SavePacking
from monitor.staging import as_bytes
from store.encoding import CHUNK, INT8_SQRT_BLOCK, Encoding, encoding_named
from store.encoding.base import Bytes
from store.names import RAW, Fragment, Unit
from store.packed import Encoded
from store.segments import StagedFragment

_LEAST_SUM = 1e-20
"""Of squares in float32, to which those that vanished add less than float32 tells."""


@dataclass(frozen=True)
class UnitEncoding:
    """A unit's fragments on this rank, ready to be written. lost: complete once they are."""

    fragments: tuple[StagedFragment, ...]
    lossy: bool
    lost: Lost = field(default_factory=Lost)


def encode_unit(
    unit: Unit,
    encoding: str,
    fragments: Sequence[Fragment],
    copies: Sequence[torch.Tensor | EncodedCopy],
    packing: SavePacking,
) -> UnitEncoding:
    """What to write for finite ``copies``. Fragments that the encoding cannot hold, or does not apply to, are raw."""
    lost, made = Lost(), []
    for fragment, staged in zip(fragments, copies, strict=True):
        copy = staged.copy if isinstance(staged, EncodedCopy) else staged
        if isinstance(staged, EncodedCopy) and staged.held:
            chosen, known = staged.encoding, encoding_named(staged.encoding)
            source = Encoded(known, copy.numel(), dtype_name(copy.dtype), staged.chunks)
            lost.error_sq += staged.lost.error_sq
            lost.decoded_sq += staged.lost.decoded_sq
        else:
            chosen = RAW if isinstance(staged, EncodedCopy) else _fitting(encoding, copy)
            source = _encoded(chosen, copy, lost)
            if chosen != encoding:  # it counts in the size of the unit, of which what is lost is a share
                lost.decoded_sq += sum(_squared(piece.float()) for piece in torch.split(copy, CHUNK))
        plain = chosen == RAW and not packing.active
        data = as_bytes(copy) if plain else packing.packed(unit, fragment, source)
        made.append(
            StagedFragment(
                layer=unit.layer,
                slot=unit.slot,
                fqn=fragment.fqn,
                start=fragment.start,
                numel=fragment.numel,
                dtype=dtype_name(copy.dtype),
                encoding=chosen,
                data=data,
            )
        )
    lossy = any(not encoding_named(one.encoding).lossless for one in made)
    return UnitEncoding(tuple(made), lossy, lost)


def _fitting(encoding: str, copy: torch.Tensor) -> str:
    known = encoding_named(encoding)
    if known.lossless or not known.applies(dtype_name(copy.dtype)):
        return RAW
    held = bool(within_reach(copy)) and (encoding != INT8_SQRT_BLOCK or float(copy.amin()) >= 0)
    return encoding if held else RAW


def _encoded(name: str, copy: torch.Tensor, lost: Lost) -> Encoded:
    encoding = encoding_named(name)
    chunks = partial(_raw_chunks, copy) if encoding.lossless else partial(_lossy_chunks, copy, encoding, lost)
    return Encoded(encoding, copy.numel(), dtype_name(copy.dtype), chunks)


def _raw_chunks(copy: torch.Tensor) -> Iterator[Bytes]:
    data = np.frombuffer(as_bytes(copy), np.uint8)
    step = CHUNK * copy.element_size()
    for start in range(0, data.size, step):
        yield data[start : start + step]


def _lossy_chunks(copy: torch.Tensor, encoding: Encoding, lost: Lost) -> Iterator[Bytes]:
    encoder = encoder_named(encoding.name)
    scratch = torch.empty(min(CHUNK, copy.numel()), dtype=torch.float32)
    for values in torch.split(copy, CHUNK):
        out = torch.empty(encoding.stored_bytes(values.numel(), "F32"), dtype=torch.uint8)
        decoded = scratch[: values.numel()]
        encoder.encode(values, out)
        encoder.decode(out, decoded)
        lost.error_sq += _squared(values.sub_(decoded))
        lost.decoded_sq += _squared(decoded)
        values.copy_(decoded)
        yield out.numpy()


def _squared(values: torch.Tensor) -> float:
    """In float32 sums of a cache-sized piece each, added up in float64."""
    return sum(_squared_piece(piece) for piece in torch.split(values, 1 << 14))


def _squared_piece(values: torch.Tensor) -> float:
    quick = float(torch.dot(values, values))
    # Squares below 1e-38 vanish in float32, and above 3e38 there are none: second moments come to the first.
    if _LEAST_SUM < quick < math.inf:
        return quick
    wide = values.double()
    return float(torch.dot(wide, wide))
