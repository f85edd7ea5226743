from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from deploy.cli.merge import kind_of, print_certificate, size_from
from merger.checkpoint import with_steps
from merger.layouts.huggingface import WeightsCertificate, WrittenDtype
from store.certificate import Certificate
from store.errors import UsageError
from tests.support.cli import Here, driftpoint, environment
from tests.support.plain_stores import PlainStore
from tests.support.stores import StoreBuilder, flip_byte

pytestmark = pytest.mark.slow

TRAIN = """
import sys
import torch
import monitor

torch.manual_seed(3)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
policy = {"name": "parity", "k": 2}
settings = {"store": sys.argv[1], "policy": policy, "every": 1, "metrics": {"enabled": False}}
with monitor.attach((model, optimizer), settings) as checkpointer:
    for step in range(checkpointer.resume(), 3):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        checkpointer.step()
        checkpointer.flush()
        torch.save(model.state_dict(), f"{sys.argv[2]}/model-{step + 1}.pt")
    checkpointer.close(save=False)  # as the policy leaves it
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a real run of three steps, each saved: ``store`` and the true model of each step."""
    place = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-c", TRAIN, str(place / "store"), str(place)]
    subprocess.run(command, check=True, env={**environment(), "OMP_NUM_THREADS": "1"}, timeout=900)
    return place


