"""What a save reads does not grow with the number of commits: calls are counted at the storage's edge."""

from __future__ import annotations

from collections import Counter

import pytest

from monitor.save.save_task import prune
from store.catalog import open_catalog
from store.names import SaveId
from store.retention import Retention
from tests.crash.checker import assert_true_to_write, check_goes_on, read_commit
from tests.crash.damage import flip, put
from tests.crash.simulated import SimulatedFiles
from tests.crash.workload import Job, Memory

READS = ("list_dir", "read", "size")


class Counted(SimulatedFiles):
    """Counts the calls that look at the store, and remembers what they looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: list[tuple[str, str]] = []

    def list_dir(self, path: str) -> list[str]:
        self.looked.append(("list_dir", path))
        return super().list_dir(path)

    def read(self, path: str, limit: int) -> bytes:
        self.looked.append(("read", path))
        return super().read(path, limit)

    def size(self, path: str) -> int:
        self.looked.append(("size", path))
        return super().size(path)

    def taken(self) -> Counter[str]:
        """Calls since the last look."""
        counts = Counter(verb for verb, _ in self.looked)
        self.looked.clear()
        return counts


def looks_at(commits: int, keep: Retention, everything: bool) -> Counter[str]:
    """Calls of one more save with its prune, at so many commits, in a process that pruned before."""
    files = Counted()
    job = Job(files, Memory())
    catalog = open_catalog(files)
    for _ in range(commits):
        job.save(everything)
    for _ in range(4):
        job.save(everything)
        prune(files, catalog, keep, job.epoch)
    files.taken()
    job.save(everything)
    prune(files, catalog, keep, job.epoch)
    return files.taken()


@pytest.mark.parametrize("everything", [True, False], ids=["full", "composite"])
@pytest.mark.parametrize("dropping", [False, True])
def test_a_save_looks_at_as_much_whatever_the_number_of_commits(dropping: bool, everything: bool) -> None:
    few, many = (
        looks_at(n, Retention(keep_last=n if dropping else 1000, log_spaced=False), everything) for n in (8, 40)
    )
    assert few == many
    assert few.total() > 5, "nothing was counted"


def test_a_first_prune_reads_each_manifest_once_and_the_next_none() -> None:
    files = Counted()
    job = Job(files, Memory())
    for _ in range(12):
        job.save()
    catalog = open_catalog(files)
    files.taken()
    for seen in (12, 0):
        prune(files, catalog, Retention(keep_last=5, log_spaced=False), job.epoch)
        read = [path for verb, path in files.looked if verb == "read" and path.startswith("manifests/")]
        assert (len(read), len(set(read))) == (seen, seen)
        files.taken()


def test_the_records_of_one_commit_stay_in_memory() -> None:
    files = Counted()
    job = Job(files, Memory())
    catalog = open_catalog(files)
    for _ in range(10):
        newest = job.save(everything=True)
        prune(files, catalog, Retention(keep_last=6, log_spaced=False), job.epoch)
    files.taken()
    catalog.manifest(newest)
    assert not files.looked
    for save in catalog.saves()[1:]:
        catalog.manifest(save)
    assert sum(verb == "read" for verb, _ in files.looked) == 5


class Other:
    """Another process writes below a running job, whose catalog knows the commits of before."""

    def __init__(self) -> None:
        self.files = SimulatedFiles()
        self.job = Job(self.files, Memory())
        self.saves = [self.job.save() for _ in range(6)]
        self.catalog = open_catalog(self.files)
        self.prune(Retention(keep_last=6, log_spaced=False))

    def prune(self, retention: Retention) -> None:
        prune(self.files, self.catalog, retention, self.job.epoch)

    def check(self, saves: list[SaveId]) -> None:
        for save in saves:
            assert_true_to_write(read_commit(open_catalog(self.files), save))
        check_goes_on(self.files)


TWO = Retention(keep_last=2, log_spaced=False)


def test_a_commit_of_another_process_is_found() -> None:
    """A rescue, or a job that was stopped in the middle of its commit, adds a manifest that no plan knows."""
    other = Other()
    draft = other.job.plan()
    for rank in range(2):
        other.job.write(draft, rank)
    other.job.commit(draft)  # not by way of the catalog
    other.prune(TWO)
    assert open_catalog(other.files).saves() == [draft.id, other.saves[-1]]
    other.check([draft.id, other.saves[-1]])


def test_what_another_process_pruned_counts_no_more() -> None:
    """``driftpoint prune``, by hand: the rule must not count commits that are gone."""
    other = Other()
    prune(other.files, open_catalog(other.files), TWO, other.job.epoch)
    kept = [*other.saves[-2:], other.job.save()]
    other.prune(Retention(keep_last=3, log_spaced=False))
    assert sorted(open_catalog(other.files).saves()) == kept
    other.check(kept)


def test_a_manifest_that_comes_back_keeps_its_segments() -> None:
    """Restored from a copy between two prunes: it is looked up as any other."""
    other = Other()
    path = f"manifests/{other.saves[3]}.json"
    data = other.files.read(path, 1 << 20)
    other.files.unlink(path)
    five = Retention(keep_last=5, log_spaced=False)
    job = other.job
    other.prune(Retention(keep_last=6, log_spaced=False))
    put(other.files, path, data)
    job.save()
    other.prune(five)
    assert other.saves[3] in open_catalog(other.files).saves()
    other.check([other.saves[3], other.saves[5]])


def test_a_damaged_manifest_that_is_repaired_blocks_no_longer() -> None:
    """Under the same name, so that the listing tells nothing."""
    other = Other()
    newest = other.job.save()
    path = f"manifests/{newest}.json"
    data = other.files.read(path, 1 << 20)
    flip(other.files, path, 30)
    with pytest.raises(Exception, match="cannot be read"):
        other.prune(TWO)
    other.files.unlink(path)
    put(other.files, path, data)
    other.prune(TWO)
    assert open_catalog(other.files).saves() == [newest, other.saves[-1]]
