"""The DCP layout and its container: what is cut, what is checked, and whose optimizer it is."""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import monitor
from merger.checkpoint import Checkpoint, Placement, PlannedTensor, changed_steps
from merger.layouts import torch_dcp as layout
from merger.layouts.base import Target
from merger.layouts.torch_dcp import dcp_layout, torch_hyper, with_torch_steps
from merger.merge import merge
from merger.writers.dcp import DcpFile, Item
from store.errors import MergeError, UnsupportedError
from store.names import Fragment
from tests.support.described import described, tensor
from tests.support.plain_stores import PlainStore
from tests.support.slow import others_slow

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("chunk", others_slow([1 << 26, 40, 1]))
def test_a_store_is_loaded_by_torch_to_the_last_bit(
    store: PlainStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(layout, "CHUNK_BYTES", chunk)
    store.save(10)
    result = merge(store.root, tmp_path / "out", target=Target("dcp", shard_bytes=5000))
    expected = store.expected(10)
    state: dict[str, Any] = {
        "model": {fqn: torch.zeros(len(slots["fp32"])) for fqn, slots in expected.items()},
        "optim": {
            "state": {
                fqn: {**{s: torch.zeros(len(v)) for s, v in slots.items() if s != "fp32"}, "step": torch.tensor(0.0)}
                for fqn, slots in expected.items()
            },
            "param_groups": [{"lr": 0.0, "betas": (0.0, 0.0), "params": []}],
        },
    }
    dcp.load(state, checkpoint_id=str(result.out), no_dist=True)
    for fqn, slots in expected.items():
        assert state["model"][fqn].numpy().tobytes() == slots["fp32"].tobytes()
        kept = state["optim"]["state"][fqn]
        assert kept["step"].item() == 10
        assert all(kept[slot].numpy().tobytes() == slots[slot].tobytes() for slot in slots if slot != "fp32")
    assert state["optim"]["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.75), "params": store.fqns}]
    assert str(tmp_path).encode() not in (result.out / ".metadata").read_bytes()


def test_the_whole_of_the_file_is_read_back(tmp_path: Path) -> None:
    """Every byte but the planned tensor's own, which whoever wrote them checks."""
    stored = PlannedTensor((3, 2), torch.float32, (Placement(Fragment("w", "fp32", 0, 6), 0),))
    items = [Item(MetadataIndex("lr"), 0.5), Item(MetadataIndex("w", torch.Size((0, 0))), stored)]
    path, file = tmp_path / "one.distcp", DcpFile(items)
    (hole,) = file.make(path)
    file.seal(path, {hole.offset: zlib.crc32(bytes(24))})
    file.check(path)
    content = path.read_bytes()
    for blob, expected in zip(file.blobs, (0.5, torch.zeros(3, 2)), strict=True):
        part = content[blob.start : blob.start + blob.nbytes]
        assert zipfile.ZipFile(io.BytesIO(part)).testzip() is None
        found = torch.load(io.BytesIO(part), weights_only=True)
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    assert content[hole.offset : hole.offset + 24] == bytes(24)
    missed = []
    for offset in range(len(content)):
        if hole.offset <= offset < hole.offset + 24:
            continue
        hurt = bytearray(content)
        hurt[offset] ^= 0x10
        path.write_bytes(hurt)
        try:
            file.check(path)
        except MergeError:
            continue
        missed.append(offset)
    assert missed == []
    for other in (content[:-1], content + b"0", b""):
        path.write_bytes(other)
        with pytest.raises(MergeError, match="reads back"):
            file.check(path)


def test_a_taken_name(tmp_path: Path) -> None:
    (tmp_path / "one.distcp").write_text("mine")
    with pytest.raises(FileExistsError):
        DcpFile([]).make(tmp_path / "one.distcp")


def adam(hyper: dict[str, Any], steps: dict[str, Any], optimizer: str | None = None) -> dict[str, Any]:
    return {
        "param_groups": [{"params": list(steps), "hyper": hyper}],
        "scalars": {fqn: {"step": step} for fqn, step in steps.items()},
        "slots": {},
        **({"optimizer": optimizer} if optimizer else {}),
    }


FUSED = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.2, "bias_correction": True}
TENSORS = {"a": tensor(2), "b": tensor(2)}


@pytest.mark.parametrize("name", ["FusedAdam", "DeepSpeedCPUAdam", "AdamW", "Adam", "unknown", None])
@pytest.mark.parametrize(
    ("section", "decoupled"),
    [
        (None, True),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, True),
        ({"type": "Adam", "params": {}}, True),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, False),
    ],
)
def test_deepspeeds_adams_become_torchs(name: str | None, section: dict[str, Any] | None, decoupled: bool) -> None:
    facts = {"ds_config": {"optimizer": section}} if section else {}
    checkpoint = described(TENSORS, state=adam({**FUSED, "step": 3}, {"a": 3, "b": 3}, name), facts=facts)
    (group,), (note,) = torch_hyper(checkpoint)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    own = kind([torch.zeros(1)], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.2).param_groups[0]
    assert {**group, "params": own["params"]} == own
    assert kind.__name__ in note and ("nothing says whether" in note) == (section is None)
    stepped = steps_of(checkpoint)["a"]
    assert torch.equal(stepped, torch.tensor(3.0)) and stepped.dtype == torch.float32


