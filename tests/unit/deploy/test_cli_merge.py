from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.cli import Here, driftpoint, environment
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
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a real run of three steps, each saved: ``store`` and the true model of each step."""
    place = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-c", TRAIN, str(place / "store"), str(place)]
    subprocess.run(command, check=True, env={**environment(), "OMP_NUM_THREADS": "1"}, timeout=300)
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
    assert certificate["units"] == [{key: unit[key] for key in unit if key != "reason"} for unit in shown]
    written = json.loads((out / "driftpoint-certificate.json").read_text())
    assert written["units"] == certificate["units"]
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
    assert here("merge", trained / "store").code == 2
    builder = StoreBuilder(tmp_path / "empty")
    assert here("merge", builder.root, "--out", out).code == 13
    assert not out.exists()


def test_in_a_process_of_its_own(trained: Path, tmp_path: Path) -> None:
    answer = driftpoint("merge", trained / "store", "--out", tmp_path / "out", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert answer.json["load"][0] == f"model.load_state_dict(torch.load({str(tmp_path / 'out' / 'model.pt')!r}))"
