"""Memory that a dead job left days ago: it is not removed before a rescue of it was tried, and its failure told."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from pathlib import Path

import pytest

from deploy.daemon import node
from deploy.daemon.metrics import DaemonMetrics
from deploy.daemon.node import Node, Options
from store.commit import commit
from store.memory import rescue
from store.memory.cleanup import KEEP_UNREACHABLE_SECONDS
from store.memory.index import SeenStore, scan_node
from store.memory.layout import Tier, tiers
from store.names import SEGMENTS, STORE, SaveId, manifest_path, segment_dir
from store.resolve import newest_resumable
from store.schema import ManifestRecord
from store.session import StoreLock
from store.storage.local import Files
from tests.support import jobs
from tests.support.daemons import daemon, known, steps, trainer, until
from tests.support.jobs import Job
from tests.support.kept import abandoned, catalog_of, kept_step, memory, tier_of

DAY = 24 * 3600.0


class PartlyFrozen(jobs.Model):
    """A model with weights that are saved once."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.embed.requires_grad_(False)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def died(store: Path, step: int, days_ago: float, *, known_to_the_daemon: bool = True) -> Tier:
    """A job that committed step 4, and left a version in memory when it died."""
    one = Job(store, every=4, memory=memory(store))
    one.ckpt.resume()
    for _ in range(step):
        kept_step(one)
    abandoned(one)
    tier = tier_of(store)
    if known_to_the_daemon:
        SeenStore(tier.base).seen(tier.store_id, store)
    aged(tier, days_ago)
    return tier


def aged(tier: Tier, days: float) -> None:
    then = time.time() - days * DAY
    for place in tier.generations():
        for path, *_ in place.files():
            os.utime(path, (then, then))


def cleaned(tier: Tier) -> None:
    """What the daemon does once an hour."""

    async def work() -> None:
        beside = Node(Options(tier.base), DaemonMetrics())
        await beside.clean()
        while beside.rescuer.busy:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # its news are handled
        await beside.rescuer.end(30.0)

    asyncio.run(work())


def errors(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR)


