"""A checkpoint that stock DeepSpeed wrote, imported into a store: a live job resumes from it, to the last bit, at any
stage and world size; and merged back it is the checkpoint that it was.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.exit_codes import OK
from merger.import_checkpoint import import_checkpoint, plan_import
from merger.merge import merge
from store.catalog import open_catalog
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.cli import driftpoint
from tests.support.foreign import directory_differences, run
from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SOURCES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero2": (2, {"stage": 2, "precision": "bf16", "zero": {"round_robin_gradients": True}}),
    "zero3": (2, {"stage": 3, "precision": "bf16", "zero": {"sub_group_size": 900}}),
    "zero1-fp32": (3, {"stage": 1, "precision": "fp32"}),
}
RESUMES = [
    (source, ranks, stage)
    for source, targets in {
        "zero2": ((2, 2), (1, 3), (3, 1)),
        "zero3": ((2, 3), (1, 1), (3, 3)),
        "zero1-fp32": ((3, 1), (2, 3)),
    }.items()
    for ranks, stage in targets
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By source: (its directory, with ``saved``, ``state.pt`` and ``store``; what the launch told)."""
    pytest.importorskip("deepspeed")
    done: dict[str, tuple[Path, Launched]] = {}

    def made(name: str) -> tuple[Path, Launched]:
        if name not in done:
            directory = tmp_path_factory.mktemp(name)
            ranks, spec = SOURCES[name]
            launched = torchrun("import_run.py", ranks, {**spec, "role": "save", "seed": 1}, directory)
            assert launched.code == 0, launched.output[-6000:]
            import_checkpoint(plan_import(directory / "saved"), directory / "store")
            done[name] = directory, launched
        return done[name]

    return made


@pytest.mark.parametrize(("source", "ranks", "stage"), RESUMES)
def test_a_live_job_resumes_from_it(saved: Any, tmp_path: Path, source: str, ranks: int, stage: int) -> None:
    directory, launched = saved(source)
    shutil.copytree(directory / "store", tmp_path / "store")
    before, spec = SOURCES[source]
    same = (ranks, stage) == (before, spec["stage"])
    given = {
        **(spec if same else {"precision": spec["precision"]}),
        "stage": stage,
        "role": "resume",
        "seed": 7,
        "store": str(tmp_path / "store"),
        "state": str(directory / "state.pt"),
        "objects": not same,
    }
    resumed = torchrun("import_run.py", ranks, given, tmp_path)
    assert resumed.code == 0, resumed.output[-6000:]
    told = resumed.of("resumed")
    assert len(told) == ranks
    for one in told:
        assert (one["step"], one["global_steps"], one["as_found"]) == (3, 3, True)
        assert one["differences"] == []
        assert one["unlike_fresh"] > 10
        assert one["rng_kept"]
    assert "the commit has no random states" in resumed.output
    assert ("no state for the 1 objects in state=: they keep their initial state" in resumed.output) == (not same)
    if same:
        expected = {one["rank"]: one["losses"] for one in launched.of("saved")}
        assert {one["rank"]: one["losses"] for one in resumed.of("continued")} == expected
    saves = open_catalog(LocalFiles(tmp_path / "store")).saves()
    assert [save.name for save in saves][:1] == ["00000006-000002"]
    assert verify(open_catalog(LocalFiles(tmp_path / "store"))).ok


@pytest.mark.parametrize("source", SOURCES)
def test_merged_back_it_is_what_deepspeed_wrote(saved: Any, tmp_path: Path, source: str) -> None:
    directory, _ = saved(source)
    result = merge(directory / "store", tmp_path / "merged")
    assert result.certificate.as_found and result.tag == "global_step3"
    assert directory_differences(directory / "saved", result.out) == []


@pytest.mark.parametrize("source", ["zero3"])
def test_the_commands_work_on_it(saved: Any, tmp_path: Path, source: str) -> None:
    directory, _ = saved(source)
    answer = driftpoint("import", directory / "saved", "--store", tmp_path / "store", "--json")
    assert answer.code == OK, answer.err
    found = answer.json
    assert (found["save"], found["kind"], found["framework"]) == ("00000003-000001", "deepspeed", "deepspeed")
    assert found["certificate"]["as_found"] and found["problems"] == []
    assert any("no random states" in note for note in found["notes"])
    for command in ("verify", "show", "status"):
        assert driftpoint(command, tmp_path / "store").code == OK
    assert driftpoint("merge", tmp_path / "store", "--out", tmp_path / "out").code == OK


def test_a_universal_checkpoint(saved: Any, tmp_path: Path) -> None:
    directory, _ = saved("zero3")
    command = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(directory / "saved" / "global_step3"), "--num_extract_workers", "1"]
    run([*command, "--output_folder", str(tmp_path / "universal"), "--num_merge_workers", "1"], tmp_path)
    import_checkpoint(plan_import(tmp_path / "universal"), tmp_path / "store")
    paths = {"store": str(tmp_path / "store"), "state": str(directory / "state.pt")}
    spec = {"role": "resume", "seed": 7, "stage": 2, "precision": "bf16", "objects": False}
    resumed = torchrun("import_run.py", 2, {**spec, **paths}, tmp_path)
    assert resumed.code == 0, resumed.output[-6000:]
    for one in resumed.of("resumed"):
        assert (one["step"], one["global_steps"], one["differences"]) == (3, 3, [])


def test_a_folder_of_the_trainer(saved: Any, tmp_path: Path) -> None:
    """The files that the Trainer puts beside the state stay where they are, and are told of."""
    directory, _ = saved("zero2")
    folder = tmp_path / "output" / "checkpoint-3"
    shutil.copytree(directory / "saved", folder)
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    plan = plan_import(tmp_path / "output")
    assert (plan.kind, plan.checkpoint.step) == ("trainer", 3)
    assert any(f"configuration and tokenizer stay in {folder}" in note for note in plan.notes)
    import_checkpoint(plan, tmp_path / "store")
    assert directory_differences(directory / "saved", merge(tmp_path / "store", tmp_path / "merged").out) == []


def test_what_a_merge_of_ours_kept_for_every_rank_comes_back(saved: Any, tmp_path: Path) -> None:
    """A job of ours, merged to DeepSpeed's files, imported again: random states and objects are there once more."""
    directory, _ = saved("zero2")
    shutil.copytree(directory / "store", tmp_path / "store")
    spec = {**SOURCES["zero2"][1], "role": "resume", "seed": 7, "objects": True}
    paths = {"store": str(tmp_path / "store"), "state": str(directory / "state.pt")}
    first = torchrun("import_run.py", 2, {**spec, **paths}, tmp_path)
    assert first.code == 0, first.output[-6000:]
    merge(tmp_path / "store", tmp_path / "merged")
    plan = plan_import(tmp_path / "merged")
    assert not any("random" in note for note in plan.notes)
    import_checkpoint(plan, tmp_path / "again")
    spec["precision"] = "bf16"
    again = torchrun("import_run.py", 2, {**spec, **paths, "store": str(tmp_path / "again")}, tmp_path)
    assert again.code == 0, again.output[-6000:]
    assert {one["step"] for one in again.of("resumed")} == {6}
    assert not any(one["rng_kept"] for one in again.of("resumed"))
    assert "afresh" not in again.output
