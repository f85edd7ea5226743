"""When a base is kept, differenced to, made anew, or left alone for a while: the rule alone, no files."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from monitor.save.encode import CHAINS, LIFE, LOSSLESS_LIFE, Packer, SavePacking
from store.encoding import BF16, INT8_BLOCK, RAW, encoding_named
from store.encoding.base import CHUNK, Bytes
from store.encoding.stream import EncodedEntry
from store.names import Fragment, SaveId, Unit
from tests.support.internals import base_bytes
from tests.support.reference_encodings import encode_chunk

UNIT = Unit("layer", "fp32")
NUMEL = 1 << 15


class Run:
    """Saves of one fragment, one after the other, each step a save; all commit unless said otherwise."""

    def __init__(self, differences: bool = True, level: int = 1, numel: int = NUMEL) -> None:
        self.packer = Packer(level, differences)
        self.fragment = Fragment("layer.weight", "fp32", 0, numel)
        self.step = 0
        self.reached: set[str] = set()

    def save(
        self, values: np.ndarray, encoding: str = BF16, *, committed: bool = True, dropped: bool = False
    ) -> EncodedEntry:
        save = self.begin()
        made = self.add(save, values, encoding)
        self.settle(save, made, committed=committed, dropped=dropped)
        return made

    @property
    def bases(self) -> Mapping[Fragment, Any]:
        """What the next save may take deltas to."""
        return self.packer.begin(SaveId(self.step + 1, 1), 4 * NUMEL, None).bases

    def begin(self) -> SavePacking:
        self.step += 1
        return self.packer.begin(SaveId(self.step, 1), 4 * NUMEL, None)

    def add(self, save: SavePacking, values: np.ndarray, encoding: str = BF16) -> EncodedEntry:
        known = encoding_named(encoding)
        chunks: list[Bytes] = [encode_chunk(known, values[at : at + CHUNK]) for at in range(0, values.size, CHUNK)]
        made = save.packed(UNIT, self.fragment, EncodedEntry(known, values.size, "F32", lambda: iter(chunks)))
        assert sum(len(piece) for piece in made.pieces()) == made.written
        return made

    def settle(self, save: SavePacking, made: EncodedEntry, *, committed: bool = True, dropped: bool = False) -> None:
        moved = committed and not dropped
        if moved:  # the manifest names what its units rest on
            self.reached = {save.save.name, *made.bases}
        self.packer.settle(save, 0.1, lambda unit: moved and unit == UNIT, self.reached)


def normal(seed: int, numel: int = NUMEL) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def moved(values: np.ndarray, by: float, seed: int = 99) -> np.ndarray:
    return (values * (1 + by * normal(seed, values.size))).astype(np.float32)


def names(first: int, last: int) -> tuple[str, ...]:
    """Of the saves of these steps, the newest first."""
    return tuple(SaveId(step, 1).name for step in range(last, first - 1, -1))


def test_the_first_save_is_whole_and_each_next_one_rests_on_the_one_before() -> None:
    run, values = Run(), normal(1)
    assert run.save(values).bases == ()
    for step in range(2, 6):
        made = run.save(moved(values, 1e-6, step))
        assert (made.base, made.bases) == (SaveId(step - 1, 1).name, names(1, step - 1))
        assert made.written < 0.6 * NUMEL * 2


def test_without_loss_all_differences_are_to_one_whole() -> None:
    run, values = Run(), normal(1)
    run.save(values, RAW)
    assert [run.save(values, RAW).bases for _ in range(LOSSLESS_LIFE)] == [names(1, 1)] * LOSSLESS_LIFE
    assert base_bytes(run.packer) == 4 * NUMEL
    assert run.save(values, RAW).bases == ()
    assert run.save(values, RAW).bases == names(LOSSLESS_LIFE + 2, LOSSLESS_LIFE + 2)


def test_without_loss_a_whole_is_made_anew_when_the_last_difference_exceeds_the_mean() -> None:
    run, values, sizes, bases = Run(), normal(1), [], []
    for step in range(1, 40):
        made = run.save(values, RAW)
        values = moved(values, 3e-5 * 2 ** (step % 7), step)
        sizes.append(made.written)
        bases.append(made.base)
    whole = [step for step, base in enumerate(bases) if base is None]
    assert 3 <= len(whole) <= 20 and whole[0] == 0
    for first, after in pairwise(whole):
        since = sizes[first:after]
        expected = since[-1] + (max(0, since[-1] - since[-2]) if len(since) > 2 else 0)
        assert expected > sum(since) / len(since) or len(since) == 1 + LOSSLESS_LIFE
        for count in range(3, len(since)):
            last, before = since[count - 1], since[count - 2]
            assert last + max(0, last - before) <= sum(since[:count]) / count


@pytest.mark.parametrize("encoding", [RAW, BF16])
def test_a_forced_save_rests_on_the_one_before_and_is_no_base(encoding: str) -> None:
    run, values = Run(), normal(1)
    run.save(values, encoding)
    run.step += 1
    save = run.packer.begin(SaveId(run.step, 1), 4 * NUMEL, None, lasting=False)
    made = run.add(save, values, encoding)
    run.settle(save, made)
    assert made.bases == names(1, 1)
    assert run.save(values, encoding).bases == names(1, 1)


def test_what_did_not_change_costs_next_to_nothing() -> None:
    run, values = Run(), normal(1)
    run.save(values)
    assert [run.save(values).bases for _ in range(LIFE)] == [names(1, step) for step in range(1, LIFE + 1)]
    assert run.save(values).base is None  # on the first whole rests one chain
    whole = names(run.step, run.step)
    for _ in range(CHAINS):  # each begins at the whole
        first = run.step + 1
        made = [run.save(values) for _ in range(LIFE)]
        assert [one.bases for one in made] == [(*names(first, first + number - 1), *whole) for number in range(LIFE)]
        assert max(one.written for one in made) < 200
    assert run.save(values).base is None  # none lives for ever


def test_a_chain_that_would_begin_with_too_much_begins_with_a_whole() -> None:
    run, values = Run(), normal(1)
    for _ in range(1 + LIFE):
        run.save(values, BF16)
    whole = [run.save(values, BF16)]
    for step in range(LIFE):
        values = moved(values, 1e-2, step)
        assert run.save(values, BF16).base is not None
    made = [run.save(moved(values, 10.0), BF16), run.save(values, BF16), run.save(values, BF16)]
    assert whole[0].bases == made[1].bases == ()
    assert made[0].bases == names(LIFE + 2, LIFE + 2)  # and it did not pay
    assert made[2].bases == names(run.step - 1, run.step - 1)


def test_a_chain_costs_less_than_differences_to_one_base() -> None:
    """As far as the state moves on: saves that are each the difference to the one before, against the first."""
    run, first, chained = Run(), normal(1), 0
    values = first
    run.save(values, BF16)
    for step in range(LIFE):
        values = moved(values, 2e-3, step)
        chained += run.save(values, BF16).written
    apart, values = 0, first
    for step in range(LIFE):
        values, other = moved(values, 2e-3, step), Run()
        other.save(first, BF16)
        apart += other.save(values, BF16).written
    assert chained < 0.9 * apart


def test_a_fragment_whose_differences_do_not_pay_rests_for_sixteen_saves() -> None:
    run = Run()
    bases = [run.save(normal(seed), BF16).base for seed in range(40)]
    # Whole, one difference that is no smaller, sixteen left alone, whole again with a copy kept, and so on.
    assert [step for step, base in enumerate(bases) if base is not None] == [1, 19, 37]
    assert base_bytes(run.packer) == 0


def test_a_resting_fragment_holds_no_memory() -> None:
    run = Run()
    run.save(normal(0), BF16)
    assert base_bytes(run.packer) == 2 * NUMEL
    run.save(normal(1), BF16)
    assert base_bytes(run.packer) == 0
    run.save(normal(2), BF16)
    assert base_bytes(run.packer) == 0


def test_another_encoding_is_another_base() -> None:
    run, values = Run(), normal(1)
    run.save(values, BF16)
    assert run.save(values, RAW).base is None
    assert run.save(values, RAW).base == "00000002-000001"
    assert run.save(values, INT8_BLOCK).base is None
    assert run.save(values, INT8_BLOCK).base == "00000004-000001"


@pytest.mark.parametrize("how", [{"committed": False}, {"dropped": True}])
def test_a_save_that_is_not_committed_is_no_base_and_no_lesson(how: dict[str, bool]) -> None:
    run, values = Run(), normal(1)
    run.save(values, **how)
    assert run.save(values).base is None
    run.save(normal(2), **how)  # a difference that does not pay, but did not come about
    assert run.save(values).base == "00000002-000001"
    run.save(values, RAW, **how)
    assert run.save(values).bases == ("00000004-000001", "00000002-000001")


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_chain_of_which_the_newest_commit_lacks_a_save_is_left(lost: int) -> None:
    run, values = Run(), normal(1)
    for _ in range(3):
        run.save(values)
    other = run.begin()
    run.packer.settle(other, 0.1, lambda unit: True, {*names(1, 4)} - {SaveId(lost, 1).name})
    assert run.save(values).base is None


def test_a_base_that_the_newest_commit_does_not_rest_on_is_left() -> None:
    run, values = Run(), normal(1)
    run.save(values)
    other = run.begin()
    run.packer.settle(other, 0.1, lambda unit: True, {"00000002-000001"})  # the fragment is in it no more
    assert base_bytes(run.packer) == 0
    assert run.save(values).base is None


def test_going_back_forgets_bases_even_under_a_save() -> None:
    run, values = Run(), normal(1)
    run.save(values)
    save = run.begin()
    made = run.add(save, values)
    assert made.base == "00000001-000001"
    run.packer.reset()
    run.settle(save, made)
    assert run.save(values).base is None


def test_without_differences_nothing_is_kept() -> None:
    run, values = Run(differences=False), normal(1)
    assert [run.save(values).base for _ in range(3)] == [None] * 3
    assert base_bytes(run.packer) == 0


def test_fragments_of_many_chunks_keep_all_of_them() -> None:
    numel = CHUNK + 1000
    run, values = Run(numel=numel), normal(1, numel)
    run.save(values, BF16)
    assert base_bytes(run.packer) == 2 * numel
    assert run.save(values, BF16).base == "00000001-000001"


def test_kept_chunks_stand_still_when_the_copies_are_used_again() -> None:
    run, values = Run(), normal(1)
    known = encoding_named(RAW)
    chunk = values.copy().view(np.uint8)
    save = run.begin()
    made = save.packed(UNIT, run.fragment, EncodedEntry(known, NUMEL, "F32", lambda: iter([chunk])))
    assert list(made.pieces())
    chunk[:] = 0
    run.settle(save, made)
    assert np.array_equal(run.bases[run.fragment].chunks[0], values.view(np.uint8))


def test_packing_that_is_off_changes_nothing() -> None:
    packer = Packer("none", False)
    save = packer.begin(SaveId(1, 1), 100, 5.0)
    assert (save.active, save.level) == (False, None)


def test_auto_begins_without_packing_and_rests_on_nothing_then() -> None:
    run, values = Run(), normal(1)
    run.packer = Packer("auto", True)
    made = run.save(values)
    assert (made.packing, made.base) == (None, None)
    assert base_bytes(run.packer) == 0
