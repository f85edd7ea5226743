"""Every write to protected pages is found, whatever code makes it; what cannot be tracked is copied at once."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

import monitor.save.write_tracker as write_tracker_module
from monitor.adapters.identity import MemoryRegions, addresses_of
from monitor.save.write_tracker import CopyPlan, TrackedCopy, WriteTracker, write_tracker
from tests.support.tracked_copies import CHANGES, MIB, tracked

if write_tracker() is None:
    pytest.skip("this kernel does not track writes", allow_module_level=True)


def pages_of(live: torch.Tensor) -> range:
    begin, page = live.data_ptr(), mmap.PAGESIZE
    return range(-(-begin // page) * page, (begin + live.nbytes) // page * page)


def to_shared_memory(live: torch.Tensor) -> None:
    live.share_memory_()


def as_a_queue_does(live: torch.Tensor) -> None:
    ForkingPickler.dumps(live)


def by_growing_in_place(live: torch.Tensor) -> None:
    live.untyped_storage().resize_(16 * MIB)


@pytest.mark.parametrize("move", [to_shared_memory, as_a_queue_does, by_growing_in_place])
def test_a_storage_that_gets_other_memory_is_found(tracker: WriteTracker, move: Callable[[torch.Tensor], None]) -> None:
    """The old memory is read only if it is still there, and nothing but the buffer is written."""
    live, buffer, others = torch.randn(MIB), torch.zeros(MIB), torch.zeros(16 * MIB)
    copy = tracked(tracker, [(live.view(-1), buffer)])
    move(live)
    others += 1.0  # may have the memory that was given up
    assert not copy.finish()
    assert bool((others == 1.0).all())


def test_memory_that_is_copied_twice_is_not_taken_for_changed(tracker: WriteTracker) -> None:
    live, buffers = torch.randn(MIB), [torch.empty(MIB), torch.empty(MIB)]
    assert tracked(tracker, [(live, buffer) for buffer in buffers]).finish()
    assert all(torch.equal(buffer, live) for buffer in buffers)


def test_an_error_of_the_system_is_no_error_of_training(tracker: WriteTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(_: range) -> bool:
        raise OSError("no memory")

    live = torch.randn(MIB)
    copy = tracked(tracker, [(live, torch.empty_like(live))])
    monkeypatch.setattr(tracker, "written", written)
    assert not copy.finish()
    assert tracker.in_use.acquire(blocking=False)


@pytest.mark.parametrize("change", CHANGES)
def test_a_write_before_the_copy_is_found(tracker: WriteTracker, change: Callable[[torch.Tensor], None]) -> None:
    live = torch.randn(MIB)
    copy = tracked(tracker, [(live, torch.empty_like(live))])
    change(live)
    assert not copy.finish()


@pytest.mark.parametrize("change", CHANGES)
def test_a_write_after_the_copy_does_not_matter(tracker: WriteTracker, change: Callable[[torch.Tensor], None]) -> None:
    live, buffer = torch.randn(MIB), torch.empty(MIB)
    copy, before = tracked(tracker, [(live, buffer)]), live.clone()
    assert copy.finish()
    change(live)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shift", [0, 1, 5, 1000])
def test_copies_are_equal_to_the_bit_wherever_a_tensor_begins(
    tracker: WriteTracker, dtype: torch.dtype, shift: int
) -> None:
    live = torch.randn(3 * MIB).to(dtype)[shift : 2 * MIB + 13]
    buffer, before = torch.empty_like(live), live.clone()
    copy = tracked(tracker, [(live, buffer)])
    assert copy.finish()
    assert torch.equal(buffer.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("place", [0, -1])
def test_what_shares_a_page_with_other_data_is_copied_at_once(tracker: WriteTracker, place: int) -> None:
    whole = torch.randn(2 * MIB)
    live = whole[100 : MIB + 100]
    buffer, before = torch.empty_like(live), live.clone()
    copy = tracked(tracker, [(live, buffer)])
    live.data[place] += 1.0
    whole.data[50], whole.data[MIB + 150] = 1.0, 1.0  # beside it
    assert copy.finish()
    assert torch.equal(buffer, before)


def test_small_tensors_are_copied_at_once(tracker: WriteTracker) -> None:
    live, buffer = torch.randn(100), torch.empty(100)
    copy, before = tracked(tracker, [(live, buffer), (torch.empty(0), torch.empty(0))]), live.clone()
    live.zero_()
    assert copy.finish()
    assert torch.equal(buffer, before)


def shared(_: Path) -> mmap.mmap:
    return mmap.mmap(-1, 4 * MIB)


def of_a_file(directory: Path) -> mmap.mmap:
    path = directory / "values"
    path.write_bytes(bytes(4 * MIB))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 4 * MIB)


@pytest.mark.parametrize("mapped", [shared, of_a_file])
@pytest.mark.parametrize("touched", [False, True])
def test_memory_that_others_may_write_is_not_tracked(
    tmp_path: Path, tracker: WriteTracker, mapped: Callable[[Path], mmap.mmap], touched: bool
) -> None:
    live = torch.frombuffer(mapped(tmp_path), dtype=torch.float32)
    if touched:
        live.fill_(1.0)
    assert tracker.protect(pages_of(live)) is None
    assert tracker.protect(pages_of(live.fill_(2.0))) is None


def test_a_forked_child_has_memory_of_its_own(tracker: WriteTracker) -> None:
    live = torch.ones(MIB)
    pages = tracker.protect(pages_of(live))
    assert pages is not None
    child = os.fork()
    if child == 0:
        ctypes.memset(live.data_ptr() + 50_000, 0, 100)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not tracker.written(pages)
    child = os.fork()
    if child == 0:
        os._exit(0)
    live.data[70_000] = 2.0  # perhaps before the child ends
    os.waitpid(child, 0)
    assert tracker.written(pages)


def test_memory_that_was_unmapped_counts_as_written(tracker: WriteTracker) -> None:
    mapped = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    live = torch.frombuffer(mapped, dtype=torch.float32).fill_(1.0)
    pages = tracker.protect(pages_of(live))
    assert pages is not None and not tracker.written(pages)
    del live
    mapped.close()
    assert tracker.written(pages)


def test_one_copy_at_a_time_uses_the_tracker(tracker: WriteTracker) -> None:
    live = torch.randn(MIB)
    copy = tracked(tracker, [(live, torch.empty_like(live))])
    assert not tracker.in_use.acquire(blocking=False)  # protecting the pages again would hide what was written since
    copy.finish()
    assert tracker.in_use.acquire(blocking=False)


def test_memory_mappings_are_not_used_up(tracker: WriteTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_tracker_module, "_MOST", tracker._registered + 2)
    blocks = [
        torch.frombuffer(mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.float32)
        for _ in range(3)
    ]
    found = [tracker.protect(pages_of(block.fill_(1.0))) for block in blocks]
    assert [pages is None for pages in found] == [False, False, True]
    assert tracker.protect(pages_of(blocks[0])) == found[0]


def test_a_failure_releases_the_tracker(tracker: WriteTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    def protect(pages: range) -> None:
        raise OSError("gone")

    monkeypatch.setattr(tracker, "protect", protect)
    with pytest.raises(OSError, match="gone"):
        tracked(tracker, [(torch.randn(MIB), torch.empty(MIB))])
    assert tracker.in_use.acquire(blocking=False)


def inside_pages(numel: int) -> torch.Tensor:
    """Return a tensor that begins and ends within a page. An allocation may begin with one."""
    room = torch.randn(numel + 2)
    ends = ((room.data_ptr() + 4 * at) % mmap.PAGESIZE for at in (0, numel))
    return room[1:-1] if 0 in ends else room[:numel]


@pytest.mark.parametrize("together", [0, 5000, 1 << 24])
def test_a_plan_that_is_used_again_copies_small_ones_at_once_too(
    tracker: WriteTracker, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Whether all, some or none of them fit into what is copied together."""
    monkeypatch.setattr(write_tracker_module, "_TOGETHER", together)
    sources = [inside_pages(n) for n in (3, 700, MIB + 5, 1024, 5000, 1, MIB)]
    buffers = [torch.empty_like(one) for one in sources]
    plan = CopyPlan(MemoryRegions.of(sources), addresses_of(buffers))
    for _ in range(3):
        for one in sources:
            one.mul_(-1.5)
        before = [one.clone() for one in sources]
        copy = TrackedCopy(tracker, plan, sources)
        for one in sources:
            one[0] = one[-1] = 7.0  # of large ones too, on pages that they share with other data
        assert copy.finish()
        assert all(map(torch.equal, buffers, before))
        assert tracker.in_use.acquire(blocking=False)


