"""What the shared memory of this node holds of a store: the newest version that all ranks have, and newer parts.

Reads records, no payload. A store whose job runs elsewhere has nothing here, which is no fault.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from store.catalog import Catalog
from store.errors import StoreError
from store.memory.claimed import of_store
from store.memory.held import Held, look
from store.memory.owner import is_owned
from store.memory.tier import Tier
from store.names import SaveId


@dataclass(frozen=True)
class InMemory:
    """newest: the newest version that lies here whole, of all ranks; None where there is none.

    part: a newer one of which only some ranks are here, and how many of how many. alive: processes keep it."""

    newest: SaveId | None
    ranks: int = 0
    part: tuple[SaveId, int, int] | None = None
    alive: bool = False
    problems: tuple[str, ...] = ()


def in_memory(base: Path, catalog: Catalog) -> InMemory:
    """Of the store, at ``base``. What cannot be looked at is told in ``problems``; what jobs died of is left out."""
    return MemorySight(base).look(catalog)


class MemorySight:
    """Looks again and again, and reads records only where any is new. Owned by one thread."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._key: Hashable = None
        self._seen = InMemory(None)

    def look(self, catalog: Catalog) -> InMemory:
        """As :func:`in_memory`."""
        tier = Tier(self._base, catalog.store_id)
        try:
            key = (tuple(_stamps(tier)), tuple(catalog.saves()), frozenset(catalog.suspects().saves))
            if key != self._key:
                self._seen, self._key = _held(tier, catalog), key
            alive = any(is_owned(place.owner(rank)) for place in tier.generations() for rank in place.ranks())
        except (StoreError, OSError) as error:
            self._key = None
            return InMemory(None, problems=(str(error),))
        return replace(self._seen, alive=alive)


def _stamps(tier: Tier) -> Iterator[Hashable]:
    """What tells that a file is another one than before, of each."""
    for place in tier.generations():
        for path, _, _ in place.files():
            with suppress(FileNotFoundError):
                found = path.stat()
                yield str(path), found.st_ino, found.st_mtime_ns, found.st_size


def _held(tier: Tier, catalog: Catalog) -> InMemory:
    node = of_store(look(tier), catalog.files)
    least = max(catalog.suspects().saves, default=None)
    saves = [save for save in node.versions if least is None or save > least]
    newest = max((save for save in saves if len(node.versions[save]) == _world(node.versions[save])), default=None)
    part = max((save for save in saves if newest is None or save > newest), default=None)
    told = None if part is None else (part, len(node.versions[part]), _world(node.versions[part]))
    return InMemory(newest, 0 if newest is None else len(node.versions[newest]), told, problems=node.problems)


def _world(held: Mapping[int, Held]) -> int:
    return next(iter(held.values())).record.part.world_size