def test_rebuilds_a_commit_and_says_how_to_load_it(here: Here, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = here("merge", trained / "store", "--out", out, "--step", 1)
    assert answer.code == 0
    assert "exact" in answer.out
    lines = [line.strip() for line in answer.out.splitlines() if ".load_state_dict(" in line]
    assert len(lines) == 2
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    for line in lines:
        exec(line, {"model": model, "optimizer": optimizer, "torch": torch})
    truth = torch.load(trained / "model-1.pt")
    assert model.state_dict().keys() == truth.keys()
    assert all(torch.equal(value, truth[name]) for name, value in model.state_dict().items())


def test_a_composite_with_its_certificate(here: Here, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = here("merge", trained / "store", "--out", out, "--json")
    assert (answer.code, answer.err) == (0, "")
    found = answer.json
    assert (found["out"], found["framework"], found["problems"]) == (str(out), "torch", [])
    certificate = found["certificate"]
    assert (certificate["step"], certificate["exact"]) == (3, False)
    assert certificate["max_staleness"] == max(unit["staleness"] for unit in certificate["units"]) > 0
    shown = here("show", trained / "store", "--json").json["units"]
    sources = [unit.pop("source") for unit in certificate["units"]]
    assert set(sources) == {str(trained / "store")}
    assert certificate["units"] == [{key: unit[key] for key in unit if key != "reason"} for unit in shown]
    written = json.loads((out / "driftpoint-certificate.json").read_text())
    assert [unit.pop("source") for unit in written["units"]] == sources
    assert written["units"] == certificate["units"]
    assert [(one["name"], one["step"]) for one in found["sources"]] == [("source", 3)]
    assert found["parameters"] == 4 * (8 * 8 + 8)
    assert found["bytes_written"] == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def test_damage_is_worked_around_and_told(here: Here, trained: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(trained / "store", store)
    newest = max((store / "segments").iterdir())
    flip_byte(next(newest.glob("*.safetensors")), 2000)
    answer = here("merge", store, "--out", tmp_path / "out", "--json")
    assert answer.code == 0
    assert any(unit["fallback"] for unit in answer.json["certificate"]["units"])
    assert newest.name in " ".join(answer.json["problems"])
    text = here("merge", store, "--out", tmp_path / "again").out
    assert text.index("Problems") < text.index("Load it with:")


@pytest.mark.parametrize("command", ["merge", "import"])
def test_the_help_says_what_is_taken_without_a_step(here: Here, command: str) -> None:
    report = " ".join(here(command, "--help", columns=400).out.split())
    assert "Default:" in report and "`latest` of a DeepSpeed directory" in report


def test_what_is_there_is_not_written_over(here: Here, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    answer = here("merge", trained / "store", "--out", tmp_path)
    assert answer.code == 2
    assert str(tmp_path) in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_what_cannot_be_merged(here: Here, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert here("merge", tmp_path, "--out", out).code == 10
    assert here("merge", trained / "store", "--out", out, "--step", "7").code == 2
    missing = here("merge", trained / "store")
    assert missing.code == 2 and "missing option '--out'" in missing.err
    assert here("merge", "--out", out).code == 2
    assert here("merge", tmp_path / "nowhere", "--out", out).code == 10
    builder = StoreBuilder(tmp_path / "empty")
    assert here("merge", builder.root, "--out", out).code == 13
    assert not out.exists()


def test_in_a_process_of_its_own(trained: Path, tmp_path: Path) -> None:
    answer = driftpoint("merge", trained / "store", "--out", tmp_path / "out", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert answer.json["load"][0] == f"model.load_state_dict(torch.load({str(tmp_path / 'out' / 'model.pt')!r}))"


def test_what_libraries_print_does_not_spoil_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed logs to stdout when it is imported, which its layouts do."""
    pytest.importorskip("deepspeed")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # otherwise there is nothing that it logs
    store = PlainStore(tmp_path / "store", framework="deepspeed")
    store.save(10)
    for more in ((), ("--plan",)):
        answer = driftpoint("merge", store.root, "--out", tmp_path / "out", "--json", *more)
        assert answer.code == 1
        assert "layout facts of the DeepSpeed engine" in json.dumps(answer.json)
    assert "get_accelerator" in answer.err


def test_optimizer_steps_that_layers_did_not_have_are_in_the_table() -> None:
    def report(*steps: tuple[int, float, list[tuple[str, float]]]) -> str:
        text = io.StringIO()
        console = Console(file=text, width=80)
        certificate = with_steps(Certificate("s", "00000012-000001", 12, True, (), ()), steps)
        print_certificate(console, certificate, 10)
        console.print(kind_of(certificate))
        return text.getvalue()

    had = [*((f"layers.{i}", 8.0) for i in range(8)), ("head", 12.0)]
    table = report((0, 12.0, had), (1, 12.0, had[-1:]))
    (row,) = (line.split(maxsplit=2) for line in table.splitlines() if "layers.0" in line)
    assert row[:2] == ["0", "12"] and row[2].startswith("8: layers.0, layers.1")
    assert "and 2 more; 12: head" in " ".join(table.split())
    assert "composite" in table and "one optimizer step for layers that had different ones" in " ".join(table.split())
    assert "Optimizer step" not in report((1, 12.0, had[-1:])) and "exact" in report()


def test_exported_weights_are_called_what_they_are(here: Here, trained: Path, tmp_path: Path) -> None:
    given = ("merge", trained / "store", "--layout", "hf", "--step", 1)
    exact = here(*given, "--out", tmp_path / "exact")
    assert "exact" in exact.out and "exp_avg" not in exact.out and "rounded" not in exact.out
    half = here(*given, "--out", tmp_path / "half", "--dtype", "float16")
    assert "not exact: rounded to float16, drift up to 0" in half.out
    assert [line.split()[4] for line in half.out.splitlines() if line.split()[:1] == ["all"]] == ["?"]
    assert "weights held in float32 are written in float16" in " ".join(half.out.split())
    report = here(*given, "--out", tmp_path / "json", "--dtype", "float16", "--json").json["certificate"]
    assert (report["exact"], report["max_error"], report["written"][0]["working"]) == (False, None, False)
    planned = here(*given, "--dtype", "float16", "--plan", "--json").json["certificate"]
    assert planned == report
    whole = Certificate("s", "00000012-000001", 12, True, (), ())
    values = {one.name: getattr(whole, one.name) for one in fields(Certificate)}
    working = WeightsCertificate(**values, written=(WrittenDtype("float32", "bfloat16", True, ("norm",)),))
    assert kind_of(working).plain == "exact working weights (bfloat16), not the master weights"


RECIPE = """
sources: {one: {step: 1}, three: {step: 3}}
parity: [one, three]
run_state: three
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Even layers of step 1, odd ones of step 3, of whatever SOURCE is."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def test_a_recipe(here: Here, trained: Path, tmp_path: Path, recipe: Path) -> None:
    out = tmp_path / "out"
    answer = here("merge", trained / "store", "--recipe", recipe, "--out", out)
    assert (answer.code, answer.err) == (0, "")
    table = [line.split() for line in answer.out.splitlines()]
    assert ["0", "one"] in [row[:2] for row in table] and ["1", "three"] in [row[:2] for row in table]
    assert "composite: layers up to 2 steps old, drift up to ?" in answer.out
    assert "commit 00000001-000001 of" in answer.out
    rebuilt, first = torch.load(out / "model.pt"), torch.load(trained / "model-1.pt")
    for name, value in rebuilt.items():
        assert torch.equal(value, first[name]) == (name.partition(".")[0] in "02"), name


def test_a_plan_writes_nothing_and_says_all(here: Here, trained: Path, tmp_path: Path, recipe: Path) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    out = tmp_path / "out"
    given = ("merge", trained / "store", "--recipe", recipe, "--out", out)
    answer = here(*given, "--plan", "--workers", 3)
    assert (answer.code, answer.err) == (0, "")
    for part in ("Source", "Read", "File", "model.pt", "Memory", "with 3 workers", "free: enough", "Load it with:"):
        assert part in answer.out
    found = here(*given, "--plan", "--json").json
    assert (found["possible"], found["missing"], found["framework"], found["step"]) == (True, [], "torch", 3)
    assert {file["path"] for file in found["files"]} >= {"model.pt", "optimizer.pt", "driftpoint-certificate.json"}
    assert sum(source["bytes_to_read"] for source in found["sources"]) == found["bytes_to_read"] > 0
    assert found["memory_bytes"] > 0 and found["free_bytes"] > found["bytes_to_write"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    done = here(*given, "--json").json
    assert done["certificate"] == found["certificate"]
    assert done["load"] == found["load"]


def test_a_plan_without_a_place(here: Here, trained: Path) -> None:
    answer = here("merge", trained / "store", "--plan", "--json")
    assert (answer.code, answer.json["out"], answer.json["free_bytes"]) == (0, None, None)
    assert "Disk" not in here("merge", trained / "store", "--plan").out


def test_a_plan_lists_everything_that_is_missing(here: Here, trained: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"sources: {{a: {trained / 'store'}, b: {tmp_path / 'nowhere'}}}\n"
        'take: [{layers: "9", from: a}, {layers: "0-1", from: b}]\nrun_state: a\n'
    )
    answer = here("merge", "--recipe", recipe, "--out", tmp_path, "--plan", columns=400)
    assert (answer.code, answer.err) == (10, "")
    listed = answer.out[answer.out.index("Missing") :]
    for part in ("nowhere does not exist", "the model has no layer '9'", "no rule names 2.weight", "already exists"):
        assert part in listed
    found = here("merge", "--recipe", recipe, "--out", tmp_path, "--plan", "--json")
    assert (found.code, found.json["possible"], len(found.json["missing"])) == (10, False, 4)
    assert found.json["missing"][0]["type"] == "NoStoreError"
    error = here("merge", "--recipe", recipe, "--out", tmp_path / "out").err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_mistakes_in_what_was_typed(here: Here, trained: Path, tmp_path: Path, recipe: Path) -> None:
    store, out = trained / "store", tmp_path / "out"
    for given, report in (
        (("--layout", "gguf"), "layout 'gguf' is unknown; use one of native, deepspeed"),
        (("--zero-stage", "4"), "ZeRO stage 4 cannot be written"),
        (("--dtype", "int8"), "dtype 'int8' is not supported; use float32, bfloat16 or float16"),
        (("--shard-size", "big"), "'big' is not a size; write 5GB, 500MB or 4GiB"),
        (("--step", ">3"), "'>3' is not a bound on a step"),
        (("--step", "< 1"), "has no checkpoint at a step < 1; there are steps 3, 2, 1"),
        (("--recipe", recipe, "--step", "3"), "--step and --recipe are both given"),
        (("--recipe", tmp_path / "none.yaml"), "cannot read the recipe"),
        (("--files", tmp_path / "none"), "is not a directory"),
        (("--dtype", "float32"), "--dtype is for layout hf"),
        (("--layout", "hf", "--world-size", 2), "--world-size is for layouts deepspeed and trainer"),
    ):
        answer = here("merge", store, "--out", out, *given)
        assert answer.code == 2 and report in answer.err, answer.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "count"),
    [("5GB", 5 * 10**9), ("500 MB", 500 * 10**6), ("4GiB", 4 << 30), ("1.5k", 1500), ("123", 123), ("123B", 123)],
)
def test_sizes(text: str, count: int) -> None:
    assert size_from(text) == count


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-5GB", "5iB", "1e9"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        size_from(text)


def test_a_step_within_a_bound(here: Here, trained: Path, tmp_path: Path) -> None:
    found = here("merge", trained / "store", "--out", tmp_path / "out", "--step", "<= 2", "--json").json
    assert found["certificate"]["step"] == 2


def test_a_checkpoint_of_another_program_is_as_found_and_its_values_are_looked_at(here: Here, tmp_path: Path) -> None:
    """In the text, in JSON and by the code, of a merge, a plan and an import."""
    pytest.importorskip("deepspeed")
    from tests.support.deepspeed_stores import change_pt, deepspeed_files, optim_file

    root, text = deepspeed_files(tmp_path, 3, 2), "as found: nothing vouches for the origin of 9 tensors"
    answer = here("merge", root, "--out", tmp_path / "out", columns=400)
    assert answer.code == 0 and text in answer.out and "exact" not in answer.out
    planned = here("merge", root, "--plan", "--json").json
    certificate = planned["certificate"]
    assert (certificate["exact"], certificate["as_found"], certificate["unvouched"]) == (False, True, 9)
    moved = planned["bytes_to_read"] + 2 * planned["bytes_to_write"]
    assert planned["seconds"] == pytest.approx(moved / planned["assumed_bytes_per_second"])
    assert "Time" in here("merge", root, "--plan").out
    imported = here("import", root, "--store", tmp_path / "store", columns=400)
    assert imported.code == 0 and text in imported.out
    assert here("merge", tmp_path / "store", "--out", tmp_path / "back", "--json").json["certificate"]["as_found"]

    def spoil(tree: dict[str, Any]) -> None:
        tree["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["exp_avg"][0] = torch.nan

    change_pt(optim_file(root, 0), spoil)
    for command in (("merge", root, "--out"), ("import", root, "--store")):
        where = tmp_path / f"{command[0]}-nan"
        refused = here(*command, where, columns=400)
        assert refused.code == 1 and "layer one: NaN in exp_avg of one.weight" in refused.err
        allowed = here(*command, where, "--allow-nonfinite", columns=400)
        assert allowed.code == 0 and "layer one: NaN in exp_avg of one.weight" in allowed.out
        assert "not exact: 1 problem" in allowed.out and "as found" not in allowed.out
    back = here("merge", tmp_path / "import-nan", "--out", tmp_path / "nan-back", "--json").json
    assert back["problems"] == ["layer one: NaN in exp_avg when it was imported"]
    assert not back["certificate"]["as_found"] and not back["certificate"]["exact"]