@pytest.mark.parametrize("count", [1, 1023, 1024, 3000])
def test_many_small_tensors_are_copied(tracker: WriteTracker, count: int) -> None:
    pairs = [(torch.randn(index % 7), torch.empty(index % 7)) for index in range(count)]
    assert tracked(tracker, pairs).finish()
    assert all(torch.equal(live, buffer) for live, buffer in pairs)


def neighbours(gap: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return four tensors of a MiB each in one memory, ``gap`` elements apart."""
    whole = torch.randn(4 * (MIB + gap))
    return whole, [whole[at * (MIB + gap) :][:MIB] for at in range(4)]


@pytest.mark.parametrize("gap", [0, 1, 1000, 100_000])
def test_neighbours_are_copied_as_they_are(tracker: WriteTracker, gap: int) -> None:
    whole, parts = neighbours(gap)
    pairs = [(part, torch.empty_like(part)) for part in parts]
    before = whole.clone()
    assert tracked(tracker, pairs).finish()
    assert all(torch.equal(buffer, part) for part, buffer in pairs) and torch.equal(whole, before)


@pytest.mark.parametrize("place", [0, MIB // 2, MIB - 1])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("gap", [0, 1000])
def test_a_write_to_one_of_the_neighbours_is_found(tracker: WriteTracker, gap: int, number: int, place: int) -> None:
    """But for the edges of what touches no other, which are copied at once."""
    _, parts = neighbours(gap)
    pairs = [(part, torch.empty_like(part)) for part in parts]
    before = [part.clone() for part in parts]
    copy = tracked(tracker, pairs)
    parts[number].data[place] += 1.0
    same = copy.finish()
    assert not same or all(torch.equal(buffer, old) for (_, buffer), old in zip(pairs, before, strict=True))
    inside = place == MIB // 2 or (gap == 0 and (number, place) not in {(0, 0), (3, MIB - 1)})
    assert not (inside and same)


def test_a_write_between_neighbours_is_none_to_them(tracker: WriteTracker) -> None:
    whole, parts = neighbours(10_000)
    copy = tracked(tracker, [(part, torch.empty_like(part)) for part in parts])
    whole.data[MIB + 1 : MIB + 9_999] = 7.0
    assert copy.finish()


def test_parts_that_are_each_too_small_are_tracked_together(tracker: WriteTracker) -> None:
    """As the pieces of a flat partition."""
    whole = torch.randn(MIB)
    pairs = [(part, torch.empty_like(part)) for part in whole.split(1000)]
    copy = tracked(tracker, pairs)
    whole.data[MIB // 2] += 1.0
    assert not copy.finish()


SMALL = 12_000  # float32 values, 47 KiB: copying one takes less time than tracking it alone


def small_neighbours(gap: int, count: int = 200) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return tensors of less than 64 KiB in one memory, ``gap`` elements apart."""
    whole = torch.randn(count * (SMALL + gap))
    return whole, [whole[at * (SMALL + gap) :][:SMALL] for at in range(count)]


@pytest.mark.parametrize("place", [0, 3000, SMALL // 2, SMALL - 1])
@pytest.mark.parametrize("number", [0, 1, 80, 86, 199])
@pytest.mark.parametrize("step", [1 << 22, 1 << 18, 1])
def test_a_write_to_one_of_many_small_neighbours_is_found(
    tracker: WriteTracker, monkeypatch: pytest.MonkeyPatch, step: int, number: int, place: int
) -> None:
    monkeypatch.setattr(write_tracker_module, "_STEP", step)
    whole, parts = small_neighbours(16)
    pairs, before = [(part, torch.empty_like(part)) for part in parts], whole.clone()
    copy = tracked(tracker, pairs)
    assert len(copy._protected) == 1 and sum(len(step.blocks) for step in copy._steps) == len(parts)
    parts[number].data[place] += 1.0
    same = copy.finish()
    at_once = place in (0, SMALL - 1)  # on a page that it shares with its neighbour
    assert at_once or not same
    old = [before[at * (SMALL + 16) :][:SMALL] for at in range(len(parts))]
    assert not same or all(torch.equal(buffer, values) for (_, buffer), values in zip(pairs, old, strict=True))


@pytest.mark.parametrize("gap", [0, 16, 256])
def test_writes_between_small_neighbours_are_none_to_them(tracker: WriteTracker, gap: int) -> None:
    whole, parts = small_neighbours(gap)
    pairs, before = [(part, torch.empty_like(part)) for part in parts], whole.clone()
    copy = tracked(tracker, pairs)
    assert len(copy._protected) == 1
    for at in range(len(parts)):
        whole.data[at * (SMALL + gap) + SMALL :][:gap] = 7.0
    assert copy.finish()
    assert all(torch.equal(buffer, before[at * (SMALL + gap) :][:SMALL]) for at, (_, buffer) in enumerate(pairs))


@pytest.mark.parametrize(("gap", "count"), [(16, 3), (20_000, 200)])
def test_few_small_tensors_and_those_apart_are_copied_at_once(tracker: WriteTracker, gap: int, count: int) -> None:
    """What is written between them would cost more faults than copying takes."""
    whole, parts = small_neighbours(gap, count)
    pairs, before = [(part, torch.empty_like(part)) for part in parts], whole.clone()
    copy = tracked(tracker, pairs)
    assert not copy._protected
    whole.zero_()
    assert copy.finish()
    assert all(torch.equal(buffer, before[at * (SMALL + gap) :][:SMALL]) for at, (_, buffer) in enumerate(pairs))


def test_small_neighbours_that_cannot_be_protected_together_are_copied_at_once(
    tracker: WriteTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be other memory between them. Large ones are protected each by itself."""
    _, parts = small_neighbours(16)
    large = torch.randn(MIB)
    pairs = [(part, torch.empty_like(part)) for part in (*parts, large)]
    before, protect = [part.clone() for part, _ in pairs], tracker.protect
    monkeypatch.setattr(tracker, "protect", lambda pages: protect(pages) if len(pages) <= large.nbytes else None)
    copy = tracked(tracker, pairs)
    assert copy._protected == [pages_of(large)]
    for part in parts:
        part.data.zero_()
    assert copy.finish()
    assert all(torch.equal(buffer, values) for (_, buffer), values in zip(pairs, before, strict=True))


def huge_pages() -> int:
    return int(Path("/proc/self/smaps_rollup").read_text().partition("AnonHugePages:")[2].split()[0])


def test_memory_on_huge_pages_is_copied_and_tracked_as_before(tracker: WriteTracker) -> None:
    live = torch.randn(16 * MIB)
    first, buffer = tracked(tracker, [(live, torch.empty_like(live))]), torch.empty_like(live)
    assert first.finish()
    before, values = huge_pages(), live.clone()
    first.consolidate(lambda: False)
    if huge_pages() < before + 8 * 1024:
        pytest.skip("the kernel made no huge pages: NOT tested")
    assert torch.equal(live, values)
    assert tracker.in_use.acquire(blocking=False)
    again = tracked(tracker, [(live, buffer)])
    assert again.finish() and torch.equal(buffer, values)
    live += 1.0  # no page is protected any more
    assert tracker.in_use.acquire(blocking=False)
    changed = tracked(tracker, [(live, buffer)])
    live.data[9 * MIB] = 0.5
    assert not changed.finish()
