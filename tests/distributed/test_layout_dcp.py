"""The DCP layout: stock FSDP2 loads it on any number of ranks, with nothing of ours, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from merger.layouts import torch_dcp as layout
from merger.layouts.base import Target
from merger.merge import MergeResult, merge
from tests.support.launch import ROOT, WORKERS, launcher, python

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]

CASES = ("plain", "fsdp2", "zero1-bf16", "zero3-bf16-sub-groups")
ENGINES = CASES[2:]
WORLDS = (1, 2, 3)
TRAINED, BUFFERS = 12, 2


def launch(script: str, directory: Path, ranks: int, path: str) -> None:
    """Run a worker under torchrun, with ``path`` as PYTHONPATH."""
    done = python([*launcher(ranks), WORKERS / script, directory], directory, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, MergeResult]]:
    """Every case trained, merged, and loaded by 1, 2 and 3 ranks."""
    directory = tmp_path_factory.mktemp("dcp")
    launch("layout_dcp_save.py", directory, 2, str(ROOT))
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        for case in CASES:
            # The last one in many blobs and files, as a large model has them.
            patch.setattr(layout, "CHUNK_BYTES", 300 if case == CASES[-1] else 1 << 26)
            target = Target("dcp", shard_bytes=20_000 if case == CASES[-1] else 10**9)
            results[case] = merge(directory / f"{case}-store", directory / f"{case}-dcp", target=target)
    for ranks in WORLDS:
        launch("layout_dcp_load.py", directory, ranks, "")
    return directory, results


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    as_bytes = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


def require_state(state: tuple[Any, Any], directory: Path, case: str) -> None:
    """Every tensor of a model's and an optimizer's state dict is that of the run, and nothing is missing."""
    model, optimizer = state
    expected = torch.load(directory / f"{case}.pt")
    checked = set()
    for name, slots in expected.items():
        for slot, tensor in slots.items():
            if slot == "buffer" and name == "cache":
                assert name not in model  # not persistent
                continue
            found = model[name] if slot in ("fp32", "buffer") else optimizer["state"][name][slot]
            assert same(found, tensor), (name, slot)
            checked.add((name, slot))
    assert same(model["head.weight"], expected["embed.weight"]["fp32"])
    assert {(name, slot) for name in optimizer["state"] for slot in optimizer["state"][name]} <= checked | {
        (name, "step") for name in expected
    }
    assert {state["step"].item() for state in optimizer["state"].values()} == {3.0}
    assert len(optimizer["state"]) == TRAINED and len(checked) >= 3 * TRAINED + BUFFERS


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", WORLDS)
def test_stock_fsdp2_loads_it_bitwise(merged: tuple[Path, dict[str, MergeResult]], case: str, ranks: int) -> None:
    directory, _ = merged
    loaded = torch.load(directory / f"{case}-loaded-{ranks}.pt")
    require_state(loaded, directory, case)
    groups = loaded[1]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [group["lr"] for group in groups] != [0.5, 0.5]  # what the optimizer was built with


@pytest.mark.parametrize("case", CASES)
def test_keys_and_shapes_are_those_of_a_stock_checkpoint(
    merged: tuple[Path, dict[str, MergeResult]], case: str
) -> None:
    directory, _ = merged
    ours, own = (dcp.FileSystemReader(directory / f"{case}-{which}").read_metadata() for which in ("dcp", "own"))
    ours_alone = ours.state_dict_metadata.keys() - own.state_dict_metadata.keys()
    more = {key for key in ours_alone if ours.planner_data[key][0] in ("model", "optim")}  # not torchtitan's names
    assert all(key.split(".")[-1] == "initial_lr" for key in more) and (not more or case in ENGINES)
    assert own.state_dict_metadata.keys() <= ours.state_dict_metadata.keys()
    for key, stock in own.state_dict_metadata.items():
        found = ours.state_dict_metadata[key]
        assert type(found) is type(stock), key
        assert getattr(found, "size", None) == getattr(stock, "size", None), key
        # What was frozen has no master weights: it is in the dtype that it was trained in.
        if case not in ENGINES or "blocks.1." not in key:
            assert getattr(found, "properties", None) == getattr(stock, "properties", None), key
        assert ours.planner_data[key] == own.planner_data[key]
    assert ours.version == own.version


@pytest.mark.parametrize("case", CASES)
def test_a_plain_load_and_a_conversion(merged: tuple[Path, dict[str, MergeResult]], case: str, tmp_path: Path) -> None:
    directory, _ = merged
    expected = torch.load(directory / f"{case}.pt")
    state = {"model": {"embed.weight": torch.zeros(37, 13), "seen": torch.tensor(0)}}
    dcp.load(state, checkpoint_id=str(directory / f"{case}-dcp"), no_dist=True)
    assert same(state["model"]["embed.weight"], expected["embed.weight"]["fp32"])
    assert same(state["model"]["seen"], expected["seen"]["buffer"])
    dcp_to_torch_save(directory / f"{case}-dcp", tmp_path / "converted.pt")
    converted = torch.load(tmp_path / "converted.pt")
    require_state((converted["model"], converted["optim"]), directory, case)


def test_large_tensors_are_cut_and_files_are_many(merged: tuple[Path, dict[str, MergeResult]]) -> None:
    directory, results = merged
    folder = directory / f"{CASES[-1]}-dcp"
    metadata = dcp.FileSystemReader(folder).read_metadata()
    assert len(metadata.state_dict_metadata["model.blocks.0.up.weight"].chunks) == 9
    assert len(list(folder.glob("__*_0.distcp"))) > 3
    one_file = sorted(path.name for path in (directory / "plain-dcp").iterdir())
    assert one_file == [".metadata", "__0_0.distcp", "driftpoint-certificate.json", "extra.pt"]
    assert results["plain"].certificate.exact
    # Tied weights lie in the file once.
    places = metadata.storage_data
    head = {(place.relative_path, place.offset) for index, place in places.items() if index.fqn == "model.head.weight"}
    embed = {(at.relative_path, at.offset) for index, at in places.items() if index.fqn == "model.embed.weight"}
    assert head == embed


def test_what_has_no_place_in_a_state_dict(merged: tuple[Path, dict[str, MergeResult]]) -> None:
    directory, _ = merged
    extra = torch.load(directory / f"{CASES[-1]}-dcp" / "extra.pt", weights_only=True)
    assert (extra["step"], extra["counters"]["global_steps"], sorted(extra["ranks"])) == (3, 3, [0, 1])
    assert extra["lr_scheduler"] is not None


@pytest.mark.parametrize("case", ENGINES)
def test_from_the_files_of_deepspeed_it_is_the_same(
    merged: tuple[Path, dict[str, MergeResult]], case: str, tmp_path: Path
) -> None:
    directory, _ = merged
    merge(directory / f"{case}-engine", tmp_path / "dcp", target=Target("dcp"))
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "converted.pt")
    dcp_to_torch_save(directory / f"{case}-dcp", tmp_path / "expected.pt")
    converted, expected = torch.load(tmp_path / "converted.pt"), torch.load(tmp_path / "expected.pt")
    require_state((converted["model"], converted["optim"]), directory, case)
    assert converted["model"].keys() == expected["model"].keys()
    assert converted["optim"]["param_groups"] == expected["optim"]["param_groups"]
    assert torch.load(tmp_path / "dcp" / "extra.pt", weights_only=True)["client_state"] == {"mine": [1, 2]}
