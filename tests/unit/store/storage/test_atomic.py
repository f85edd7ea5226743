from __future__ import annotations

import pytest

from store.errors import ExistsError, StorageError
from store.storage.atomic import ensure_dir, final_name, is_temporary, replace_hint, write_new
from tests.crash.simulated import Fault, SimulatedFiles


def verbs(files: SimulatedFiles) -> list[str]:
    return [op.verb for op in files.log]


def test_the_order_that_survives(files: SimulatedFiles) -> None:
    files.make_dir("d")
    files.log.clear()
    write_new(files, "d/name", lambda file: file.write(b"data"))
    assert verbs(files) == ["create", "write", "sync", "link", "unlink", "sync_dir"]
    assert is_temporary(files.log[0].path.rpartition("/")[2])
    assert (files.log[3].path, files.log[3].target) == (files.log[0].path, "d/name")
    assert files.log[5].path == "d"


def test_a_directory_that_is_there_is_synced_all_the_same(files: SimulatedFiles) -> None:
    """Whoever made it may have been killed before it synced."""
    ensure_dir(files, "a/b")
    assert [(op.verb, op.path) for op in files.log] == [
        ("mkdir", "a"), ("sync_dir", ""), ("mkdir", "a/b"), ("sync_dir", "a"),
    ]  # fmt: skip
    files.log.clear()
    ensure_dir(files, "a/b")
    assert [(op.verb, op.path) for op in files.log] == [("sync_dir", ""), ("sync_dir", "a")]


def test_a_directory_that_cannot_be_synced_is_an_error_unless_its_sync_is_left_to_the_caller(
    files: SimulatedFiles,
) -> None:
    files.faults = [Fault("sync_dir", times=None)]
    with pytest.raises(StorageError):
        write_new(files, "name", lambda file: file.write(b"data"))
    write_new(files, "other", lambda file: file.write(b"data"), sync_name=False)
    assert verbs(files)[-4:] == ["write", "sync", "link", "unlink"]


def test_what_is_there_stays(files: SimulatedFiles) -> None:
    write_new(files, "name", lambda file: file.write(b"old"))
    with pytest.raises(ExistsError):
        write_new(files, "name", lambda file: file.write(b"new"))
    assert files.disk.files() == {"name": b"old"}


def test_an_interruption_while_writing_leaves_nothing(files: SimulatedFiles) -> None:
    def interrupted(file: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_new(files, "name", interrupted)
    assert files.disk.files() == {}


def test_a_hint_is_replaced_as_a_whole(files: SimulatedFiles) -> None:
    replace_hint(files, "hint", b"one")
    replace_hint(files, "hint", b"two")
    assert files.disk.files() == {"hint": b"two"}
    assert verbs(files)[-5:] == ["create", "write", "sync", "rename", "sync_dir"]
    for verb in ("create", "write", "sync", "rename"):
        files.faults = [Fault(verb)]
        with pytest.raises(StorageError):
            replace_hint(files, "hint", b"three")
        assert files.disk.files() == {"hint": b"two"}


def test_what_cannot_be_removed_now_is_left_to_the_prune(files: SimulatedFiles) -> None:
    files.faults = [Fault("unlink", times=None)]
    write_new(files, "name", lambda file: file.write(b"data"))
    left = [name for name in files.list_dir("") if name != "name"]
    assert [final_name(name) for name in left] == ["name"]


@pytest.mark.parametrize(
    "name", ["name", ".tmp-", ".tmp-0123456789ab-", ".tmp-0123456789AB-x", "x.tmp-0123456789ab-x", ".tmp-x"]
)
def test_names_that_are_not_temporary(name: str) -> None:
    assert not is_temporary(name)
    assert final_name(name) is None
