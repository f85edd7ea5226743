"""Testing the tests of the memory tier: each safeguard taken out in turn must be caught, by the check that is named.

ARENA is the switch between two payloads, EXACT what comes back of copies that are made beside training, CHANGED what a
script does to them meanwhile, FLIPS wrong bytes, BEGIN a cleanup beside a job that begins, AGE old memory of a store
that is away. That ranks agree is tested in
tests/distributed/test_memory_ranks.py. Each check passes without the mutant.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor.memory.snapshot
import monitor.memory.tier
import monitor.resume.read
import monitor.save.write_tracker
import store.memory.cleanup
import store.segment
from deploy.daemon import node
from deploy.daemon.metrics import DaemonMetrics
from monitor.save.async_copy import AsyncCopy, UnfinishedCopy
from store.errors import DamagedError, StoreError
from store.memory.arena import Arena, boot_seconds
from store.memory.cleanup import KEEP_SECONDS, clear_old
from store.memory.index import SeenStore, scan_node
from store.names import SaveId
from tests.support.jobs import Job, same
from tests.support.kept import abandoned, memory, settled, tier_of
from tests.support.made_versions import NBYTES, content, keep, tier_at, whole
from tests.support.memory_jobs import state_in
from tests.support.processes import living

pytestmark = pytest.mark.slow

settle = settled
"""Called once training has changed the state; a mutant takes its place."""


def arena(tmp_path: Path) -> None:
    """ARENA: at every moment whatever has a record is a whole version, and there is always one."""
    tier = tier_at(tmp_path / "shm")
    one = Arena(tier, 1, 0)
    try:
        keep(one, 0, SaveId(1, 1))
        for step in range(2, 6):
            one.room((step + 1) % 2, NBYTES)
            data = content(SaveId(step, 1), 0)
            for end in range(0, NBYTES, NBYTES // 4):
                one.write_at((step + 1) % 2, 0, data[:end])
                assert set(scan_node(tier).versions) == set(whole(tier)), "a record of what is being written over"
                assert max(whole(tier), default=None) == SaveId(step - 1, 1)
            keep(one, (step + 1) % 2, SaveId(step, 1))
    finally:
        one.close(remove=True)


def exact(tmp_path: Path) -> None:
    """EXACT: a version that is read back is the state of its step, though training went on at once."""
    torch.manual_seed(0)
    one = Job(tmp_path / "store", every=100, staging="lazy", memory=memory(tmp_path / "store"), width=64)
    try:
        one.ckpt.resume()
        kept = {}
        for step in range(1, 6):
            one.update()
            one.ckpt.step()
            kept[step] = one.weights()
            for _ in range(50):  # the background thread has its chance before the optimizer comes
                time.sleep(0.001)
            one.optimizer.step()
            with torch.no_grad():
                for parameter in one.model.parameters():
                    parameter.add_(0.5)
            settle(one)
            if step > 1:  # before the first optimizer step it is not known what there is to keep
                save = max(scan_node(tier_of(tmp_path / "store")).versions, default=None)
                assert save == SaveId(step, 1)
                assert same(state_in(tmp_path / "store", save), kept[step])
    finally:
        abandoned(one)


def flips(tmp_path: Path) -> None:
    """FLIPS: a resume of wrong bytes is never called exact."""
    torch.manual_seed(0)
    path = tmp_path / "store"
    one = Job(path, every=4, memory=memory(path))
    one.ckpt.resume()
    for _ in range(7):
        one.step()
        settled(one)
    kept = one.weights()
    abandoned(one)
    held = scan_node(tier_of(path)).versions[SaveId(7, 1)][0]
    data = bytearray(held.payload.read_bytes())
    data[held.record.part.entries[0].offset] ^= 1
    held.payload.write_bytes(data)
    two = Job(path, every=4, memory=memory(path), resume={"at": "newest"})
    two.ckpt.resume()
    certificate, found = two.ckpt.certificate, two.weights()
    two.ckpt.close()
    assert certificate is not None
    assert not certificate.exact or same(found, kept)


def begin(tmp_path: Path) -> None:
    """BEGIN: a job that begins while a cleanup looks at the memory of the one before keeps what it writes."""
    tier = tier_at(tmp_path / "shm")
    dead = Arena(tier, 1, 0)
    keep(dead, 0, SaveId(4, 1))
    dead.close(remove=False)
    with ExitStack() as stack:
        begun: list[int] = []

        def clock() -> float:
            if not begun:
                begun.append(stack.enter_context(living(tier, SaveId(9, 1))).pid)
            return boot_seconds() + 2 * KEEP_SECONDS

        clear_old(tier.base, clock=clock)
        assert begun and set(whole(tier)) == {SaveId(9, 1)}


def age(tmp_path: Path) -> None:
    """AGE: memory that holds a state newer than any commit is kept while its store is away."""
    tier = tier_at(tmp_path / "shm")
    dead = Arena(tier, 1, 0)
    keep(dead, 0, SaveId(4, 1))
    dead.close(remove=False)
    SeenStore(tier.base).seen(tier.store_id, tmp_path / "away")

    async def clean() -> None:
        beside = node.Node(node.Options(tier.base), DaemonMetrics())
        await beside.clean()
        while beside.rescuer.busy:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        await beside.rescuer.end(30.0)

    clear = node.cleanup.clear_old_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.cleanup, "oldest_version_seconds", lambda _: 2 * KEEP_SECONDS)
        patch.setattr(node.cleanup, "clear_old_of", lambda *of, **more: clear(*of, **({"clock": later} | more)))
        asyncio.run(clean())
    assert set(whole(tier)) == {SaveId(4, 1)}


def later() -> float:
    return boot_seconds() + 2 * KEEP_SECONDS


def changed(tmp_path: Path) -> None:
    """CHANGED: what is written through ``.data`` while its copy is under way is neither committed nor kept."""
    torch.manual_seed(0)
    path = tmp_path / "store"
    one = Job(path, every=3, staging="lazy", memory=memory(path))
    try:
        one.ckpt.resume()
        for step in range(1, 5):
            one.update()
            held = threading.Event()
            one.ckpt._saver.upkeep(lambda held=held: bool(held.wait(180)) and None, "holding the writer up")
            one.ckpt._memory._writer.submit(lambda held=held: float(held.wait(180)))  # type: ignore[union-attr]
            one.ckpt.step()
            if step >= 3:
                one.model.head.weight.data[0, 0] += 1.0
            held.set()
            settled(one)
            one.ckpt.flush()
        assert not list((path / "manifests").iterdir()), "a commit of the changed state"
        assert max(scan_node(tier_of(path)).versions) == SaveId(2, 1), "a version of the changed state"
    finally:
        abandoned(one)


CHECKS: dict[str, Callable[[Path], None]] = {
    "ARENA": arena, "EXACT": exact, "FLIPS": flips, "CHANGED": changed, "BEGIN": begin, "AGE": age,
}  # fmt: skip


def keep_the_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arena, "drop", lambda *_: None)


def overwrite_the_one_that_counts(patch: pytest.MonkeyPatch) -> None:
    real = Arena.room
    patch.setattr(Arena, "room", lambda one, _, nbytes: real(one, 0, nbytes))
    patch.setattr(Arena, "write_at", _into_first(Arena.write_at))


def _into_first(real: Any) -> Any:
    return lambda one, _, offset, data: real(one, 0, offset, data)


def do_not_wait_for_the_copies(patch: pytest.MonkeyPatch) -> None:
    """The record before the copy is complete: hashes of what is there by then. The optimizer comes after the record."""
    real, before_update = monitor.memory.snapshot.seal_snapshot, UnfinishedCopy.before_update
    recorded = threading.Event()

    def seal(version: Any) -> float:
        try:
            return real(replace(version, copying=AsyncCopy()))
        finally:
            recorded.set()

    def before(copies: UnfinishedCopy) -> None:  # the saver's never has any here
        if copies._copying is not None:
            assert recorded.wait(180)
            recorded.clear()
        before_update(copies)

    patch.setattr(monitor.memory.tier, "seal_snapshot", seal)
    patch.setattr(UnfinishedCopy, "before_update", before)


def do_not_wait_before_the_update(patch: pytest.MonkeyPatch) -> None:
    """The optimizer does not wait for the copies, and nobody asks whether they are torn. They come after it."""
    patch.setattr(UnfinishedCopy, "before_update", lambda _: None)
    patch.setattr(AsyncCopy, "require_whole", lambda _: None)
    real, updated = monitor.memory.snapshot.seal_snapshot, threading.Event()

    def seal(version: Any) -> float:
        assert updated.wait(180)
        return real(version)

    def settle(one: Job) -> None:
        updated.set()
        settled(one)
        updated.clear()

    patch.setattr(monitor.memory.tier, "seal_snapshot", seal)
    patch.setitem(globals(), "settle", settle)


def do_not_compare_the_sample(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(monitor.save.write_tracker.SourceSample, "holds", lambda _: True)


def do_not_check_hashes(patch: pytest.MonkeyPatch) -> None:
    real = store.segment.read_chunks

    def read_chunks(*words: Any, **named: Any) -> Iterator[tuple[int, memoryview]]:
        with suppress(DamagedError):
            yield from real(*words, **named)

    patch.setattr(store.segment, "read_chunks", read_chunks)
    patch.setattr(monitor.resume.read, "read_chunks", read_chunks)


class _NoLock:
    def __init__(self, *_: object) -> None:
        pass

    def release(self) -> None:
        pass


def do_not_lock_what_is_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store.memory.cleanup, "Owner", _NoLock)


def do_not_wait_for_the_store(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node, "_UNREACHED", ())


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "the record is not removed before its payload is written over": (keep_the_record, "ARENA"),
    "the payload that counts is written over": (overwrite_the_one_that_counts, "ARENA"),
    "the record is written before the copy is complete": (do_not_wait_for_the_copies, "EXACT"),
    "the optimizer does not wait for the copy": (do_not_wait_before_the_update, "EXACT"),
    "the sample is not compared after the copy": (do_not_compare_the_sample, "CHANGED"),
    "the hash is not checked": (do_not_check_hashes, "FLIPS"),
    "memory is removed without its lock": (do_not_lock_what_is_removed, "BEGIN"),
    "old memory is removed whether or not its store was there": (do_not_wait_for_the_store, "AGE"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_passes_without_a_mutant(name: str, tmp_path: Path) -> None:
    CHECKS[name](tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mutant_is_caught(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, check = MUTANTS[mutant]
    make(monkeypatch)
    with pytest.raises((AssertionError, StoreError)):
        CHECKS[check](tmp_path)
