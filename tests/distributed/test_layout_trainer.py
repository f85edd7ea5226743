"""The trainer and hf layouts: a stock Trainer resumes from the one, stock transformers loads the other.

One launch trains and saves every case; the merges run here; the launches after it cannot import driftpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from merger.layouts.base import Target
from merger.merge import MergeResult, merge
from tests.support.launch import ROOT, WORKERS, launcher, python

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]

CASES = ("zero2-bf16", "zero3-bf16", "ddp-fp32")
DEEPSPEED = ("zero2-bf16", "zero3-bf16")
RANKS, SAVED, LATER, LAST, ACCUMULATION = 2, 4, 5, 7, 2
TWICE: dict[str, set[str]] = {"zero2-bf16": {"lm_head.weight"}, "ddp-fp32": set()}
"""Tied weights that the Trainer writes under both names: DeepSpeed gives it copies."""

LATER_FILES = ["zero2-bf16-later", "ddp-fp32-later"]
SHARDED = {"shard_bytes": 9000}


def launch(command: list[str], script: str, *arguments: str, path: str, directory: Path) -> None:
    """Run a worker, with ``path`` as PYTHONPATH."""
    done = python([*command, WORKERS / script, *arguments], directory, PYTHONPATH=path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-6000:]


def resumes(directory: Path) -> tuple[dict[str, MergeResult], list[dict[str, Any]], list[dict[str, Any]]]:
    """Merge everything; what two ranks resume from, and what one does."""
    results: dict[str, MergeResult] = {}
    two: list[dict[str, Any]] = []

    def merged(case: str, name: str, source: str, step: int | None, **target: Any) -> dict[str, Any]:
        files = None if step is None else directory / case / "run" / f"checkpoint-{step}"
        out = f"{case}-{name}"
        results[out] = merge(
            directory / case / source, directory / out, target=Target("trainer", files=files, **target)
        )
        return {"case": case, "folder": f"{out}/{results[out].tag}", "out": f"resumed-{out}", "micro": 2}

    for case in CASES:
        two.append(merged(case, "same", "store", SAVED))
        two.append(merged(case, "composite", "composite", LATER))
    # From the Trainer's own folder, which has all that is needed beside the state.
    two += [merged(case, "foreign", f"run/checkpoint-{SAVED}", None) for case in DEEPSPEED]
    two += [merged(case, "later", "store", LAST - 1) for case in ("zero2-bf16", "ddp-fp32")]
    other = merged("zero3-bf16", "relaid", "store", SAVED, zero_stage=1, world_size=1)
    return results, two, [{**other, "case": "zero1-bf16", "micro": 4}]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, MergeResult]]:
    """Everything trained, merged, resumed and loaded; results by output."""
    directory = tmp_path_factory.mktemp("trainer")
    launch(launcher(RANKS), "layout_hf_train.py", str(directory), path=str(ROOT), directory=directory)
    results, two, one = resumes(directory)
    for case in CASES:
        files = directory / case / "run" / f"checkpoint-{SAVED}"
        for name, target in (("hf", {}), ("sharded", SHARDED), ("wide", {"dtype": "F32"})):
            results[f"{case}-{name}"] = merge(
                directory / case / "store",
                directory / f"{case}-{name}",
                target=Target("hf", files=files, **target),  # type: ignore[arg-type]
            )
        if case in DEEPSPEED:
            out = directory / f"{case}-hf-foreign"
            results[out.name] = merge(files, out, target=Target("hf"))
    for count, specs in ((RANKS, two), (1, one)):
        launch(launcher(count), "layout_hf_resume.py", str(directory), json.dumps(specs), path="", directory=directory)
    folders = [str(directory / f"{case}-{name}") for case in CASES for name in ("hf", "sharded")]
    folders += [str(directory / f"{case}-hf-foreign") for case in DEEPSPEED]
    launch([], "layout_hf_load.py", *folders, path="", directory=directory)
    return directory, results


def resumed(directory: Path, out: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"resumed-{out}-{rank}.json").read_text())
    return found


def uninterrupted(directory: Path, case: str, step: int, rank: int) -> list[str]:
    """Losses of the micro-batches after a step."""
    found: list[str] = json.loads((directory / case / f"losses-{rank}.json").read_text())
    return found[ACCUMULATION * step :]


def log_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{k: entry[k] for k in ("step", "learning_rate", "epoch")} for entry in state["log"] if "loss" in entry]


@pytest.mark.parametrize(
    "out", [f"{case}-same" for case in CASES] + [f"{case}-foreign" for case in DEEPSPEED] + LATER_FILES
)
def test_a_stock_trainer_goes_on_bitwise(built: tuple[Path, Mapping[str, MergeResult]], out: str) -> None:
    directory, results = built
    case = out.rpartition("-")[0]
    for rank in range(RANKS):
        losses = resumed(directory, out, rank)["losses"]
        assert losses == uninterrupted(directory, case, SAVED, rank)
        assert len(losses) == ACCUMULATION * (LAST - SAVED)
    whole = json.loads((directory / case / "run" / f"checkpoint-{LAST}" / "trainer_state.json").read_text())
    assert log_of(resumed(directory, out)) == log_of({"log": whole["log_history"]})
    assert torch.equal(torch.load(directory / f"resumed-{out}-logits.pt"), torch.load(directory / case / "logits.pt"))
    certificate = results[out].certificate
    assert results[out].tag == f"checkpoint-{SAVED}"
    assert certificate.as_found if out.endswith("foreign") else certificate.exact


@pytest.mark.parametrize("out", [f"{case}-same" for case in CASES] + [f"{case}-foreign" for case in DEEPSPEED])
def test_the_folder_has_what_the_trainers_own_has(built: tuple[Path, Mapping[str, MergeResult]], out: str) -> None:
    directory, results = built
    case = out.rpartition("-")[0]
    own, ours = directory / case / "run" / f"checkpoint-{SAVED}", results[out].out / f"checkpoint-{SAVED}"
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in own.iterdir())
    for name in ("trainer_state.json", "training_args.bin", "config.json", "generation_config.json"):
        assert (ours / name).read_bytes() == (own / name).read_bytes()
    if case != "zero3-bf16":
        assert (ours / "scheduler.pt").read_bytes() == (own / "scheduler.pt").read_bytes()
        one, other = load_file(ours / "model.safetensors"), load_file(own / "model.safetensors")
        assert one.keys() == other.keys() - TWICE[case] and all(torch.equal(one[name], other[name]) for name in one)
    for rank in range(RANKS):
        one, other = (torch.load(at / f"rng_state_{rank}.pth", weights_only=False) for at in (ours, own))
        assert one.keys() == other.keys() and one["python"] == other["python"]
        assert torch.equal(one["cpu"], other["cpu"])
        assert [type(part) for part in one["numpy"]] == [type(part) for part in other["numpy"]]
        assert (one["numpy"][1] == other["numpy"][1]).all() and one["numpy"][2:] == other["numpy"][2:]


def test_a_trainers_state_of_a_later_step_is_taken_back(built: tuple[Path, Mapping[str, MergeResult]]) -> None:
    directory, results = built
    folder = results["zero2-bf16-later"].out / f"checkpoint-{SAVED}"
    state = json.loads((folder / "trainer_state.json").read_text())
    own = json.loads((directory / "zero2-bf16" / "run" / f"checkpoint-{SAVED}" / "trainer_state.json").read_text())
    assert state["log_history"] == own["log_history"]
    assert (state["global_step"], state["epoch"]) == (SAVED, pytest.approx(own["epoch"]))
    ours, stock = (
        torch.load(at / "scheduler.pt", weights_only=True)
        for at in (folder, directory / "zero2-bf16" / "run" / f"checkpoint-{SAVED}")
    )
    assert ours == stock
    assert any("scheduler.pt is that of step 6" in note for note in results["zero2-bf16-later"].notes)


@pytest.mark.parametrize("case", CASES)
def test_a_composite_is_resumed(built: tuple[Path, Mapping[str, MergeResult]], case: str) -> None:
    directory, results = built
    result = results[f"{case}-composite"]
    found = resumed(directory, f"{case}-composite")
    assert not result.certificate.exact and result.certificate.max_staleness == LATER - 2
    # The weights are those of the uninterrupted run, the moments are older: the first loss is the run's, not the last.
    expected = uninterrupted(directory, case, LATER, 0)
    assert found["losses"][:ACCUMULATION] == expected[:ACCUMULATION]
    assert found["losses"] != expected and len(found["losses"]) == len(expected)
    assert found["step"] == LAST


def test_another_stage_and_world_size(built: tuple[Path, Mapping[str, MergeResult]]) -> None:
    directory, results = built
    found = resumed(directory, "zero3-bf16-relaid")
    assert found["step"] == LAST
    logits = torch.load(directory / "resumed-zero3-bf16-relaid-logits.pt")
    assert torch.equal(logits, torch.load(directory / "zero3-bf16" / "logits.pt"))
    assert log_of(found) == log_of(resumed(directory, "zero3-bf16-same"))
    result = results["zero3-bf16-relaid"]
    assert not list(result.out.rglob("rng_state*"))
    assert any("no random-number states of this step for 1 rank" in note for note in result.notes)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (case, name)
        for case in CASES
        for name in ("hf", "sharded", "hf-foreign")
        if case in DEEPSPEED or name != "hf-foreign"
    ],
)
def test_stock_transformers_loads_it_bitwise(
    built: tuple[Path, Mapping[str, MergeResult]], case: str, name: str
) -> None:
    directory, results = built
    expected, found = (
        torch.load(directory / case / "logits.pt"),
        torch.load(f"{results[f'{case}-{name}'].out}-logits.pt"),
    )
    assert found.dtype == expected.dtype and torch.equal(found, expected)
    shards = sorted(path.name for path in results[f"{case}-{name}"].out.glob("*.safetensors"))
    assert (shards == ["model.safetensors"]) == (name != "sharded")
    told = [note.split(",")[0] for note in results[f"{case}-{name}"].notes]
    assert told == (["these are the working weights"] if "bf16" in case else [])


def test_the_weights_file_is_as_transformers_writes_it(built: tuple[Path, Mapping[str, MergeResult]]) -> None:
    directory, results = built
    for case in ("zero2-bf16", "ddp-fp32"):
        own = directory / case / "run" / f"checkpoint-{SAVED}" / "model.safetensors"
        ours = results[f"{case}-hf"].out / "model.safetensors"
        with safe_open(own, "pt") as one, safe_open(ours, "pt") as other:
            assert one.metadata() == other.metadata() == {"format": "pt"}
            assert set(one.keys()) - TWICE[case] == set(other.keys())
            assert all(torch.equal(one.get_tensor(name), other.get_tensor(name)) for name in set(other.keys()))


@pytest.mark.parametrize("case", CASES)
def test_another_dtype_is_told_in_the_configuration(built: tuple[Path, Mapping[str, MergeResult]], case: str) -> None:
    _, results = built
    wide, narrow = (load_file(results[f"{case}-{name}"].out / "model.safetensors") for name in ("wide", "hf"))
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    assert wide.keys() == narrow.keys()
    assert all(torch.equal(wide[name].to(narrow[name].dtype), narrow[name]) for name in wide)
    assert json.loads((results[f"{case}-wide"].out / "config.json").read_text())["dtype"] == "float32"
