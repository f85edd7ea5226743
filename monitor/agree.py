"""All ranks or none: run something on every rank (or on rank 0) and let an error on any of them be everybody's.

Without this, the rank that failed raises while the others wait in a collective for good. That goes for any error,
also one that nobody raises on purpose: the rank that has it raises it as it is, the others a DriftpointError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from monitor.group import Group
from store import errors
from store.errors import DriftpointError

T = TypeVar("T")


def everywhere(group: Group, action: Callable[[], T]) -> T:
    """The action's result on this rank, once it succeeded on every rank. Else an error on every rank."""
    result: T | None = None
    mine: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - this rank's edge: raised again once the others know
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
    mine: Exception | None = None
    if group.rank == 0:
        try:
            packed = (action(), None)
        except Exception as error:  # noqa: BLE001 - this rank's edge: raised again once the others know
            mine = error
            packed = (None, _packed(error))
    result, failed = group.from_first(packed)
    if mine is not None:
        raise mine
    if failed is not None:
        raise _unpacked(*failed)
    return result  # type: ignore[no-any-return]


def said(group: Group, mine: str | None) -> str:
    """What any rank has to say, and which; collective. Alike on all of them, most of the time."""
    told: dict[str, int] = {}
    for rank, text in enumerate(group.gather(mine)):
        if text is not None:
            told.setdefault(text, rank)
    return "; ".join(f"rank {rank}: {text}" if group.world_size > 1 else text for text, rank in told.items())


def _packed(error: Exception) -> tuple[str, str]:
    named = isinstance(error, DriftpointError)  # others say little without their class: KeyError('n') says 'n'
    return type(error).__name__, str(error) if named else repr(error)


def _unpacked(kind: str, message: str) -> DriftpointError:
    found = getattr(errors, kind, DriftpointError)
    known = isinstance(found, type) and issubclass(found, DriftpointError)
    return found(message) if known else DriftpointError(message)
