"""What a job stands on after a resume, and what its next saves therefore build on. Training thread; collective."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from monitor.job import Job
from monitor.remembered import Remembered, newest_on_disk
from monitor.resume import Resumed
from store.catalog import Catalog
from store.certificate import Certificate, certify, from_memory
from store.errors import NothingToResumeError
from store.names import Unit

_log = logging.getLogger("driftpoint")

T = TypeVar("T")


def told_of(found: Resumed, remembered: Remembered) -> Resumed:
    """The same, told what of it is what memory held: where bytes were wrong there, nothing may be."""
    used = {version.save for version in found.resolution.versions.values()} & {remembered.save, remembered.older}
    kept = frozenset(save for save in used if save is not None)
    if not kept:
        return found
    return replace(found, memory=max(kept), kept=kept, replicas=remembered.replicas)


def resumed(
    attempt: Callable[[Catalog], Resumed | None], catalog: Catalog, remembered: Remembered | None
) -> Resumed | None:
    """What a resume brought. attempt: resumes a store. catalog: the store's alone. Collective."""

    def told(found: Catalog) -> Resumed | None:
        outcome = attempt(found)
        return outcome if remembered is None or found is catalog or outcome is None else told_of(outcome, remembered)

    return remembered_or_stored(told, catalog, remembered)


def remembered_or_stored(
    attempt: Callable[[Catalog], T | None], catalog: Catalog, remembered: Remembered | None
) -> T | None:
    """What an attempt brings with memory on top of the store, else with the store alone. Collective.

    Where the bytes in memory are so wrong that nothing is left to resume, the store may still have something, or
    nothing at all, which is no error: the job begins anew."""
    if remembered is None:
        return attempt(catalog)
    for found in (remembered.catalog, remembered.instead):
        try:
            if found is not None:
                return attempt(found)
        except NothingToResumeError as error:  # alike on all ranks, before anything has changed
            _log.error("memory: %s", error)
    return attempt(catalog)


def certified(found: Resumed) -> Certificate:
    """What the job goes on from, rounding by the live dtypes included."""
    certificate = certify(found.resolution)
    for save in found.kept:
        certificate = from_memory(certificate, save, _kept_by_peers(found))
    exact = certificate.exact and not found.rounded
    return replace(certificate, exact=exact, problems=certificate.problems + found.rounded)


def _kept_by_peers(found: Resumed) -> set[Unit]:
    """What consists, in part at least, of replicas."""
    return {
        unit
        for unit, version in found.resolution.versions.items()
        if any(source.part.save == found.memory and source.part.rank in found.replicas for source in version.sources)
    }


def adopt(job: Job, catalog: Catalog, found: Resumed, step: int) -> None:
    """Have the ledger be what the job stands on at ``step``. catalog: the store's alone.

    What came from memory is no version that a commit could point to. So the ledger keeps to the newest commit, and
    how far the state is from that nobody knows: the next save stores all of it."""
    below = found.resolution
    if found.memory is not None:
        versions = found.resolution.versions.items()
        job.table.lost |= {unit for unit, version in versions if version.save in found.kept}
        newest = newest_on_disk(catalog, job.group)
        if newest is None:
            job.ledger.forget()
            return
        below = newest
    # A full save at each resume might be all that a budget pays for.
    job.ledger.adopt(below, step, renew=not job.config.budget.limited)
