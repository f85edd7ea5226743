"""Checkpoints of stock DeepSpeed with files of different saves, or with what is easily taken for something else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from merger.checkpoint import Checkpoint
from merger.layouts.base import Target
from merger.merge import merge
from merger.sources import open_source
from store.errors import MergeError, UnsupportedError
from tests.support.foreign import read_tensors, run
from tests.support.launch import WORKERS, launcher

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("odd")
    run([*launcher(2), WORKERS / "source_unusual_models.py", directory], directory)
    return directory


@pytest.fixture
def mixed(originals: Path, tmp_path: Path) -> Callable[[str, str], Path]:
    """A case's checkpoint of step 4 with some of its files overwritten by those of step 2, by pattern."""

    def made(case: str, pattern: str) -> Path:
        root = Path(shutil.copytree(originals / case / "saved", tmp_path / case))
        found = list((root / "global_step2").glob(pattern))
        assert found
        for path in found:
            shutil.copy(path, root / "global_step4" / path.name)
        return root

    return made


def read(root: Path) -> Checkpoint:
    return open_source(root).checkpoint(4, frozenset())


@pytest.mark.parametrize("case", ["adam1", "adam3", "sgd1"])
def test_files_of_one_save_are_exact(originals: Path, case: str) -> None:
    checkpoint = read(originals / case / "saved")
    assert (checkpoint.certificate.as_found, checkpoint.problems) == (True, ())


@pytest.mark.parametrize(
    ("case", "pattern", "match"),
    [
        ("adam1", "*model_states.pt", "4 steps.*2"),
        ("adam1", "*optim_states.pt", "blocks.0.weight"),
        ("adam3", "*model_states.pt", "4 steps.*2"),
        ("adam3", "*rank_1_*optim_states.pt", "different saves"),
        ("sgd1", "*model_states.pt", "blocks.0.weight"),
        ("sgd1", "*optim_states.pt", "blocks.0.weight"),
        ("sgd1", "*rank_1_*optim_states.pt", "blocks"),
    ],
)
def test_files_of_two_saves_are_refused(
    mixed: Callable[[str, str], Path], tmp_path: Path, case: str, pattern: str, match: str
) -> None:
    root = mixed(case, pattern)
    with pytest.raises(MergeError, match=match):
        read(root)
    with pytest.raises(MergeError, match=match):
        merge(root / "global_step4", tmp_path / "out")


def test_fewer_steps_of_the_optimizer_are_not_exact(mixed: Callable[[str, str], Path]) -> None:
    """A run may have loaded weights without the optimizer's state; at ZeRO-3 no file says which it is."""
    checkpoint = read(mixed("adam3", "*optim_states.pt"))
    assert not checkpoint.certificate.whole
    assert "the optimizer counts 2 steps, the engine 4" in checkpoint.problems[0]


def test_an_optimizer_without_steps_at_stage_3_is_not_exact(originals: Path) -> None:
    checkpoint = read(originals / "sgd3" / "saved")
    assert not checkpoint.certificate.whole
    assert "counts no steps" in checkpoint.problems[0]


def test_a_conjugated_buffer_is_refused(originals: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"turn.*resolve_conj"):
        read(originals / "conjugated" / "saved")


def test_extra_state_is_refused(originals: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"extra\._extra_state"):
        read(originals / "extra" / "saved")


@pytest.mark.parametrize("case", ["reused1", "reused3"])
def test_a_module_under_two_names_is_one(originals: Path, tmp_path: Path, case: str) -> None:
    checkpoint = read(originals / case / "saved")
    assert checkpoint.certificate.as_found
    assert checkpoint.tensors["blocks.0.weight"].aliases == ("blocks.2.weight",)
    assert {tensor.kind for tensor in checkpoint.tensors.values()} == {"trainable"}
    merge(originals / case / "saved", tmp_path / "hf", target=Target(layout="hf", dtype="F32"))
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    master = read_tensors(checkpoint)["blocks.0.weight", "fp32"]
    assert torch.equal(weights["blocks.2.weight"], master)


@pytest.mark.parametrize("case", ["left-out1", "left-out3"])
def test_without_frozen_parameters_it_is_not_exact(originals: Path, tmp_path: Path, case: str) -> None:
    checkpoint = read(originals / case / "saved")
    assert not checkpoint.certificate.whole
    assert "frozen" in checkpoint.problems[0] and "blocks.1" in checkpoint.problems[0]
    with pytest.raises(UnsupportedError, match=r"frozen.*blocks\.1"):
        merge(originals / case / "saved", tmp_path / "hf", target=Target(layout="hf"))


def test_buffers_that_differ_between_ranks_are_not_exact(originals: Path) -> None:
    checkpoint = read(originals / "by-rank3" / "saved")
    assert not checkpoint.certificate.whole
    assert "buffer mine differs" in checkpoint.problems[0]
