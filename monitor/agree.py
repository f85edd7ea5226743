"""All ranks or none: run something on every rank (or on rank 0) and let an error on any of them be everybody's.

Without this, the rank that failed raises while the others wait in a collective for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from monitor.group import Group
from store import errors
from store.errors import DriftpointError

T = TypeVar("T")


def everywhere(group: Group, action: Callable[[], T]) -> T:
    """The action's result on this rank, once it succeeded on every rank. Else a DriftpointError on every rank."""
    result: T | None = None
    mine: DriftpointError | None = None
    try:
        result = action()
    except DriftpointError as error:
        mine = error
    told = group.gather(None if mine is None else _packed(mine))
    if mine is not None:
        raise mine
    failed = [(rank, packed) for rank, packed in enumerate(told) if packed is not None]
    if failed:
        rank, (kind, message) = failed[0]
        raise _unpacked(kind, f"rank {rank}: {message}")
    return result  # type: ignore[return-value]


def on_first(group: Group, action: Callable[[], T]) -> T:
    """Rank 0's result on every rank, or rank 0's error on every rank. The result must be plain data."""
    packed: tuple[T | None, tuple[str, str] | None] = (None, None)
    if group.rank == 0:
        try:
            packed = (action(), None)
        except DriftpointError as error:
            if group.world_size == 1:
                raise
            packed = (None, _packed(error))
    result, failed = group.from_first(packed)
    if failed is not None:
        raise _unpacked(*failed)
    return result  # type: ignore[no-any-return]


def _packed(error: DriftpointError) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _unpacked(kind: str, message: str) -> DriftpointError:
    found = getattr(errors, kind, DriftpointError)
    known = isinstance(found, type) and issubclass(found, DriftpointError)
    return found(message) if known else DriftpointError(message)
