"""Which versions in memory are of the history that a store tells: memory knows a store by its identity alone.

A copy of a store has that identity, too, and so has one that was restored from a copy. Jobs on both claim epochs of
the same numbers, but each claim has a token of its own, that stands in the store and in every version kept under it.
And a version says which commit it continues: where that is gone, the store was put back to what it was before it.

What one incarnation of a job kept is believed as a whole or not at all. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from store.epochs import read_epoch
from store.errors import DamagedError, MissingError
from store.files import Files
from store.layout import MANIFESTS, manifest_path, parse_save_file
from store.memory.held import Held, Node
from store.names import SaveId

Share = tuple[Path, int]
"""Where one rank's memory is: the folder, and the rank."""


def of_store(node: Node, files: Files) -> Node:
    """The same, without what is not of this store. StorageError."""
    strange = strangers(node, files)
    versions: dict[SaveId, dict[int, Held]] = {}
    for held in node.everything():
        if share_of(held) not in strange:
            versions.setdefault(held.record.save, {}).setdefault(held.record.part.rank, held)
    return Node(versions, node.problems)


def strangers(node: Node, files: Files) -> set[Share]:
    """Memory of incarnations that are not of this store: of a copy's, or of what it was before it was put back.

    An incarnation goes by the token of its claim and not by the folder: jobs on copies that begin at the same moment
    may share one, since each rank takes the first place that is free. StorageError."""
    there = list(node.everything())
    tokens = {epoch: _token(files, epoch) for epoch in {held.record.save.epoch for held in there}}
    newest = _newest(files) if there else None
    claims = {
        held.record.claim
        for held in there
        if held.record.claim != tokens[held.record.save.epoch] or _continues_nothing(held, newest, files)
    }
    return {share_of(held) for held in there if held.record.claim in claims}


def share_of(held: Held) -> Share:
    """Where it lies."""
    return held.payload.parent, held.record.part.rank


def _continues_nothing(held: Held, newest: SaveId | None, files: Files) -> bool:
    """Whether it continues a commit that was there and is not any more, though nothing newer is: then it was not
    pruned."""
    head = held.record.head
    if head is None or head.previous is None or (newest is not None and newest > SaveId.parse(head.previous)):
        return False
    try:
        files.size(manifest_path(SaveId.parse(head.previous)))
    except MissingError:
        return True
    return False


def _newest(files: Files) -> SaveId | None:
    try:
        return max(_saves(files.list_dir(MANIFESTS)), default=None)
    except MissingError:
        return None


def _saves(names: Iterable[str]) -> list[SaveId]:
    return [save for name in names if (save := parse_save_file(name)) is not None]


def _token(files: Files, epoch: int) -> str | None:
    try:
        return read_epoch(files, epoch).token
    except (MissingError, DamagedError):
        return None
