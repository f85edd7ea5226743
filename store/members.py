"""Which tensors a unit is made of, as one digest: two versions of a unit are comparable only where it is equal.

The number of elements is not enough: two tensors of equal size may have changed places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from store.record import digest, seal
from store.schema import Entry


def members_digest(members: Mapping[str, tuple[int, str]]) -> str:
    """Digest of ``{fqn: (elements over all ranks, dtype)}``, in any order."""
    return digest(seal(sorted([fqn, numel, dtype] for fqn, (numel, dtype) in members.items())))


def members_of(entries: Iterable[Entry]) -> dict[str, tuple[int, str]]:
    """The members that stored fragments of one unit make up."""
    members: dict[str, tuple[int, str]] = {}
    for entry in entries:
        numel, dtype = members.get(entry.fqn, (0, entry.dtype))
        members[entry.fqn] = (numel + entry.numel, dtype if dtype == entry.dtype else "mixed")
    return members
