"""The encodings of :mod:`store.encoding` in torch, on the device where the values are; bit for bit the same.

The numpy definition is the one that counts; ``tests/contract/test_encodings.py`` holds these to it. It does not
know packing, files or threads. No function here keeps anything between calls.
"""

from __future__ import annotations

import torch

from monitor.encoders.base import Encoder
from monitor.encoders.bf16 import Bf16Encoder, Bf16Int8Encoder
from monitor.encoders.blocks import Int8BlockEncoder, Int8SqrtBlockEncoder
from store.encoding import (
    BF16,
    BF16_INT8,
    CHUNK,
    INT8_BLOCK,
    INT8_SQRT_BLOCK,
    RAW,
    chunk_sizes,
    encoding_named,
)
from store.encoding.base import lanes_bytes
from store.errors import DamagedError

__all__ = ["Encoder", "decode", "encode", "encode_into", "encoder_named", "stored_bytes"]

_ENCODERS: dict[str, Encoder] = {
    BF16: Bf16Encoder(),
    BF16_INT8: Bf16Int8Encoder(),
    INT8_BLOCK: Int8BlockEncoder(),
    INT8_SQRT_BLOCK: Int8SqrtBlockEncoder(),
}


def encoder_named(name: str) -> Encoder:
    """The encoder of one chunk, for a lossy encoding. DamagedError where this release knows none of that name."""
    if name not in _ENCODERS:
        raise DamagedError(f"no encoder {name!r}; there are {', '.join(sorted(_ENCODERS))}")
    return _ENCODERS[name]


def encode(values: torch.Tensor, name: str, out: torch.Tensor | None = None) -> tuple[torch.Tensor, bool]:
    """The encoded fragment (1-d uint8, on the values' device), and whether the encoding can hold the values.

    values: float32 of any shape, contiguous; for raw any dtype. out: 1-d uint8 of the right size, filled and
    returned. Where the second is False, the bytes mean nothing: store the fragment raw. Waits for the device once;
    ``encode_into`` does not.
    """
    if out is None:
        out = torch.empty(stored_bytes(values, name), dtype=torch.uint8, device=values.device)
    return out, bool(encode_into(values, name, out))


@torch.no_grad()
def encode_into(values: torch.Tensor, name: str, out: torch.Tensor) -> torch.Tensor:
    """As ``encode``, without waiting: whether the values can be held comes as a bool tensor on the device."""
    _check(values, out, stored_bytes(values, name))
    flat = _flat(values)
    good = torch.ones((), dtype=torch.bool, device=values.device)
    if name == RAW:
        out.copy_(flat.view(torch.uint8))
        return good
    encoding, encoder, at = encoding_named(name), encoder_named(name), 0
    for index, size in enumerate(chunk_sizes(flat.numel())):
        stop = at + lanes_bytes(encoding.lanes(size, "F32"))
        start = index * CHUNK
        good &= encoder.encode(flat[start : start + size], out[at:stop])
        at = stop
    return good


@torch.no_grad()
def decode(data: torch.Tensor, name: str, out: torch.Tensor) -> torch.Tensor:
    """Fill ``out`` (contiguous; float32, or anything for raw) with the values of an encoded fragment; returns it.

    ``data`` is 1-d uint8 on the same device, as ``encode`` wrote it with True: bytes from a store are not checked
    here but in :mod:`store.encoding`.
    """
    _check(out, data, stored_bytes(out, name))
    flat = _flat(out)
    if name == RAW:
        flat.view(torch.uint8).copy_(data)
        return out
    encoding, encoder, at = encoding_named(name), encoder_named(name), 0
    for index, size in enumerate(chunk_sizes(flat.numel())):
        stop = at + lanes_bytes(encoding.lanes(size, "F32"))
        start = index * CHUNK
        encoder.decode(data[at:stop], flat[start : start + size])
        at = stop
    return out


def stored_bytes(values: torch.Tensor, name: str) -> int:
    """Bytes that a fragment of these values takes. ValueError for a dtype that the encoding does not apply to."""
    if name == RAW:
        return values.numel() * values.element_size()
    if values.dtype != torch.float32:
        raise ValueError(f"{name} takes float32, not {values.dtype}; store this one {RAW}")
    return encoding_named(name).stored_bytes(values.numel(), "F32")


def _flat(values: torch.Tensor) -> torch.Tensor:
    """In one dimension, of stride 1 even where torch counts another one as contiguous: no elements, or one."""
    return values.detach().as_strided((values.numel(),), (1,))


def _check(values: torch.Tensor, data: torch.Tensor, nbytes: int) -> None:
    if not values.is_contiguous():
        raise ValueError("values to encode or decode must be contiguous")
    if data.dtype != torch.uint8 or data.ndim != 1 or data.numel() != nbytes or not data.is_contiguous():
        raise ValueError(f"{nbytes} bytes (1-d, contiguous uint8) are needed, not {tuple(data.shape)} {data.dtype}")
    if data.device != values.device:
        raise ValueError(f"values on {values.device} and bytes on {data.device}: both must be on one device")
