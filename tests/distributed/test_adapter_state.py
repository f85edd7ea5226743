"""Adapters against the real frameworks: torchrun, gloo, DeepSpeed on the CPU.

One launch runs many checks and prints a line of JSON for each; a test here is one such line.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launch import ROOT, WORKERS, launcher, python

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TRIP = ("cover", "listed once", "load", "working", "losses", "end")
ZERO = (
    "zero1-bf16",
    "zero1-fp32-round-robin",
    "zero1-bf16-fp32-accumulation",
    "zero2-bf16-round-robin",
    "zero2-bf16-aligned",
    "zero2-fp32",
    "zero2-bf16-offload",
    "zero3-bf16-sub-groups",
    "zero3-bf16-none-persistent",
    "zero3-fp32-all-persistent",
    "zero3-bf16-offload",
)
THROUGH = ("zero2-zero3", "zero3-zero1", "zero2-zero0")
FSDP2 = (
    "sharded",
    "hybrid",
    "bf16",
    "offload",
    "gathered",
    "half-gathered",
    "checkpointed",
    "compiled",
    "mixed",
    "factored",
)
NOT_FSDP2 = (
    "partial",
    "cut otherwise",
    "on meta",
    "optimizer first",
    "one added",
    "fsdp1",
    "local state",
    "cut state",
    "renumbered stages",
    "stages of other shapes",
    "two groups of replicas",
)
Results = dict[tuple[str, str], list[str]]


def launch(script: str, ranks: int, *arguments: str, fresh: bool = False) -> Results:
    """Run a worker under torchrun; problems by (case, check)."""
    done = python([*launcher(ranks), WORKERS / script, *arguments], ROOT, fresh=fresh)
    assert done.returncode == 0, done.stderr[-6000:]
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {(line["case"], line["check"]): line["problems"] for line in lines}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def zero(directory: Path) -> Results:
    pytest.importorskip("deepspeed")
    return launch("adapter_zero.py", 2, str(directory))


@pytest.fixture(scope="module")
def reshard(zero: Results, directory: Path) -> Results:
    return launch("adapter_reshard.py", 3, str(directory))


@pytest.fixture(scope="module")
def ddp() -> Results:
    return launch("adapter_ddp.py", 2, fresh=True)  # one of its checks is that DeepSpeed is not imported


@pytest.fixture(scope="module")
def fsdp2() -> Results:
    return launch("adapter_fsdp2.py", 4)


@pytest.mark.parametrize("check", [*TRIP, "facts", "files"])
@pytest.mark.parametrize("case", ZERO)
def test_zero(zero: Results, case: str, check: str) -> None:
    assert zero[case, check] == []


@pytest.mark.parametrize("check", [*TRIP, "facts"])
def test_stage_0_in_fp32(zero: Results, check: str) -> None:
    assert zero["zero0-fp32", check] == []


@pytest.mark.parametrize("check", ["there", "loss", "back", "loss back"])
@pytest.mark.parametrize("case", THROUGH)
def test_through_another_stage_and_back(zero: Results, case: str, check: str) -> None:
    assert zero[case, check] == []


REFUSED = ["zero0-bf16", "no-optimizer", "joined-groups", "another-model", "non-contiguous"]


@pytest.mark.parametrize("case", [*REFUSED, "attribute-zero1-bf16", "attribute-zero3-fp32-all-persistent"])
def test_what_is_refused(zero: Results, case: str) -> None:
    assert zero[case, "refused"] == []


@pytest.mark.parametrize("case", ["flat-zero2", "flat-bf16-optimizer"])
def test_a_flat_tensor_in_other_memory_is_seen(zero: Results, case: str) -> None:
    assert zero[case, "refused"] == []


@pytest.mark.parametrize("case", ["zero3-bf16-sub-groups", "zero3-bf16-none-persistent"])
def test_the_dtype_of_a_parameter_is_that_of_its_slice(zero: Results, case: str) -> None:
    assert zero[case, "dtypes"] == []


@pytest.mark.parametrize("case", ["moment-zero2", "moment-zero3"])
def test_a_moment_that_was_not_kept_becomes_zero(zero: Results, case: str) -> None:
    assert zero[case, "zero"] == []


def test_another_gradient_accumulation(zero: Results) -> None:
    assert zero["accumulation", "counters"] == []


def test_state_of_the_loss_scaler(zero: Results) -> None:
    assert zero["loss-scaler", "state"] == []


@pytest.mark.parametrize("case", ["rollback-zero2", "rollback-zero3"])
def test_back_to_before_the_first_step(zero: Results, case: str) -> None:
    assert zero[case, "to the start"] == []


@pytest.mark.parametrize("check", ["cover", "state", "losses"])
@pytest.mark.parametrize("case", ["zero2-to-zero3", "zero2-to-zero1"])
def test_another_world_size_in_fresh_processes(reshard: Results, case: str, check: str) -> None:
    assert reshard[case, check] == []


def test_zero_to_ddp(reshard: Results) -> None:
    assert reshard["zero2-to-ddp", "state"] == []


@pytest.mark.parametrize("check", ["state", "counters", "losses"])
def test_ddp_to_zero(reshard: Results, check: str) -> None:
    assert reshard["ddp-to-zero3", check] == []


@pytest.mark.parametrize("check", [*TRIP, "shares", "names", "to the start", "no deepspeed"])
def test_ddp(ddp: Results, check: str) -> None:
    assert ddp["ddp", check] == []


@pytest.mark.parametrize("case", FSDP2)
def test_fsdp2(fsdp2: Results, case: str) -> None:
    assert {check: fsdp2[case, check] for check in TRIP} == {check: [] for check in TRIP}


@pytest.mark.parametrize("case", NOT_FSDP2)
def test_what_is_no_fsdp2_is_refused_by_name(fsdp2: Results, case: str) -> None:
    assert fsdp2[case, "refused"] == []


def test_fsdp2_shares_and_facts(fsdp2: Results) -> None:
    assert fsdp2["hybrid", "shares"] == fsdp2["hybrid", "facts"] == []


def test_dtensors_without_fully_shard(fsdp2: Results) -> None:
    assert fsdp2["dtensors", "cover"] == []


def test_what_accelerate_prepares_with_fsdp2(fsdp2: Results) -> None:
    assert fsdp2["accelerate", "cover"] == []
