"""At a resume: is there a version in memory that is newer than what the store gives, and can every rank read it?

Ranks of different nodes see different memory. So each tells what lies on its node, all of them pick the same version,
put it together from what the nodes tell, and use it only if every rank finds the bytes that it will need on its own
node, but for the little that rank 0 tells the others. Else the store is resumed from, as if there were no memory tier.
Collective; changes nothing.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from monitor.adapters.base import Adapter
from monitor.agree import everywhere, on_first
from monitor.group import Group
from monitor.lending import lent
from monitor.resume import Resumed
from store.catalog import Catalog
from store.certificate import certify
from store.errors import NothingToResumeError, StoreError
from store.memory.held import Node, look
from store.memory.overlay import Overlay
from store.memory.tier import Tier
from store.memory.version import MemoryVersion, Share, assembled, continued, share_of
from store.names import SaveId
from store.versions import Resolution, newest_resumable, resolve

_log = logging.getLogger("driftpoint")


@dataclass(frozen=True)
class Remembered:
    """A version in memory, and the store with it on top."""

    save: SaveId
    catalog: Catalog


@dataclass(frozen=True)
class _Sight:
    """What one rank tells of its node: versions, and the ranks whose share is there."""

    node: str
    versions: Mapping[str, tuple[int, ...]]


def newest_remembered(
    tier: Tier, catalog: Catalog, adapter: Adapter, group: Group, *, effective: bool
) -> Remembered | None:
    """The newest version that every rank can read; None where the store's newest commit is as good. Collective.

    effective: a commit counts as of its effective step, which is where a resume goes on from it."""
    node = _look(tier)
    sights = group.gather(_sight(tier, node))
    for name in _newer(sights, catalog, group, effective):
        save = SaveId.parse(name)
        found = _put_together(save, node, group, tells=_tells(sights, group.rank))
        if found is None:
            continue
        found = continued(found, on_first(group, lambda save=save: _before(save, catalog)))  # type: ignore[misc]
        told = lent(catalog, found, adapter, group)
        if told is not None:
            return Remembered(save, Catalog(Overlay(catalog.files, replace(found, lent=told)), catalog.record))
        _log.warning(
            "memory holds step %d, but not every rank finds what it needs on its own node (ranks moved, or the world "
            "changed): going on from the store",
            save.step,
        )
    return None


def resume_remembered(
    attempt: Callable[[Catalog], Resumed | None], catalog: Catalog, remembered: Remembered | None
) -> tuple[Resumed | None, Remembered | None]:
    """What a resume brought, and the version that it is, if it is one. attempt: resumes a store. Collective.

    Where the version's bytes are so wrong that it is not used, there may be a commit that it was preferred to, or none
    at all, which is no error: the job begins anew."""
    if remembered is not None:
        try:
            found = attempt(remembered.catalog)
        except NothingToResumeError as error:  # alike on all ranks, before anything has changed
            _log.error("memory: %s", error)
        else:
            if found is not None and found.resolution.manifest.save == remembered.save:
                return found, remembered
            _log.error("memory: step %d cannot be read: going on from the store", remembered.save.step)
    return attempt(catalog), None


def newest_on_disk(catalog: Catalog, group: Group) -> Resolution | None:
    """The newest commit that is whole, below what memory has: what the job's next saves build on. Collective.

    None, on all ranks, where there is none: then the next save is a first one."""

    found = on_first(group, lambda: _newest_whole(catalog))
    if found is None:
        return None
    try:
        return everywhere(group, lambda: resolve(catalog, SaveId.parse(found)))
    except StoreError as error:
        _log.warning("the newest commit cannot be read, so that the next save is a full one: %s", error)
        return None


def _look(tier: Tier) -> Node:
    try:
        node = look(tier)
    except (StoreError, OSError) as error:
        _log.warning("the memory tier cannot be read: %s", error)
        return Node({})
    for problem in node.problems:
        _log.warning("memory: %s", problem)
    return node


def _newer(sights: list[_Sight], catalog: Catalog, group: Group, effective: bool) -> list[str]:
    """Versions that are newer than what the store can give, newest first. The same list on all ranks."""
    found = _candidates(sights)
    newer = _after(found, on_first(group, lambda: _newest_commit(catalog)))
    if newer or not found:
        return newer
    # That commit may be damaged; or a composite, whose weights are older on average than a version before it.
    newest, stands = on_first(group, lambda: _standing(catalog))
    newer = _after(found, newest)
    if newer or newest is None or not effective:
        return newer
    epoch = SaveId.parse(newest).epoch
    return [name for name in found if SaveId.parse(name).epoch == epoch and SaveId.parse(name).step > stands]


def _standing(catalog: Catalog) -> tuple[str | None, float]:
    """The newest commit that is whole, and its effective step."""
    catalog.forget()
    try:
        resolution, passed_over = newest_resumable(catalog)
    except StoreError as error:
        _log.warning("%s", error)
        return None, 0.0
    for problem in passed_over:
        _log.warning("resume: %s", problem)
    return resolution.manifest.save.name, certify(resolution).effective_step


def _after(names: list[str], newest: str | None) -> list[str]:
    return [name for name in names if newest is None or SaveId.parse(name) > SaveId.parse(newest)]


def _newest_commit(catalog: Catalog) -> str | None:
    catalog.forget()
    try:
        return next((save.name for save in catalog.saves()), None)
    except StoreError:
        return None  # a resume from the store will say it


def _newest_whole(catalog: Catalog) -> str | None:
    catalog.forget()
    try:
        return newest_resumable(catalog)[0].manifest.save.name
    except StoreError:
        return None


def _sight(tier: Tier, node: Node) -> _Sight:
    where = f"{socket.gethostname()} {_boot()} {tier.folder} {_mount(tier)}"
    return _Sight(where, {save.name: tuple(sorted(held)) for save, held in node.versions.items()})


def _mount(tier: Tier) -> str:
    """Tells containers apart that share a machine and a host name, but not their memory."""
    try:
        status = tier.folder.stat()
    except OSError:
        return ""
    return f"{status.st_dev} {status.st_ino}"


def _boot() -> str:
    """Tells machines of one host name apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _candidates(sights: list[_Sight]) -> list[str]:
    """Versions of which ranks from 0 on are somewhere, newest first. The same list on all ranks."""
    ranks: dict[str, set[int]] = {}
    for sight in sights:
        for name, there in sight.versions.items():
            ranks.setdefault(name, set()).update(there)
    whole = [name for name, there in ranks.items() if there == set(range(len(there)))]
    return sorted(whole, key=SaveId.parse, reverse=True)


def _tells(sights: list[_Sight], rank: int) -> bool:
    """Whether this rank is the one that tells for its node."""
    return next(index for index, sight in enumerate(sights) if sight.node == sights[rank].node) == rank


def _before(save: SaveId, catalog: Catalog) -> str | None:
    """The newest commit that the version continues. In one epoch a job only goes forward, so what it committed before
    is of the same branch; when the version was kept it may not have been known to be committed."""
    try:
        return next((one.name for one in catalog.saves() if one.epoch == save.epoch and one.step <= save.step), None)
    except StoreError:
        return None


def _put_together(save: SaveId, node: Node, group: Group, *, tells: bool) -> MemoryVersion | None:
    mine = share_of(node.versions.get(save, {})) if tells else Share({}, None)
    shares = [Share(*told) for told in group.gather((dict(mine.parts), mine.head))]
    try:
        return assembled(save, shares, node)
    except StoreError as error:  # alike on all ranks: it is made of what all of them were told
        _log.warning("memory: %s", error)
        return None
