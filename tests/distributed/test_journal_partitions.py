"""Records of the journal taken again by another partition, and steps gone back to under ZeRO and FSDP2.

What another partition takes again is the state of the very step before, and not called exact; its error has a bound.
So is what a merge takes again of a step that has no commit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from journal_partitions import error

from merger.io.blocks import BlockPass
from merger.sources.store import StoreSource
from merger.tensors import torch_dtype
from tests.support.launch import Launched, once, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EVERY, STEPS, BACK = 3, 5, 4
BOUND = 1e-6
"""Error of a state that another partition replayed, in units of the largest value of a tensor: last bits of float32."""


def zero(stage: int) -> dict[str, Any]:
    return {"kind": "zero", "stage": stage, "precision": "bf16"}


CHAINS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "DeepSpeed": [(2, zero(2)), (1, zero(3)), (2, zero(1))],
    "FSDP2": [(2, {"kind": "fsdp2"}), (3, {"kind": "fsdp2"}), (2, {"kind": "ddp"})],
}
"""Each link resumes the step before, trains past a save, and dies. The first one goes back before that."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Launched]]:
    """The launches of a chain, made when it is first asked for."""
    pytest.importorskip("deepspeed")

    @once
    def launch(chain: str) -> list[Launched]:
        directory, done = tmp_path_factory.mktemp(chain), []
        for number, (ranks, case) in enumerate(CHAINS[chain]):
            spec: dict[str, Any] = {"case": case, "seed": number, "every": EVERY, "steps": STEPS}
            spec |= {"back": BACK} if number == 0 else {}
            done.append(torchrun("journal_partitions.py", ranks, spec, directory))
            assert done[-1].code == 0, done[-1].output[-6000:]
            if number < 2:  # the last step of the third has a commit
                done[-1].records.append({"kind": "merged", **merged(directory, (number + 1) * STEPS)})
        return done

    return launch


def merged(directory: Path, step: int) -> dict[str, Any]:
    """How far what a merge reads of a step is from the state that the job left."""
    left, found = torch.load(directory / "state.pt", weights_only=True), dict[str, torch.Tensor]()
    checkpoint = StoreSource(directory / "store").checkpoint(step, set())
    for (fqn, slot), extents in checkpoint.index.names().items():
        parts = []
        for one in extents:
            values = b"".join(map(bytes, BlockPass(lambda _: None).pieces(one.block)))[one.offset :][: one.nbytes]
            parts.append(torch.frombuffer(bytearray(values), dtype=torch_dtype(one.dtype)))
        found[f"{fqn}/{slot}"] = torch.cat(parts)
    errors = [error(left[name], found[name]) if name in found else math.inf for name in left]
    return {"step": checkpoint.step, "exact": checkpoint.certificate.exact, "error": max(errors)}


@pytest.mark.parametrize("link", [1, 2])
@pytest.mark.parametrize("chain", CHAINS)
def test_what_another_partition_replays_is_not_called_exact(
    launched: Callable[[str], list[Launched]], chain: str, link: int
) -> None:
    resumed = launched(chain)[link].of("resumed")
    assert len(resumed) == CHAINS[chain][link][0]
    for one in resumed:
        assert (one["step"], one["exact"], one["sources"]) == (link * STEPS, False, ["journal"])
        assert any("another partition" in problem for problem in one["problems"])
        assert one["same_names"]
        assert one["error"] <= BOUND


@pytest.mark.parametrize("link", [0, 1])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_merge_takes_steps_again(launched: Callable[[str], list[Launched]], chain: str, link: int) -> None:
    found = launched(chain)[link].one("merged")
    assert (found["step"], found["exact"]) == ((link + 1) * STEPS, False)
    assert found["error"] <= BOUND


def test_steps_without_gradients_lead_to_the_same_state_on_fewer_ranks(tmp_path: Path) -> None:
    """Steps that the loss scaler skips: nothing of a record tells that each rank held another part."""
    pytest.importorskip("deepspeed")
    case = {**zero(3), "scale": 40}
    for number, ranks in enumerate((3, 1)):
        spec = {"case": case, "seed": number, "every": 2, "steps": 3}
        done = torchrun("journal_partitions.py", ranks, spec, tmp_path)
        assert done.code == 0, done.output[-6000:]
    one = done.one("resumed")
    assert (one["step"], one["error"], one["same_names"]) == (3, 0.0, True), done.output[-3000:]


@pytest.mark.parametrize("chain", CHAINS)
def test_a_job_of_ranks_goes_back_to_a_step(launched: Callable[[str], list[Launched]], chain: str) -> None:
    """And the link after it resumes the branch that began there."""
    back = launched(chain)[0].of("back")
    assert [(one["step"], one["exact"], one["differences"]) for one in back] == [(BACK, True, [])] * 2
