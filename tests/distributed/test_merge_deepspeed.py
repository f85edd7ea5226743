"""Merging stores of real DeepSpeed runs: stock DeepSpeed loads the result, with nothing of ours, and goes on bitwise.

One launch trains and saves the cases, those of the core apart; the merges run here; a second launch, in which
driftpoint cannot be imported, loads what they wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.io.output_dir import CERTIFICATE
from merger.merge import MergeResult, merge
from tests.support.foreign import directory_differences
from tests.support.launch import ROOT, WORKERS, launcher, once, python
from tests.support.pt_trees import read

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RANKS = 2
CASES = (
    "zero0-fp32",
    "zero1-bf16",
    "zero1-fp32-round-robin",
    "zero1-bf16-fp32-accumulation",
    "zero2-bf16-round-robin",
    "zero2-bf16-aligned-round-robin",
    "zero2-fp32",
    "zero3-bf16-sub-groups",
    "zero3-fp32",
    "zero1-bf16-elastic",
    "zero2-fp16",
    "zero3-fp16",
    "zero3-bf16-offload",
)
OTHER_FORM = "zero1-bf16-elastic"
"""DeepSpeed writes such moments in another form and loads both: the rebuilt one has the usual form."""
COMPOSITES = ("zero1-bf16", "zero2-fp32", "zero3-bf16-sub-groups")
CORE = ("zero1-bf16", "zero2-fp32", "zero3-bf16-sub-groups")

Merged = Callable[[str], tuple[Path, dict[str, MergeResult]]]


def marked(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.core) if case in CORE else case for case in cases]


def launch(script: str, directory: Path, cases: Sequence[str], cwd: Path, path: str) -> None:
    """Run a worker under torchrun, with ``path`` as PYTHONPATH."""
    done = python([*launcher(RANKS), WORKERS / script, directory, *cases], cwd, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Merged:
    """A case's folder and the results by case, with what else is trained, merged and loaded in the same launches."""

    @once
    def together(core: bool) -> tuple[Path, dict[str, MergeResult]]:
        directory, cases = tmp_path_factory.mktemp("merges"), [case for case in CASES if (case in CORE) == core]
        launch("merge_train.py", directory, cases, ROOT, str(ROOT))
        results = {case: merge(directory / case / "store", directory / case / "merged") for case in cases}
        for case in set(cases) & set(COMPOSITES):
            results[f"{case}-composite"] = merge(directory / case / "composite", directory / case / "merged-composite")
        launch("merge_load.py", directory, cases, directory, "")
        return directory, results

    def of(case: str) -> tuple[Path, dict[str, MergeResult]]:
        directory, results = together(case in CORE)
        return directory / case, results

    return of


@pytest.mark.parametrize("case", marked(CASES))
def test_stock_deepspeed_continues_bitwise(merged: Merged, case: str) -> None:
    folder, _ = merged(case)
    for rank in range(RANKS):
        told = json.loads((folder / f"after-{rank}.json").read_text())
        assert told["losses"] == json.loads((folder / f"losses-{rank}.json").read_text())
    assert directory_differences(folder / "own-7", folder / "after-7") == []


@pytest.mark.parametrize("case", marked(case for case in CASES if case != OTHER_FORM))
def test_the_files_are_those_that_deepspeed_writes(merged: Merged, case: str) -> None:
    folder, _ = merged(case)
    assert directory_differences(folder / "own-4", folder / "merged") == []


@pytest.mark.parametrize("case", marked(CASES))
def test_the_rest_of_the_run_state_is_in_the_client_state(merged: Merged, case: str) -> None:
    for rank in range(RANKS):
        told = json.loads((merged(case)[0] / f"after-{rank}.json").read_text())
        assert told["save"] == "00000004-000001"
        assert (told["rank"], told["matrix"], told["rng"]) == (rank, [[0, 1, 2], [3, 4, 5]], "Tensor")


@pytest.mark.parametrize("case", marked(CASES))
def test_a_full_save_is_certified_exact(merged: Merged, case: str) -> None:
    result = merged(case)[1][case]
    certificate = json.loads((result.out / CERTIFICATE).read_text())
    assert (result.tag, result.problems, result.certificate.exact) == ("global_step4", (), True)
    assert (certificate["tag"], certificate["exact"], certificate["max_staleness"]) == ("global_step4", True, 0)
    assert result.bytes_written == sum(path.stat().st_size for path in result.out.rglob("*") if path.is_file())


@pytest.mark.parametrize("case", marked(COMPOSITES))
def test_each_tensor_is_of_the_version_that_the_certificate_names(merged: Merged, case: str) -> None:
    folder, results = merged(case)
    certificate = results[f"{case}-composite"].certificate
    expected, found = read(folder / "states.pt"), read(folder / "composite.pt")
    step_of = {(unit.layer, unit.slot): unit.step for unit in certificate.units}
    assert not certificate.exact and certificate.max_staleness == 2
    assert set(step_of.values()) == {2, 4}
    for fqn, slots in found.items():
        layer = ".".join(fqn.split(".")[:2]) if fqn.startswith("blocks.") else fqn.split(".")[0]
        for slot, tensor in slots.items():
            step = step_of[layer, slot]
            assert torch.equal(tensor, expected[step][fqn][slot]), (fqn, slot)
            assert not torch.equal(tensor, expected[6 - step][fqn][slot]), (fqn, slot)
