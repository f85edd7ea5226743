"""How a merge and an import end where the only source is damaged, hostile or not whole: by the documented codes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from store.errors import DamagedError, MergeError, NothingToResumeError, UnsupportedError
from tests.support.cli import Here
from tests.support.plain_stores import PlainStore
from tests.support.stores import flip_byte

pytestmark = pytest.mark.slow

MODEL = "mp_rank_00_model_states.pt"


class Hostile:
    """Unpickled by itself, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def rotten(folder: Path) -> None:
    torch.save({"module": {"w": torch.ones(3)}}, folder / MODEL)
    data = bytearray((folder / MODEL).read_bytes())
    data[len(data) // 2 - 40] ^= 0x20
    (folder / MODEL).write_bytes(data)


def cut_short(folder: Path) -> None:
    torch.save({"module": {"w": torch.ones(3)}}, folder / MODEL)
    os.truncate(folder / MODEL, 300)


def hostile(folder: Path) -> None:
    torch.save({"module": {"w": torch.ones(3)}, "client": Hostile(folder.parent / "executed")}, folder / MODEL)


def gone(folder: Path) -> None:
    """The tag that ``latest`` names is not there."""
    folder.rename(folder.with_name("global_step2"))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (rotten, NothingToResumeError),
        (cut_short, NothingToResumeError),
        (hostile, UnsupportedError),
        (gone, MergeError),
    ],
)
def test_a_lone_checkpoint(here: Here, tmp_path: Path, make: object, kind: type[MergeError]) -> None:
    folder = tmp_path / "saved" / "global_step3"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text(folder.name)
    torch.save({}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    make(folder)  # type: ignore[operator]
    for given in (
        ("merge", folder.parent, "--out", tmp_path / "out"),
        ("merge", folder.parent, "--out", tmp_path / "out", "--plan"),
        ("import", folder.parent, "--store", tmp_path / "store"),
    ):
        answer = here(*given, "--json")
        assert answer.code == kind.exit_code, answer.out
        assert answer.json["error"]["type"] == kind.__name__
        assert MODEL in answer.json["error"]["message"] or kind is MergeError
    assert not (tmp_path / "out").exists() and not (folder.parent / "executed").exists()
    assert DamagedError.exit_code not in (NothingToResumeError.exit_code, UnsupportedError.exit_code)


def test_a_store_of_which_nothing_is_left(here: Here, tmp_path: Path) -> None:
    store = PlainStore(tmp_path / "store")
    store.save(10)
    for path in (store.root / "segments").rglob("*.safetensors"):
        flip_byte(path, path.stat().st_size - 5)
    assert here("merge", store.root, "--out", tmp_path / "out").code == 13
    shutil.rmtree(store.root / "manifests")
    assert here("merge", store.root, "--out", tmp_path / "out").code == 13
    assert not (tmp_path / "out").exists()
