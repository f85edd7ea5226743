"""What storage is told to expect: all that will be read, in that order, and no more than a window ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from store import fragments as ahead
from store.catalog import open_catalog
from store.fragments import ReadAhead, Source
from store.names import payload_path
from store.resolve import resolve
from store.storage.local import LocalFiles
from tests.support.stores import StoreBuilder


class Listening(LocalFiles):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.expected: list[tuple[str, int, int]] = []

    def expect(self, path: str, offset: int, nbytes: int) -> None:
        self.expected.append((path, offset, nbytes))
        super().expect(path, offset, nbytes)


@pytest.fixture
def sources(tmp_path: Path) -> list[Source]:
    builder = StoreBuilder(tmp_path / "store", world_size=2)
    save = builder.save(10)
    found = list(resolve(open_catalog(builder.files), save).sources())
    return sorted(found, key=lambda one: (one.part.rank, one.entry.offset))


def told(files: Listening) -> set[tuple[str, int]]:
    return {(path, offset + at) for path, offset, nbytes in files.expected for at in range(nbytes)}


def needed(sources: list[Source]) -> set[tuple[str, int]]:
    return {
        (payload_path(one.part.save, one.part.rank), one.part.header_bytes + one.entry.offset + at)
        for one in sources
        for at in range(one.entry.nbytes)
    }


def test_all_of_it_is_told_and_neighbours_are_one_request(tmp_path: Path, sources: list[Source]) -> None:
    files = Listening(tmp_path / "store")
    ReadAhead(files, sources).reading(1)
    assert told(files) == needed(sources)
    assert len(files.expected) == 2  # one for each rank's payload


def test_no_more_than_a_window_is_told_ahead(
    tmp_path: Path, sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sources[0].entry.nbytes
    monkeypatch.setattr(ahead, "WINDOW", size)
    files, apart = Listening(tmp_path / "store"), sources[::2]
    before = ReadAhead(files, apart)
    for at, source in enumerate(apart):
        before.reading(source.entry.nbytes)
        assert told(files) >= needed(apart[: at + 1])
        assert len(told(files)) <= sum(one.entry.nbytes for one in apart[: at + 1]) + 2 * max(
            one.entry.nbytes for one in apart
        )
    assert told(files) == needed(apart)


def test_a_hint_on_what_is_not_there_is_silent(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.expect("segments/none/rank-00000.safetensors", 0, 1 << 30)
    files.expect("../outside", 0, 1)
    (tmp_path / "link").symlink_to("/etc/passwd")
    files.expect("link", 0, 1)