def steps_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    scalars = with_torch_steps(checkpoint)[0].framework_state["scalars"]
    return {fqn: kept["step"] for fqn, kept in scalars.items()}


@pytest.mark.parametrize("name", ["FusedAdam", "AdamW", None])
@pytest.mark.parametrize("stage", [None, 0])
def test_fused_adam_counts_in_one_parameter_of_a_group(name: str | None, stage: int | None) -> None:
    facts = {} if stage is None else {"zero_stage": stage}
    checkpoint = described(TENSORS, state=adam(FUSED, {"a": 0, "b": 3}, name), facts=facts)
    assert steps_of(checkpoint) == {"a": torch.tensor(3.0), "b": torch.tensor(3.0)}
    counted, notes = with_torch_steps(checkpoint)
    assert counted.certificate == checkpoint.certificate and counted.certificate.exact and notes == ()
    composite = replace(checkpoint, run_steps={"a": 0, "b": 2})
    assert steps_of(composite) == {"a": torch.tensor(2.0), "b": torch.tensor(2.0)}
    counted, (note,) = with_torch_steps(composite)
    assert [(one.param_group, one.chosen) for one in changed_steps(counted.certificate)] == [(0, 2.0)]
    assert not counted.certificate.exact and "get the run's, 2" in note


@pytest.mark.parametrize(
    ("name", "hyper", "stage"),
    [
        ("FusedAdam", FUSED, 1),
        ("AdamW", FUSED, 3),
        ("DeepSpeedCPUAdam", {**FUSED, "amsgrad": False}, 0),
        ("AdamW", {**FUSED, "amsgrad": False}, 0),
        (None, {**FUSED, "amsgrad": False}, None),
    ],
)
@pytest.mark.parametrize("run_steps", [{}, {"a": 3, "b": 3}])
def test_where_each_parameter_has_a_count_it_keeps_it(
    name: str | None, hyper: dict[str, Any], stage: int | None, run_steps: dict[str, Any]
) -> None:
    facts = {} if stage is None else {"zero_stage": stage}
    checkpoint = described(TENSORS, state=adam(hyper, {"a": 2, "b": 3}, name), facts=facts)
    composite = replace(checkpoint, run_steps=run_steps)
    assert steps_of(composite) == {"a": torch.tensor(2.0), "b": torch.tensor(3.0)}
    assert with_torch_steps(composite)[0].certificate.exact and with_torch_steps(composite)[1] == ()


