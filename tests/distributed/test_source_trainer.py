"""Folders that the stock Hugging Face Trainer left, with DeepSpeed's checkpoints in them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from merger.merge import merge
from merger.sources import open_source
from store.errors import DamagedError, MergeError, NoStoreError, UnsupportedError
from tests.support.foreign import directory_differences, read_tensors, run
from tests.support.launch import WORKERS, launcher
from tests.support.pt_trees import same_bits

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

pytest.importorskip("accelerate")

CASES = ("zero2-bf16", "zero3-bf16")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trainer")
    run([*launcher(2), WORKERS / "source_trainer.py", directory, *CASES], directory)
    return directory


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "zero2-bf16" / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("case", CASES)
def test_the_newest_folder_is_taken_and_its_files_belong_to_it(trained: Path, case: str) -> None:
    root = trained / case / "run"
    source = open_source(root)
    assert (source.kind, source.steps()) == ("trainer", (3, 2))
    checkpoint = source.checkpoint(None, frozenset())
    assert (checkpoint.step, checkpoint.files, checkpoint.problems) == (3, root / "checkpoint-3", ())
    assert checkpoint.certificate.save == "global_step3"
    expected = torch.load(trained / case / "weights.pt", weights_only=False)
    alone = open_source(root / "checkpoint-3").checkpoint(None, frozenset())
    assert alone.files == root / "checkpoint-3"
    for found in (read_tensors(checkpoint), read_tensors(alone)):
        masters = {fqn: tensor for (fqn, slot), tensor in found.items() if slot == "fp32"}
        assert masters.keys() == expected.keys()
        assert all(same_bits(masters[fqn], expected[fqn]) for fqn in expected)


@pytest.mark.parametrize("name", [2, "2", "checkpoint-2"])
def test_a_folder_by_its_name(trained: Path, name: int | str) -> None:
    source = open_source(trained / "zero3-bf16" / "run")
    assert source.checkpoint(name, frozenset()).step == 2
    with pytest.raises(MergeError, match="no checkpoint 7; there are: checkpoint-3, checkpoint-2"):
        source.checkpoint(7, frozenset())


@pytest.mark.parametrize("case", CASES)
def test_merged_to_itself_it_is_what_deepspeed_wrote(trained: Path, tmp_path: Path, case: str) -> None:
    original = trained / case / "run" / "checkpoint-3"
    result = merge(original, tmp_path / "merged")
    (tmp_path / "original").mkdir()
    shutil.copytree(original / "global_step3", tmp_path / "original" / "global_step3")
    for name in ("latest", "zero_to_fp32.py", "zero_to_torch.py"):
        if (original / name).exists():
            shutil.copy(original / name, tmp_path / "original" / name)
    found = directory_differences(tmp_path / "original", result.out)
    assert [line for line in found if "zero_to_torch" not in line] == []


def test_a_folder_that_is_not_complete_is_passed_over_and_told(copy: Path, tmp_path: Path) -> None:
    next((copy / "checkpoint-3" / "global_step3").glob("*pp_rank_1*optim*")).unlink()
    checkpoint = open_source(copy).checkpoint(None, frozenset())
    assert checkpoint.step == 2
    assert any("checkpoint-3 is not complete" in problem for problem in checkpoint.problems)
    with pytest.raises(MergeError, match="is missing"):
        merge(copy, tmp_path / "out", save=3)
    with pytest.raises(MergeError, match="is missing"):
        merge(copy / "checkpoint-3", tmp_path / "out")
    (copy / "checkpoint-2" / "latest").write_text("../checkpoint-3/global_step3")
    with pytest.raises(MergeError, match=r"no complete checkpoint: checkpoint-3 is not complete.*latest"):
        merge(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_among_the_folders_are_none(copy: Path) -> None:
    (copy / "checkpoint-9").symlink_to(copy / "checkpoint-2")
    assert open_source(copy).steps() == (3, 2)


def test_folders_without_deepspeed(copy: Path, tmp_path: Path) -> None:
    folder = copy / "checkpoint-3"
    shutil.rmtree(folder / "global_step3")
    with pytest.raises(MergeError, match="no checkpoint global_step3"):
        open_source(folder).checkpoint(None, frozenset())
    (folder / "latest").unlink()
    if not (folder / "model.safetensors").exists():
        (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="a model without an optimizer's state"):
        open_source(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NoStoreError, match=r"STORE\.json.*not a checkpoint of DeepSpeed"):
        open_source(empty)
    with pytest.raises((NoStoreError, DamagedError)):
        open_source(tmp_path / "nothing")
