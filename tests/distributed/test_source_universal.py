"""Universal checkpoints that DeepSpeed's own converter made: as true as what they were made from, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.layouts.base import Target
from merger.merge import merge
from merger.sources import open_source
from store.errors import DamagedError, MergeError, StorageError, UnsupportedError
from tests.support.foreign import convert, directory_differences, read_tensors, train_stock
from tests.support.pt_trees import same_bits

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]

WRAPPER = "zero1-bf16-wrapper"
CASES = ("zero1-bf16", WRAPPER, "zero2-bf16-aligned-round-robin", "zero3-bf16-sub-groups")
SCRAMBLED = "zero2-fp32-round-robin"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case trained on three ranks, and converted. The converter itself fails on the wrapper's files where a
    param group has fewer elements than there are ranks."""
    directory = tmp_path_factory.mktemp("universal")
    train_stock(directory, 3, [case for case in (*CASES, SCRAMBLED) if case != WRAPPER])
    train_stock(directory, 1, [WRAPPER])
    convert(directory, [*CASES, SCRAMBLED])
    return directory


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_and_number_is_the_engines(converted: Path, case: str) -> None:
    truth = torch.load(converted / case / "truth.pt", weights_only=False)
    source = open_source(converted / case / "universal")
    assert (source.kind, source.steps()) == ("universal", (3,))
    checkpoint = source.checkpoint(None, frozenset())
    found = read_tensors(checkpoint)
    assert found.keys() == truth["tensors"].keys()
    assert [key for key, tensor in truth["tensors"].items() if not same_bits(tensor, found[key])] == []
    state = checkpoint.framework_state
    assert [group["params"] for group in state["param_groups"]] == truth["members"]
    assert [group["hyper"] for group in state["param_groups"]] == truth["groups"]
    assert state["lr_scheduler"] == truth["scheduler"]
    assert {float(scalars["step"]) for scalars in state["scalars"].values()} == {3.0}
    assert checkpoint.client_state == {"mine": {"list": [1, 2.5, "three"]}}
    assert checkpoint.certificate.as_found and checkpoint.certificate.save == "global_step3_universal"


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_from_the_checkpoint_that_it_was_made_from(converted: Path, tmp_path: Path, case: str) -> None:
    folder = converted / case
    merged = merge(folder / "universal", tmp_path / "merged").out
    expected = merge(folder / "saved", tmp_path / "expected").out
    assert directory_differences(expected, merged) == []


@pytest.mark.parametrize("case", (*CASES, SCRAMBLED))
def test_what_a_merge_writes_as_universal_is_read_back(converted: Path, tmp_path: Path, case: str) -> None:
    truth = torch.load(converted / case / "truth.pt", weights_only=False)
    merge(converted / case / "saved", tmp_path / "universal", target=Target(layout="universal"))
    checkpoint = open_source(tmp_path / "universal").checkpoint(None, frozenset())
    found = read_tensors(checkpoint)
    assert found.keys() == truth["tensors"].keys()
    assert [key for key, tensor in truth["tensors"].items() if not same_bits(tensor, found[key])] == []
    groups = checkpoint.framework_state["param_groups"]
    assert [group["params"] for group in groups] == truth["members"]
    assert [group["hyper"] for group in groups] == truth["groups"]


def test_what_the_converter_scrambled_is_refused(converted: Path, tmp_path: Path) -> None:
    """The converter takes param_slice_mappings for places, which they are not with round_robin_gradients."""
    truth = torch.load(converted / SCRAMBLED / "truth.pt", weights_only=False)["tensors"]
    folder = converted / SCRAMBLED / "universal"
    wrong = [
        fqn
        for fqn, slot in truth
        if slot == "fp32"
        and not same_bits(
            truth[fqn, slot],
            torch.load(folder / "global_step3_universal" / "zero" / fqn / "fp32.pt", weights_only=False)["param"],
        )
    ]
    assert wrong, "DeepSpeed's converter does it right now: read what it makes"
    with pytest.raises(MergeError, match=r"round_robin_gradients.*Merge the original checkpoint"):
        merge(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_paths(converted: Path) -> None:
    root = converted / CASES[0] / "universal"
    alone = open_source(root / "global_step3_universal")
    assert (alone.kind, alone.steps(), alone.checkpoint(None, frozenset()).step) == ("universal", (3,), 3)
    source = open_source(root)
    for name in (3, "3", "global_step3_universal"):
        assert source.checkpoint(name, frozenset()).step == 3
    with pytest.raises(MergeError, match="no checkpoint 2; there are: global_step3_universal"):
        source.checkpoint(2, frozenset())


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    shutil.copytree(converted / CASES[0] / "universal", tmp_path / "universal")
    return tmp_path / "universal"


def spoil(root: Path, how: str) -> Any:
    folder = root / "global_step3_universal"
    file = folder / "zero" / "blocks.0.down.weight" / "exp_avg.pt"
    if how == "latest":
        (root / "latest_universal").write_text("../universal/global_step3_universal")
        return MergeError, "not an entry"
    if how == "missing slot of one":
        file.unlink()
        return MergeError, r"blocks\.0\.down\.weight"
    if how == "missing parameter":
        shutil.rmtree(file.parent)
        return Exception, r"blocks\.0\.down\.weight"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-9])
        return DamagedError, r"exp_avg\.pt"
    if how == "another's":
        shutil.copy(folder / "zero" / "gain" / "exp_avg.pt", file)
        return MergeError, r"exp_avg\.pt.* has the shape \(1,\), but blocks\.0\.down\.weight has"
    if how == "a link":
        file.unlink()
        file.symlink_to(root.parent / "elsewhere.pt")
        return StorageError, "a symbolic link to .*elsewhere.pt, which cannot be read"
    if how == "a stranger":
        (file.parent / "notes.txt").write_text("x")
        return DamagedError, r"notes\.txt is not a file of a universal checkpoint"
    (folder / "mp_rank_01_model_states.pt").write_bytes(b"x")
    return UnsupportedError, "tensor or pipeline parallelism"


@pytest.mark.parametrize(
    "how",
    [
        "latest", "missing slot of one", "missing parameter", "truncated", "another's", "a link", "a stranger",
        "tensor parallel",
    ],
)  # fmt: skip
def test_spoiled(copy: Path, tmp_path: Path, how: str) -> None:
    kind, match = spoil(copy, how)
    with pytest.raises(kind, match=match):
        merge(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
