"""Which commit a resume takes: the newest that is whole. Reads records and no payload; knows no live job."""

from __future__ import annotations

import time

from monitor.fit import Slots
from store.catalog import Catalog
from store.errors import DamagedError, NothingToResumeError, StorageError
from store.names import SaveId
from store.versions import Bad, Resolution, newest_resumable, resolve


def choose(catalog: Catalog, bad: frozenset[Bad]) -> tuple[str | None, tuple[str, ...], int]:
    """The name of the newest commit that is whole, None where there is no commit; what was wrong with newer ones; and
    how many of them are passed over.

    NothingToResumeError where there are commits and none is whole."""
    catalog.forget()
    if not catalog.saves():
        return None, (), 0
    try:
        resolution, passed_over = newest_resumable(catalog, bad)
        if passed_over or resolution.problems:
            _pause(catalog)
            resolution, passed_over = newest_resumable(catalog, bad)
    except NothingToResumeError as error:
        raise NothingToResumeError(
            f"{error}. Look with `driftpoint verify STORE`; to start over on purpose, name another `store:`"
        ) from error
    chosen = resolution.manifest.save
    return chosen.name, passed_over, sum(save > chosen for save in catalog.saves())


def resolved(catalog: Catalog, save: SaveId, bad: frozenset[Bad]) -> Resolution:
    """The versions of that commit. DamagedError or StorageError where this rank does not find them whole."""
    try:
        resolution = resolve(catalog, save, bad)
    except (DamagedError, StorageError):
        _pause(catalog)
        return resolve(catalog, save, bad)
    if resolution.problems:
        _pause(catalog)
        return resolve(catalog, save, bad)
    return resolution


def _pause(catalog: Catalog) -> None:
    """Before a second look: what a disk refuses once it may give the next time."""
    time.sleep(0.2)
    catalog.forget()


def slots_of(resolution: Resolution) -> Slots:
    """What is stored of each parameter."""
    slots: Slots = {}
    for source in resolution.sources():
        slots.setdefault(source.entry.fqn, {})[source.entry.slot] = source.entry.dtype
    return slots