def test_a_state_that_no_commit_has_is_written_before_its_memory_goes(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = died(store, 6, days_ago=2)
    assert steps(store) == [4]
    cleaned(tier)
    assert steps(store) == [6, 4]
    assert tiers(tier.base) == [] and not errors(caplog)


def test_memory_stays_while_its_store_is_away_and_is_written_when_that_is_back(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = died(store, 6, days_ago=2)
    away = store.rename(store.parent / "away")
    cleaned(tier)
    assert scan_node(tier).newest == SaveId(6, 1)
    assert "no store" in errors(caplog) and "it stays" in errors(caplog)
    away.rename(store)
    cleaned(tier)
    assert steps(store) == [6, 4] and tiers(tier.base) == []


def test_memory_of_a_store_that_never_comes_back_goes_after_a_week(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = died(store, 6, days_ago=1 + KEEP_UNREACHABLE_SECONDS / DAY)
    store.rename(store.parent / "away")
    cleaned(tier)
    assert tiers(tier.base) == []
    assert "it is removed" in errors(caplog)


def test_damaged_memory_goes_after_a_rescue_was_tried_and_its_failure_told(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = died(store, 6, days_ago=2)
    for held in [*scan_node(tier).everything()]:
        held.payload.write_bytes(b"\xff" * held.payload.stat().st_size)
    aged(tier, 2)
    cleaned(tier)
    assert steps(store) == [4] and tiers(tier.base) == []
    assert "damaged" in errors(caplog) and "it is removed" in errors(caplog)


def test_memory_stays_while_its_store_is_damaged_and_is_written_when_that_is_mended(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = died(store, 6, days_ago=2)
    whole = (store / STORE).read_bytes()
    (store / STORE).write_bytes(whole[:-9])
    cleaned(tier)
    assert scan_node(tier).newest == SaveId(6, 1) and "it stays" in errors(caplog)
    (store / STORE).write_bytes(whole)
    cleaned(tier)
    assert steps(store) == [6, 4] and tiers(tier.base) == []


def test_memory_stays_while_the_store_lacks_what_it_continues(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "Model", PartlyFrozen)
    tier = died(store, 10, days_ago=2)
    segments = (store / SEGMENTS).rename(store / "elsewhere")
    (store / SEGMENTS).mkdir()
    cleaned(tier)
    assert scan_node(tier).newest == SaveId(10, 1) and "it stays" in errors(caplog)
    (store / SEGMENTS).rmdir()
    segments.rename(store / SEGMENTS)
    cleaned(tier)
    assert steps(store) == [10, 8, 4] and tiers(tier.base) == []


def test_a_newer_commit_that_is_damaged_does_not_make_memory_worthless(store: Path) -> None:
    tier = died(store, 6, days_ago=2)
    (store / manifest_path(SaveId(8, 1))).write_bytes(b"torn")
    cleaned(tier)
    assert steps(store) == [8, 6, 4] and tiers(tier.base) == []
    assert newest_resumable(catalog_of(store))[0].manifest.save == SaveId(6, 1)


def test_a_rescue_gives_way_to_a_job_that_makes_room_before_its_claim(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That job looked which segments are needed just before the rescue committed."""
    tier, locks = died(store, 6, days_ago=2), []

    def late(files: Files, manifest: ManifestRecord, **options: bool) -> None:
        locks.append(StoreLock(store, 0.0))
        commit(files, manifest, **options)

    monkeypatch.setattr(rescue, "commit", late)
    cleaned(tier)
    locks.pop().release()
    shutil.rmtree(store / segment_dir(SaveId(6, 1)))
    again = Job(store, every=4, memory=memory(store))
    assert again.ckpt.resume() == 6
    again.ckpt.close(save=False)


def test_memory_of_a_store_whose_place_is_unknown_stays(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = died(store, 6, days_ago=30, known_to_the_daemon=False)
    cleaned(tier)
    assert scan_node(tier).newest == SaveId(6, 1)
    assert "driftpoint rescue STORE" in errors(caplog)


def test_what_is_not_old_is_left_alone(store: Path) -> None:
    tier = died(store, 6, days_ago=0.5)
    cleaned(tier)
    assert steps(store) == [4] and scan_node(tier).newest == SaveId(6, 1)


def test_another_job_that_begins_does_not_remove_a_state_that_no_commit_has(store: Path, tmp_path: Path) -> None:
    """It knows no other store than its own."""
    tier = died(store, 6, days_ago=30)
    other = Job(tmp_path / "other", every=4, memory=memory(store))
    other.ckpt.resume()
    kept_step(other)
    other.ckpt.close()
    assert scan_node(tier).newest == SaveId(6, 1)


def test_a_rescue_of_leftovers_that_fails_is_tried_again(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = died(store, 6, days_ago=0.1)
    away = store.rename(store.parent / "away")
    monkeypatch.setattr(node, "_RETRIES", (0.2, 0.2))

    async def work(*, comes_back: bool) -> None:
        beside = Node(Options(tier.base), DaemonMetrics())
        beside.rescue_leftovers()
        await asyncio.sleep(0.1)
        assert beside.idle_seconds() < 0.1, "a daemon that waits to try again is not idle"
        if comes_back:
            away.rename(store)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not beside.report().rescues:
            await asyncio.sleep(0.05)
        await beside.rescuer.end(30.0)

    asyncio.run(work(comes_back=False))
    assert "no store" in errors(caplog)
    asyncio.run(work(comes_back=True))
    assert steps(store) == [6, 4]


@pytest.mark.slow
def test_a_daemon_that_is_restarted_while_the_store_is_away_rescues_later(store: Path, base: Path) -> None:
    with daemon(base) as first, trainer(store, base, 7) as job:
        known(base)
        first.kill()
        job.kill()
    away = store.rename(store.parent / "away")
    with daemon(base) as second:
        time.sleep(1.0)  # the first look finds no store
        away.rename(store)
        until(lambda: steps(store) == [7, 4], f"a rescue: {second.said()}")
