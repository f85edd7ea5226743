"""A save staged in the memory of a snapshot: one copy for both, and neither is worse for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor.memory.tier
from monitor.memory.buffers import SharedMemoryBuffers
from monitor.memory.snapshot import Version, seal_snapshot
from monitor.save.async_copy import CopyTiming
from store.errors import StorageError
from store.memory.index import scan_node
from store.names import SaveId
from store.verify import verify
from tests.support.internals import hold_writer, staged_copies, staging_buffers
from tests.support.jobs import Job, committed_steps, same
from tests.support.kept import abandoned, catalog_of, memory, settled, tier_of
from tests.support.memory_jobs import kept_steps, run, sources, state_in, trained

SAVED = SaveId(4, 1)


def held(store: Path, **settings: Any) -> tuple[Job, threading.Event, dict[str, Any]]:
    """A job whose save of step 4 is staged and not written before the event, and the state of that step."""
    one, release = trained(store, 3, **settings), threading.Event()
    hold_writer(one.ckpt, release)
    steps_without_writing(one, 1)
    return one, release, one.weights()


def steps_without_writing(one: Job, count: int) -> None:
    for _ in range(count):
        one.step(flush=False)
        settled(one)


def resumed_from_the_store(store: Path, step: int) -> Job:
    two = Job(store, every=100)
    assert two.ckpt.resume(memory=False) == step
    assert two.ckpt.certificate is not None and two.ckpt.certificate.exact
    return two


def test_a_save_is_written_from_the_snapshot_of_its_step_however_late(store: Path) -> None:
    one, release, saved = held(store)
    assert not staging_buffers(one.ckpt), "the save has no copy of its own"
    assert kept_steps(store) == [3, 4]
    for step in (5, 6, 7):
        steps_without_writing(one, 1)
        assert kept_steps(store) == [4, step], "the others replace each other"
    assert same(state_in(store, SAVED), saved)
    assert not committed_steps(store)
    release.set()
    one.ckpt.flush()
    abandoned(one)
    assert committed_steps(store) == [4] and verify(catalog_of(store)).resumable
    two = resumed_from_the_store(store, 4)
    assert same(two.weights(), saved)
    two.ckpt.close(save=False)


def test_the_lent_snapshot_is_whole_while_the_other_one_is_replaced(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def watched(version: Version) -> float:
        seen.append(kept_steps(store))
        return seal_snapshot(version)

    one, release, _ = held(store)
    monkeypatch.setattr(monitor.memory.tier, "seal_snapshot", watched)
    steps_without_writing(one, 3)
    assert seen == [[4], [4], [4]]
    release.set()
    one.ckpt.flush()
    run(one, 3)
    assert seen[3:] == [[7], [8], [9]], "a save that is written lends nothing"
    one.ckpt.close()


def test_a_killed_job_goes_on_from_the_lent_snapshot(store: Path) -> None:
    one, release, saved = held(store)
    release.set()
    abandoned(one)
    for record in (store / "manifests").iterdir():
        record.unlink()  # killed before the commit
    two = Job(store, every=100, memory=memory(store))
    assert two.ckpt.resume() == 4 and sources(two) == {"memory"}
    assert two.ckpt.certificate is not None and two.ckpt.certificate.exact
    assert same(two.weights(), saved)
    two.ckpt.close(save=False)


@pytest.mark.parametrize(
    "settings",
    [{"policy": {"name": "parity", "k": 2}}, {"encoding": "compact"}, {"versions": 1}, {"memory_encoding": "compact"}],
    ids=str,
)
def test_other_saves_have_copies_of_their_own(store: Path, settings: dict[str, Any]) -> None:
    more = {"encoding": settings.pop("memory_encoding", "raw"), "versions": settings.pop("versions", 2)}
    one = trained(store, 8, memory=memory(store, **more), **settings)
    assert 8 not in kept_steps(store) and committed_steps(store) == [4, 8]
    assert one.ckpt.save(wait=True).skipped is None
    saved = one.weights()
    one.ckpt.close(save=False)
    two = Job(store, every=100)
    assert two.ckpt.resume(memory=False) == 8
    assert two.ckpt.certificate is not None
    assert same(two.weights(), saved) or not two.ckpt.certificate.exact
    two.ckpt.close(save=False)


def test_the_first_save_is_lent_memory_too(store: Path) -> None:
    one = Job(store, every=1, memory=memory(store))
    one.ckpt.resume()
    for step in (1, 2, 3):
        one.step()
        settled(one)
        assert kept_steps(store)[-1] == step
        assert not staging_buffers(one.ckpt)
    assert committed_steps(store) == [1, 2, 3]
    one.ckpt.close(save=False)


def test_a_save_that_is_lent_nothing_lets_its_copy_go(store: Path) -> None:
    one = trained(store, 9, policy={"name": "parity", "k": 2})
    assert committed_steps(store) == [4, 8] and kept_steps(store) == [7, 9]
    assert not staging_buffers(one.ckpt)
    one.ckpt.close(save=False)


def test_a_save_that_cannot_be_copied_is_no_snapshot_either(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = trained(store, 3)
    start = CopyTiming.start

    def refuse(self: CopyTiming, copying: object) -> None:
        raise RuntimeError("no copies today")

    monkeypatch.setattr(CopyTiming, "start", refuse)
    run(one, 1)
    monkeypatch.setattr(CopyTiming, "start", start)
    assert kept_steps(store) == [3] and not committed_steps(store)
    run(one, 4)
    assert "no version of step 4 in memory" in caplog.text and "could not be copied" in caplog.text
    assert committed_steps(store) == [8] and kept_steps(store)[-1] == 8
    one.ckpt.close()


def test_values_that_are_not_finite_are_in_neither(store: Path) -> None:
    one = trained(store, 3)
    one.model.head.bias.data[0] = float("nan")
    run(one, 1)
    assert kept_steps(store) == [3]
    run(one, 1)
    assert kept_steps(store) == [3]
    one.ckpt.close(save=False)


def test_after_going_back_the_memory_under_a_save_is_left_alone(store: Path) -> None:
    one, release, saved = held(store, timeouts={"close": 0.2})
    steps_without_writing(one, 1)
    assert one.ckpt.resume() == 5, "the save of step 4 is abandoned, and still being written"
    steps_without_writing(one, 2)
    assert kept_steps(store) == [5], "no payload is free"
    for fragment, copy in staged_copies(one.ckpt).items():
        assert torch.equal(copy, saved[f"{fragment.fqn}/{fragment.slot}"].view(-1))
    release.set()
    one.ckpt.flush()
    steps_without_writing(one, 3)
    assert kept_steps(store)[-1] == 10
    one.ckpt.close(save=False)


def test_memory_that_goes_off_stays_mapped_under_a_save(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(version: Version) -> float:
        version.copying.finish()
        raise StorageError("no room for the record")

    monkeypatch.setattr(monitor.memory.tier, "seal_snapshot", refuse)
    one, release, saved = held(store)
    steps_without_writing(one, 1)
    assert one.metric("driftpoint_memory_on") == 0.0, "three in a row failed, the last while the save is written"
    release.set()
    one.ckpt.flush()
    one.ckpt.close(save=False)
    two = resumed_from_the_store(store, 4)
    assert same(two.weights(), saved)
    two.ckpt.close(save=False)


def test_what_was_resumed_inexactly_is_not_exact_in_memory(store: Path) -> None:
    one = Job(store, encoding="compact")
    one.ckpt.resume()
    for _ in range(3):
        one.step()
    one.ckpt.close()
    two = Job(store, every=100, memory=memory(store))
    two.ckpt.resume()
    assert two.ckpt.certificate is not None and not two.ckpt.certificate.exact
    assert two.ckpt.save().skipped is None
    settled(two)
    abandoned(two)
    max((store / "manifests").iterdir()).unlink()  # killed before the commit
    three = Job(store, every=100, memory=memory(store))
    three.ckpt.resume()
    assert sources(three) == {"memory"}
    assert three.ckpt.certificate is not None and not three.ckpt.certificate.exact
    three.ckpt.close(save=False)


def test_one_snapshot_has_a_name_though_its_step_is_saved_again(store: Path) -> None:
    one = trained(store, 5)
    with torch.no_grad():
        one.model.head.bias.zero_()
    assert one.ckpt.save().skipped is None
    settled(one)
    one.ckpt.flush()
    assert not staging_buffers(one.ckpt)
    assert [held.record.save.step for held in scan_node(tier_of(store)).everything()] == [5]
    run(one, 1)
    assert kept_steps(store) == [5, 6]
    one.ckpt.close(save=False)


def test_an_error_of_this_rank_alone_never_reaches_training(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, at = trained(store, 3), SharedMemoryBuffers.at

    def refuse(self: SharedMemoryBuffers, slot: int, nbytes: int) -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(SharedMemoryBuffers, "at", refuse)
    run(one, 1)
    monkeypatch.setattr(SharedMemoryBuffers, "at", at)
    assert committed_steps(store) == [4] and kept_steps(store)[-1] == 3
    run(one, 2)
    assert "the driver is gone" in caplog.text and kept_steps(store)[-1] == 6
    one.ckpt.close(save=False)
