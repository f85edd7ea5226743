"""Damage at rest in a store of every encoding, packed and with differences: as ``test_corruption``, of a sample.

What is lost with a base costs what rests on it, never every commit; what a later release wrote is no damage.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable

import pytest

from store.catalog import open_catalog
from store.errors import NewerFormatError
from store.names import SaveId, manifest_path, part_path
from store.retention import Retention, execute, plan_prune
from store.verify import verify
from tests.crash.checker import assert_true_to_write, read_newest
from tests.crash.damage import forge
from tests.crash.models import VARIED
from tests.crash.simulated import SimulatedFiles
from tests.crash.test_corruption import (
    HUGE,
    _entries,
    _units,
    assert_never_wrong,
    hurt_each,
    outcome,
    parsed_once,
    same,
    swap_each,
)
from tests.crash.workload import Job, Memory

__all__ = ["parsed_once"]


@pytest.fixture(scope="module")
def varied() -> tuple[SimulatedFiles, list[SaveId]]:
    """Every encoding, unpacked and packed; the newest commit is made of differences to the second, the third too."""
    files = SimulatedFiles()
    job = Job(files, Memory(), VARIED)
    saves = [job.save(everything=True) for _ in range(2)]
    return files, [*saves, job.save(everything=True), job.save()]


@pytest.mark.slow
@pytest.mark.usefixtures("parsed_once")
def test_bytes_flipped_in_every_encoding_and_in_bases(varied: tuple[SimulatedFiles, list[SaveId]]) -> None:
    """A sample, spread over all files; of payloads a denser one. What is lost with a base never costs everything."""
    base = varied[0]
    healthy = outcome(base)
    assert healthy is not None
    for path, data in base.disk.files().items():
        node = base.disk.find(path)
        stride = 23 if path.endswith(".safetensors") else 199
        for at in range(len(path) % stride, len(data), stride):
            node.live[at] ^= 0x10  # type: ignore[union-attr]
            try:
                assert_never_wrong(base, healthy, path, at)
            finally:
                node.live[at] ^= 0x10  # type: ignore[union-attr]
    assert same(outcome(base), healthy)


@pytest.mark.usefixtures("parsed_once")
def test_every_file_hurt_or_missing(varied: tuple[SimulatedFiles, list[SaveId]]) -> None:
    hurt_each(varied[0])


@pytest.mark.usefixtures("parsed_once")
def test_two_payloads_or_parts_swapped_with_bases(varied: tuple[SimulatedFiles, list[SaveId]]) -> None:
    """Same names and nearly the same sizes: one base looks like the other."""
    alike = itertools.groupby(sorted(varied[0].disk.files(), key=_ending), key=_ending)
    pairs = [itertools.permutations(paths, 2) for ending, paths in alike if ending.startswith("rank")]
    swap_each(varied[0], itertools.chain(*pairs))


def _ending(path: str) -> str:
    return path.rpartition("/")[2]


BASED: dict[str, Callable[[SimulatedFiles, list[SaveId]], None]] = {
    "numel": lambda f, s: forge(f, part_path(s[3], 0), _entries(numel=HUGE)),
    "numel and size": lambda f, s: forge(f, part_path(s[3], 0), _entries(numel=HUGE, nbytes=HUGE)),
    "a few more elements": lambda f, s: forge(f, part_path(s[3], 0), _entries(numel=1 << 30)),
    "start": lambda f, s: forge(f, part_path(s[3], 0), _entries(start=HUGE)),
    "dtype": lambda f, s: forge(f, part_path(s[3], 0), _entries(dtype="I64")),
    "dtype of the base": lambda f, s: forge(f, part_path(s[1], 0), _entries(dtype="I32")),
    "no hash of the encoded": lambda f, s: forge(f, part_path(s[3], 0), _entries(encoded_xxh3_128=None)),
    "not packed": lambda f, s: forge(f, part_path(s[3], 0), _entries(packing=None)),
    "a base that is not there": lambda f, s: forge(f, part_path(s[3], 0), _entries(base="00000099-000001")),
    "itself as base": lambda f, s: forge(f, part_path(s[3], 0), _entries(base=s[3].name)),
    "the base of the base": lambda f, s: forge(f, part_path(s[3], 0), _entries(base=s[1].name)),
    "a later save as base": lambda f, s: forge(f, part_path(s[2], 0), _entries(base=s[3].name)),
    "a circle of bases": lambda f, s: (
        forge(f, part_path(s[2], 0), _entries(base=s[3].name)),
        forge(f, part_path(s[3], 0), _entries(base=s[2].name)),
    ),
    "a path as base": lambda f, s: forge(f, part_path(s[3], 0), _entries(base="../../../etc")),
    "bases of the units": lambda f, s: forge(f, manifest_path(s[3]), _units(bases=["99999999-000001"])),
    "only the nearest base of the units": lambda f, s: forge(f, manifest_path(s[3]), _units(bases=[s[2].name])),
    "no bases of the units": lambda f, s: forge(f, manifest_path(s[3]), _units(bases=[])),
    "a path as base of the units": lambda f, s: forge(f, manifest_path(s[3]), _units(bases=["../../../etc"])),
}  # fmt: skip


@pytest.mark.parametrize("what", BASED)
def test_a_hostile_store_with_differences_gets_a_typed_answer(
    varied: tuple[SimulatedFiles, list[SaveId]], what: str
) -> None:
    files, saves = SimulatedFiles(varied[0].disk.copied()), varied[1]
    BASED[what](files, saves)
    tracemalloc.start()
    reading = read_newest(open_catalog(files))
    assert_true_to_write(reading)
    assert reading.reported
    found = verify(open_catalog(files))
    assert not found.ok
    assert found.resumable == reading.save
    execute(files, plan_prune(open_catalog(files), Retention(keep_last=1, log_spaced=False)))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert_true_to_write(read_newest(open_catalog(files)))


NEWER: dict[str, Callable[[SimulatedFiles, list[SaveId]], None]] = {
    "encoding of a fragment": lambda f, s: forge(f, part_path(s[3], 0), _entries(encoding="int4-block")),
    "encoding of a unit": lambda f, s: forge(f, manifest_path(s[3]), _units(encoding="int4-block")),
    "packing": lambda f, s: forge(f, part_path(s[3], 1), _entries(packing="planes2")),
    "encoding of a base": lambda f, s: forge(f, part_path(s[1], 0), _entries(encoding="int4-block")),
    "packing of a base": lambda f, s: forge(f, part_path(s[1], 0), _entries(packing="planes2")),
}


@pytest.mark.parametrize("what", NEWER)
def test_names_of_a_later_release_are_never_taken_for_damage(
    varied: tuple[SimulatedFiles, list[SaveId]], what: str
) -> None:
    """Falling back would silently give up what the later release saved, and a prune might delete it."""
    files, saves = SimulatedFiles(varied[0].disk.copied()), varied[1]
    NEWER[what](files, saves)
    before = files.disk.files()
    for answer in (
        lambda: read_newest(open_catalog(files)),
        lambda: verify(open_catalog(files)),
        lambda: Job(files, Memory(), VARIED),
    ):
        with pytest.raises(NewerFormatError):
            answer()
    kept = {path: data for path, data in files.disk.files().items() if not path.startswith("epochs/")}
    assert kept == {path: data for path, data in before.items() if not path.startswith("epochs/")}


@pytest.mark.parametrize("what", [what for what in NEWER if what != "encoding of a unit"])
def test_nothing_is_pruned_where_a_later_release_is_needed(
    varied: tuple[SimulatedFiles, list[SaveId]], what: str
) -> None:
    files, saves = SimulatedFiles(varied[0].disk.copied()), varied[1]
    NEWER[what](files, saves)
    with pytest.raises(NewerFormatError):
        plan_prune(open_catalog(files), Retention(keep_last=1, log_spaced=False))
