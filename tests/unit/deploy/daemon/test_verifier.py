"""The thread that reads commits again, over real stores: damage that is pruned, and stores that go and come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.daemon import verifier
from deploy.daemon.verifier import Checked, Verifier
from store.errors import StorageError
from store.names import SaveId, manifest_path, payload_path
from tests.support.daemons import until
from tests.support.stores import StoreBuilder


class Beside:
    """A verifier of one store that holds a damaged commit and a whole one, and what it told."""

    def __init__(self, root: Path) -> None:
        self.builder = StoreBuilder(root)
        self.builder.save(10)
        self.builder.save(20)
        path = root / payload_path(SaveId(10, 1), 0)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        self.told: list[tuple[SaveId | None, list[str]]] = []
        self.verifier = Verifier(1 << 40, lambda _, save, problems: self.told.append((save, problems)), lambda _: None)
        self.verifier.watch(self.builder.store_id, root)

    @property
    def found(self) -> Checked:
        return self.verifier.found()[0]

    def tells(self, count: int) -> None:
        until(lambda: len(self.told) >= count, f"{count} times told, and not {self.told}")


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    monkeypatch.setattr(verifier, "_POLL_SECONDS", 0.02)
    one = Beside(tmp_path / "store")
    yield one
    one.verifier.end(30.0)


def test_a_damaged_commit_that_is_pruned_is_none_any_more(beside: Beside) -> None:
    until(lambda: beside.found.damaged == [SaveId(10, 1)], "damage")
    (beside.builder.root / manifest_path(SaveId(10, 1))).unlink()
    until(lambda: beside.found.damaged == [], "its end")


def test_a_store_that_is_away_is_told_and_read_anew_when_it_is_back(beside: Beside) -> None:
    until(lambda: beside.found.damaged, "damage")
    away = beside.builder.root.rename(beside.builder.root.with_name("away"))
    before = len(beside.told)
    beside.tells(before + 2)
    assert beside.told[before + 1] == (None, []) and beside.found.damaged == []
    away.rename(beside.builder.root)
    until(lambda: beside.found.damaged == [SaveId(10, 1)], "damage again")


@pytest.mark.parametrize("change", ["create", "link", "rename", "unlink", "make_dir", "remove_dir", "sync_dir"])
def test_what_it_reads_through_changes_nothing(beside: Beside, change: str) -> None:
    root = beside.builder.root
    files = verifier._ThrottledFiles(root, verifier._Throttle(1 << 40, lambda _: None))
    before = sorted(path.relative_to(root) for path in root.rglob("*"))
    paths = [manifest_path(SaveId(20, 1)), "elsewhere"][: 2 if change in ("link", "rename") else 1]
    with pytest.raises(StorageError):
        getattr(files, change)(*paths)
    assert sorted(path.relative_to(root) for path in root.rglob("*")) == before


def test_it_remembers_what_it_read_of_present_commits_only(beside: Beside) -> None:
    until(lambda: len(beside.found.saves) == 2, "two commits")
    assert beside.found.saves[SaveId(20, 1)]
    (beside.builder.root / manifest_path(SaveId(20, 1))).unlink()
    until(lambda: set(beside.found.saves) == {SaveId(10, 1)}, "one commit")
    assert not any(save == SaveId(20, 1) for groups in beside.found.saves.values() for save, _ in groups)
