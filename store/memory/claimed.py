"""Which versions in memory are of the history that a store tells: memory knows a store by its identity alone.

A copy of a store has that identity, too, and so has one that was restored from a copy. Jobs on both claim epochs of
the same numbers, but each claim has a token of its own, that stands in the store and in every version kept under it.
Reads only.
"""

from __future__ import annotations

from store.epochs import read_epoch
from store.errors import DamagedError, MissingError
from store.files import Files
from store.memory.held import Node


def of_store(node: Node, files: Files) -> Node:
    """The same, without what was kept under a claim that this store does not know. StorageError."""
    tokens = {epoch: _token(files, epoch) for epoch in {save.epoch for save in node.versions}}
    known = {
        save: {rank: one for rank, one in held.items() if one.record.claim == tokens[save.epoch]}
        for save, held in node.versions.items()
    }
    return Node({save: held for save, held in known.items() if held}, node.problems)


def _token(files: Files, epoch: int) -> str | None:
    try:
        return read_epoch(files, epoch).token
    except (MissingError, DamagedError):
        return None
