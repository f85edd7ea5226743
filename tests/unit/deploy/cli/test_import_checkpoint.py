from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.exit_codes import OK
from store.catalog import open_or_create
from store.session import StoreLock, claim_epoch
from store.storage.local import LocalFiles
from tests.support.cli import Here, driftpoint, environment
from tests.support.plain_stores import PlainStore, digest_of, rebuilt, same
from tests.support.stores import flip_byte

pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path: Path) -> PlainStore:
    """A commit of step 10."""
    made = PlainStore(tmp_path / "source")
    made.save(10)
    return made


def test_the_other_commands_work_on_it(here: Here, source: PlainStore, tmp_path: Path) -> None:
    target = tmp_path / "target"
    answer = here("import", source.root, "--store", target)
    assert (answer.code, answer.err) == (OK, "")
    assert "00000010-000001" in answer.out and "exact" in answer.out
    assert answer.out.splitlines()[-1].strip() == f"store: {target}"
    assert here("verify", target, "--json").json["ok"]
    assert here("status", target, "--json").json["resume"]["exact"]
    assert here("show", target, "--json").json["policy"] == "import"
    assert here("merge", target, "--out", tmp_path / "out").code == OK
    assert same(rebuilt(tmp_path / "out"), source.expected(10))
    assert here("prune", target).code == OK
    assert here("status", target).code == OK


def test_json(here: Here, source: PlainStore, tmp_path: Path) -> None:
    answer = here("import", source.root, "--store", tmp_path / "target", "--json")
    assert (answer.code, answer.err) == (OK, "")
    found = answer.json
    certificate, written = found.pop("certificate"), found.pop("bytes_written")
    assert found == {
        "store": str(tmp_path / "target"),
        "save": "00000010-000001",
        "step": 10,
        "source": f"commit 00000010-000001 of {source.root}",
        "kind": "store",
        "framework": "torch",
        "layers": 6,
        "notes": [],
        "problems": [],
    }
    assert certificate["exact"] and certificate["step"] == 10
    assert written == sum(path.stat().st_size for path in (tmp_path / "target" / "segments").rglob("*.safetensors"))


def test_a_step(here: Here, source: PlainStore, tmp_path: Path) -> None:
    source.save(20)
    for number, step in enumerate((10, "00000010-000001")):
        assert (
            here("import", source.root, "--store", tmp_path / str(number), "--step", step, "--json").json["step"] == 10
        )
    assert here("import", source.root, "--store", tmp_path / "newest", "--json").json["step"] == 20
    answer = here("import", source.root, "--store", tmp_path / "none", "--step", 15)
    assert (answer.code, answer.out) == (1, "")
    assert "has no commit 15; the newest are: 00000020-000001, 00000010-000001" in answer.err
    assert not (tmp_path / "none").exists()


def test_what_is_refused_leaves_everything_as_it_was(here: Here, source: PlainStore, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert here("import", source.root, "--store", target).code == OK
    before = digest_of(target), digest_of(source.root)
    answer = here("import", source.root, "--store", target)
    assert (answer.code, answer.out) == (2, "")
    assert "already has the commit 00000010-000001" in answer.err and "--store" in answer.err
    answer = here("import", source.root, "--store", source.root / "inside")
    assert (answer.code, answer.out) == (2, "")
    assert (digest_of(target), digest_of(source.root)) == before
    source.save(20, layers=("norm",))
    answer = here("import", source.root, "--store", tmp_path / "composite")
    assert (answer.code, answer.out) == (2, "")
    assert "is a composite" in answer.err and "--step" in answer.err
    assert not (tmp_path / "composite").exists()


def test_a_store_in_use(here: Here, source: PlainStore, tmp_path: Path) -> None:
    catalog = open_or_create(LocalFiles(tmp_path / "target"))
    claim_epoch(catalog.files, catalog.store_id)
    lock = StoreLock(tmp_path / "target", 0)
    try:
        assert here("import", source.root, "--store", tmp_path / "target").code == 11
    finally:
        lock.release()
    assert here("import", source.root, "--store", tmp_path / "target").code == OK


def test_damage_in_the_checkpoint(here: Here, source: PlainStore, tmp_path: Path) -> None:
    flip_byte(next((source.root / "segments").rglob("rank-00000.safetensors")), 3000)
    answer = here("import", source.root, "--store", tmp_path / "target")
    assert (answer.code, answer.out) == (13, "")
    assert "do not match their checksum; there is no other copy in the source" in answer.err
    assert not (tmp_path / "target").exists()


def test_nothing_there(here: Here, tmp_path: Path) -> None:
    answer = here("import", tmp_path / "nowhere", "--store", tmp_path / "target")
    assert (answer.code, answer.out) == (10, "")
    assert not (tmp_path / "target").exists()
    open_or_create(LocalFiles(tmp_path / "empty"))
    assert here("import", tmp_path / "empty", "--store", tmp_path / "target").code == 13


def test_the_store_must_be_named(here: Here, source: PlainStore) -> None:
    answer = here("import", source.root)
    assert (answer.code, answer.out) == (2, "")
    assert "--store" in answer.err


RESUME = """
import json, sys
import torch
import monitor
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[2]))
losses = []
with monitor.attach((model, optimizer), {"store": sys.argv[1], "every": 3, "metrics": {"enabled": False}}) as ckpt:
    first = ckpt.resume()
    for step in range(first, first + 3):
        optimizer.zero_grad()
        loss = model(torch.nn.functional.dropout(torch.ones(4, 8))).square().mean()
        loss.backward()
        optimizer.step()
        ckpt.step()
        losses.append(loss.item())
print(json.dumps([first, losses]))
"""


def test_a_job_goes_on_from_it_as_from_its_own_store(tmp_path: Path) -> None:
    """Bitwise: weights, moments, rates and random states. The two stores hold the same from then on."""

    def job(store: Path, rate: float) -> list[object]:
        command = [sys.executable, "-c", RESUME, str(store), str(rate)]
        done = subprocess.run(
            command,
            check=True,
            env={**environment(), "OMP_NUM_THREADS": "1"},
            timeout=180,
            capture_output=True,
            text=True,
        )
        found: list[object] = json.loads(done.stdout)
        return found

    assert job(tmp_path / "own", 0.01)[0] == 0
    assert driftpoint("import", tmp_path / "own", "--store", tmp_path / "copy").code == OK
    going_on = job(tmp_path / "own", 0.5)
    assert going_on[0] == 3
    assert job(tmp_path / "copy", 0.7) == going_on
    assert driftpoint("verify", tmp_path / "copy").code == OK