class CpuAdam(PlainStore):
    """A store as of DeepSpeedCPUAdam, in which the optimizer is called what the configuration calls it."""

    def run_state(self, step: int, rank: int) -> dict[str, Any]:
        found = super().run_state(step, rank)
        framework = found["framework"]
        for group in framework["param_groups"]:
            group["hyper"] = {**FUSED, "amsgrad": False}
        framework["scalars"] = {fqn: {"step": step} for fqn in framework["scalars"]}
        return {**found, "framework": {**framework, "optimizer": "AdamW"}}


def test_stock_torch_loads_what_deepspeeds_adam_left(tmp_path: Path) -> None:
    store = CpuAdam(tmp_path / "store")
    store.save(10)
    result = merge(store.root, tmp_path / "out", target=Target("dcp"))
    model = torch.nn.Module()
    for fqn, slots in store.expected(10).items():
        *path, name = fqn.split(".")
        place = model
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, torch.nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(name, torch.nn.Parameter(torch.zeros(len(slots["fp32"]))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=str(result.out), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["maximize"]) == (0.1, 0.2, False)
    assert {kept["step"].item() for kept in optimizer.state.values()} == {10.0}
    torch.stack([parameter.sum() for parameter in model.parameters()]).sum().backward()
    optimizer.step()


def test_torchs_own_hyperparameters_are_left_alone() -> None:
    state = adam({"lr": 0.1, "foreach": None}, {"a": torch.tensor(2.0), "b": torch.tensor(4.0)}, "AdamW")
    checkpoint = described(TENSORS, state=state)
    assert torch_hyper(checkpoint) == ([{"lr": 0.1, "foreach": None}], ())
    assert with_torch_steps(checkpoint) == (checkpoint, ())


def test_optimizers_that_only_resemble_adam_are_left_alone() -> None:
    for name, hyper in (("OneBitAdam", FUSED), ("Lamb", {**FUSED, "max_coeff": 10.0})):
        checkpoint = described(TENSORS, state=adam(hyper, {"a": 2, "b": 4}, name))
        assert torch_hyper(checkpoint) == ([hyper], ())
        assert with_torch_steps(checkpoint) == (checkpoint, ())


def test_an_adam_that_torch_cannot_do() -> None:
    checkpoint = described(TENSORS, state=adam({**FUSED, "bias_correction": False}, {"a": 1}, "FusedAdam"))
    with pytest.raises(UnsupportedError, match="without bias correction"):
        torch_hyper(checkpoint)


def test_a_model_without_an_optimizer() -> None:
    found = dcp_layout(described(TENSORS), Target("dcp"))
    assert found.notes == ("there is no optimizer state to write: load the model only",)


class Inner(torch.nn.Module):
    """All parameters are in a child with the name that DistributedDataParallel gives, and one is tied to outside."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8))
        self.head = torch.nn.Linear(8, 10, bias=False)
        self.head.weight = self.module[0].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(tokens))


def test_the_optimizer_has_the_names_of_the_model(tmp_path: Path) -> None:
    def job() -> tuple[Inner, torch.optim.Optimizer]:
        model = Inner()
        return model, torch.optim.AdamW(model.named_parameters())

    one, two = job(), job()
    with monitor.attach(one, {"store": str(tmp_path / "store"), "metrics": {"enabled": False}}) as ckpt:
        ckpt.resume()
        one[0](torch.arange(6)).square().mean().backward()
        one[1].step()
        ckpt.step()
    merge(tmp_path / "store", tmp_path / "out", target=Target("dcp"))
    state = dict(zip(("model", "optim"), get_state_dict(*two), strict=True))
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    set_state_dict(*two, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for left, right in zip(one[0].parameters(), two[0].parameters(), strict=True):
        assert left.equal(right)
        assert one[1].state[left]["exp_avg"].equal(two[1].state[right]["exp_avg"])
