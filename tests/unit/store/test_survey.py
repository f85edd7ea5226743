"""The catalog reads only new commits, and knows as much as one that reads all of them."""

from __future__ import annotations

import random

import pytest

from store.catalog import Catalog, CommitSurvey, open_catalog
from store.errors import StorageError
from store.names import SaveId, manifest_path
from store.retention import Retention, bytes_to_free, plan_prune
from tests.crash.damage import flip, put, remove
from tests.crash.simulated import SimulatedFiles
from tests.crash.workload import Job, Memory

ALL = Retention(keep_last=100)


def surveyed(catalog: Catalog) -> CommitSurvey:
    bytes_to_free(catalog, ALL)
    return catalog.survey


def assert_knows_all(catalog: Catalog, files: SimulatedFiles) -> None:
    """And in the same order, newest first."""
    known, found = surveyed(catalog), surveyed(open_catalog(files))
    assert known == found
    assert list(known.readable) == list(found.readable) == sorted(found.readable, reverse=True)


class Life:
    """A store in which commits come, go, come back, and are damaged."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.files = SimulatedFiles()
        self.job = Job(self.files, Memory())
        self.saves = [self.job.save()]
        self.removed: dict[SaveId, bytes] = {}

    def saved(self) -> None:
        self.saves.append(self.job.save(everything=self.chance.random() < 0.5))

    def restarted(self) -> None:
        self.job = Job(self.files, Memory())

    def gone(self) -> None:
        self.take(self.chance.choice(self.saves))

    def take(self, save: SaveId) -> None:
        if save not in self.removed and len(self.removed) + 1 < len(self.saves):
            self.removed[save] = self.files.disk.files()[manifest_path(save)]
            remove(self.files, manifest_path(save))

    def came_back(self) -> None:
        if self.removed:
            save = self.chance.choice(list(self.removed))
            put(self.files, manifest_path(save), self.removed.pop(save))

    def damaged(self) -> None:
        """Before anybody read it. Once it comes back, it is whole."""
        self.saved()
        self.removed[self.saves[-1]] = self.files.disk.files()[manifest_path(self.saves[-1])]
        flip(self.files, manifest_path(self.saves[-1]), 40)

    def stray(self) -> None:
        put(self.files, f"manifests/note-{self.chance.randrange(3)}.txt", b"")


@pytest.mark.parametrize("seed", range(30))
def test_what_a_long_life_knows_is_what_a_fresh_look_finds(seed: int) -> None:
    life = Life(seed)
    events = (life.saved, life.saved, life.restarted, life.gone, life.came_back, life.damaged, life.stray)
    catalog = open_catalog(life.files)
    for _ in range(25):
        for _ in range(life.chance.randrange(1, 3)):
            life.chance.choice(events)()
        assert_knows_all(catalog, life.files)
        for retention in (ALL, Retention(keep_last=2), Retention(keep_last=1, keep_every=3)):
            for room in (0, 1 << 12):
                plans = [plan_prune(one, retention, make_room=room) for one in (catalog, open_catalog(life.files))]
                assert plans[0] == plans[1]
    assert len(life.saves) > 3, "nothing happened"


class Lists(SimulatedFiles):
    """Remembers the folders that were listed."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[str] = []

    def list_dir(self, path: str) -> list[str]:
        self.listed.append(path)
        return super().list_dir(path)


def test_commits_that_stay_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prune asks of each commit is asked of new ones only, and each folder is listed once."""
    files = Lists()
    job = Job(files, Memory())
    for _ in range(8):
        job.save()
    catalog = open_catalog(files)
    plan_prune(catalog, ALL)
    for one in catalog.survey.readable.values():
        for name in ("whole", "groups", "previous"):
            object.__delattr__(one, name)  # reading it again raises AttributeError
    newest = job.save()
    files.listed.clear()
    plan = plan_prune(catalog, ALL)
    assert (len(plan.keep), plan.keep[-1], plan.groups, plan.manifests) == (9, newest, (), ())
    assert files.listed.count("manifests") == files.listed.count("segments") == 1


def test_what_could_not_be_read_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    files = SimulatedFiles()
    job = Job(files, Memory())
    saves = [job.save() for _ in range(3)]
    catalog = open_catalog(files)
    surveyed(catalog)
    saves.append(job.save())

    def refuse(path: str, limit: int) -> bytes:
        raise StorageError(f"cannot read {path}: the device reported an I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(files, "read", refuse)
        found = surveyed(catalog)
    assert (found.refused[:11], list(found.readable)) == ("cannot read", saves[2::-1])
    assert list(surveyed(catalog).readable) == saves[::-1] and not surveyed(catalog).refused
