"""Finite values that another dtype cannot hold: found, and said with the way out. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from store.errors import UsageError

_NAMED = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that ``--dtype`` takes, by what they hold."""


def overflow(name: str, before: torch.Tensor, after: torch.Tensor) -> Iterator[UsageError]:
    """The error for a cast of the elements ``name`` that lost a finite value; none where all are as finite as before.

    before, after: the same elements in two dtypes.
    """
    if not (before.is_floating_point() and after.is_floating_point()):
        return
    lost = ~_finite(after)
    if not lost.any() or not (lost := lost & _finite(before)).any():
        return
    value, largest = float(before[lost][0]), torch.finfo(after.dtype).max
    wider = [_text(dtype) for dtype in _NAMED if torch.finfo(dtype).max > largest]
    way = f"name --dtype {' or '.join(wider)}" if wider else "leave --dtype out"
    yield UsageError(
        f"{name} holds {value:g}, which {_text(after.dtype)} cannot (it ends at {largest:g}) and which would become "
        f"infinite: {way}"
    )


def _finite(values: torch.Tensor) -> torch.Tensor:
    # Dtypes of one byte have few operations of their own.
    return (values.float() if values.dtype.itemsize == 1 else values).isfinite()


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
