"""Where ranks hold different tensors, nothing of their state is lost or mixed up, and what differs is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from merger.merge import merge
from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASES = [
    "plain, then sharded stage", "sharded, then plain stage", "another optimizer in each stage",
    "tied stages under DDP", "extra state", "outside of a mesh", "unusual state", "strides for DTensors",
    "frozen: skip",
]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def launched(directory: Path) -> Launched:
    pytest.importorskip("deepspeed")
    done = torchrun("stages.py", 4, {}, directory)
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.mark.parametrize("case", CASES)
def test_all_comes_back_on_the_same_mesh_and_on_another(case: str, launched: Launched) -> None:
    found = [(one["step"], one["exact"], one["wrong"]) for one in launched.of("resumed", case=case)]
    assert len(found) >= 4
    assert found == [(2, True, [])] * len(found)


def test_shared_tensors_and_memory_order_of_every_stage(launched: Launched) -> None:
    found = launched.of("unusual")
    assert [one["one"] for one in found] == [True] * 4
    assert all(all(one["transposed"]) for one in found)


@pytest.mark.parametrize("encoding", ["compact", "careful"])
def test_a_lossy_encoding_gives_every_mesh_the_same_values(encoding: str, launched: Launched) -> None:
    found = launched.of("resumed", case=f"lossy {encoding}")
    assert [(one["exact"], one["wrong"]) for one in found] == [(False, [])] * 8


def test_each_rank_has_its_own_step_count(launched: Launched) -> None:
    for one in launched.of("experts"):
        assert one["steps"] == [1.0 if one["idle"] else 2.0] * 2
    assert [one["exact"] for one in launched.of("resumed", case="experts")] == [True] * 4
    assert [one["exact"] for one in launched.of("resumed", case="experts elsewhere")] == [False] * 4


def test_a_merge_of_different_step_counts_is_not_exact(directory: Path, launched: Launched, tmp_path: Path) -> None:
    del launched
    certificate = merge(directory / "experts", tmp_path / "out").certificate
    assert not certificate.exact and "experts.w/step" in certificate.problems[0]


def test_replicas_of_shards_that_differ_are_told(launched: Launched) -> None:
    for one in launched.of("replicas"):
        assert not one["exact"]
        assert any("head.weight" in problem for problem in one["problems"])


@pytest.mark.parametrize("stages", [2, 4])
def test_pipelines_of_deepspeed(stages: int, launched: Launched) -> None:
    found = [(one["step"], one["steps"], one["wrong"], one["same"]) for one in launched.of("pipeline", stages=stages)]
    assert len(found) == 4
    assert all(one[:1] + one[2:] == (2, [], True) for one in found)


def test_tensor_parallelism_of_deepspeed_is_refused_by_name(launched: Launched) -> None:
    for one in launched.of("refused", what="AutoTP"):
        assert "DeepSpeed is data parallel over 2 of 4 ranks" in one["text"]


def test_stages_keep_their_own_buffer_of_one_name(launched: Launched) -> None:
    assert [one["number"] for one in launched.of("tied")] == [[0, one["stage"]] for one in launched.of("tied")]
