"""Convert torch tensors to bytes and back, and detect values that no healthy training state holds."""

import math
from typing import Literal

import numpy as np
import torch

from store.encoding.base import DTYPES
from store.errors import UnsupportedError
from store.state_tree import Leaf

_TORCH_OF: dict[str, torch.dtype] = {name: getattr(torch, in_torch) for name, (in_torch, _) in DTYPES.items()}
_NAME_OF = {dtype: name for name, dtype in _TORCH_OF.items()}
SECOND_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})  # means or sums of squares
Implausible = Literal["NaN", "infinite values", "negative values"]
Implausibles = dict[tuple[str, str], set[Implausible]]  # those found, by (fqn, slot)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors name. UnsupportedError if torch has none."""
    if name not in _TORCH_OF:
        raise UnsupportedError(f"unknown tensor dtype {name!r}; this release reads {', '.join(_TORCH_OF)}")
    return _TORCH_OF[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype. UnsupportedError if there is none."""
    if dtype not in _NAME_OF:
        raise UnsupportedError(f"tensors of {dtype} are not supported; use one of {', '.join(_TORCH_OF)}")
    return _NAME_OF[dtype]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, writable, in place."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return memoryview(bytearray())
    if flat.data_ptr() != tensor.data_ptr():
        raise ValueError("the tensor is not contiguous: writing to its bytes would change a copy")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def whole_elements(rest: bytes, piece: memoryview, itemsize: int) -> tuple[memoryview, bytes]:
    """Return the elements that end in ``rest`` and ``piece``, and the bytes of one that does not end in them."""
    data = memoryview(bytearray(rest) + piece) if rest else piece
    whole = len(data) - len(data) % itemsize
    return data[:whole], bytes(data[whole:])


def to_leaf(value: object) -> Leaf | None:
    """Return a tensor, shape or dtype as a run-state leaf with its own memory; None for any other value."""
    if type(value) is torch.dtype:
        name = dtype_name(value).encode()
        return Leaf("U8", (len(name),), name, "dtype")
    if type(value) is torch.Size:
        return Leaf("I64", (len(value),), np.array(value, dtype="<i8").tobytes(), "size")
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    host = value.detach().contiguous()
    return Leaf(dtype_name(host.dtype), tuple(host.shape), bytes(memory_of(host)))


def from_leaf(leaf: Leaf) -> torch.Tensor | torch.Size | torch.dtype:
    """Return the tensor, shape or dtype of a run-state leaf, with its own memory."""
    if leaf.kind == "dtype":
        return torch_dtype(bytes(leaf.data).decode())
    out = torch.empty(leaf.shape, dtype=torch_dtype(leaf.dtype))
    if out.numel():
        memory_of(out)[:] = memoryview(leaf.data).cast("B")
    return torch.Size(out.tolist()) if leaf.kind == "size" else out


def implausible_values(values: torch.Tensor, slot: str) -> set[Implausible]:
    """Return the kinds of values in a floating-point tensor that no healthy training state holds.

    Negative values are implausible in second moments only. One pass over ``values``, unless some are found."""
    if not values.numel() or not values.is_floating_point():
        return set()
    values = values.float() if values.dtype.itemsize == 1 else values  # these have few operations of their own
    low, high = (float(bound) for bound in torch.aminmax(values))  # both are NaN if any value is
    found: set[Implausible] = set()
    if math.isnan(low):
        found.add("NaN")
        low, high = (float(bound) for bound in torch.aminmax(values.nan_to_num(0.0, math.inf, -math.inf)))
    if math.isinf(low) or math.isinf(high):
        found.add("infinite values")
    if low < 0 and slot in SECOND_MOMENTS:
        found.add("negative values")
    return found
