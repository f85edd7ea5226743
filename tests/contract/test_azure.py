"""A job whose store is a container of Azure: saved, resumed, checked and pruned. Azurite is the server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import monitor
from store.catalog import open_catalog
from store.errors import StorageError
from store.location import files_at
from store.storage.atomic import write_new
from tests.support.azure import CONTAINER, Azurite

STORE = f"az://{CONTAINER}/runs/one"


@pytest.fixture(scope="module")
def azurite() -> Iterator[Azurite]:
    with Azurite() as azurite:
        yield azurite


@pytest.fixture(autouse=True)
def environment(azurite: Azurite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the drift traces go
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)


def trained(steps: int, store: str = STORE) -> tuple[int, list[torch.Tensor]]:
    """Train to so many steps from the newest commit. Return where that was, and the weights at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    retention = {"keep_last": 1, "log_spaced": False}
    settings = {"store": store, "every": 1, "metrics": {"enabled": False}, "retention": retention}
    with monitor.attach((model, optimizer), settings) as ckpt:
        first = ckpt.resume()
        for _ in range(first, steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            ckpt.step()
            ckpt.flush()
    return first, [parameter.detach().clone() for parameter in model.parameters()]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_job_resumes_from_a_container_as_if_it_had_not_ended() -> None:
    undisturbed = trained(6, f"az://{CONTAINER}/runs/other")
    assert trained(3)[0] == 0
    first, weights = trained(6)
    assert first == 3
    assert all(map(torch.equal, weights, undisturbed[1]))
    (newest, *older) = open_catalog(files_at(STORE)).saves()
    assert newest.step == 6 and len(older) <= 1  # pruned, but for the last that is proven
    assert command("verify", STORE).returncode == 0


def test_doctor_tries_a_container() -> None:
    done = command("doctor", f"az://{CONTAINER}/new", "--json")
    found = {one["check"]: one["state"] for one in json.loads(done.stdout)["findings"]}
    assert (found["bucket"], found["semantics"]) == ("ok", "ok"), done.stdout


def test_what_is_there_is_removed_although_something_is_not() -> None:
    files = files_at(f"az://{CONTAINER}/removed")
    for name in ("a", "b", "c"):
        write_new(files, name, b"data")
    files.unlink_all(["a", "never", "b", "c"])
    assert files.list_dir("") == []


def test_a_container_that_is_missing_is_named_with_what_to_do() -> None:
    with pytest.raises(StorageError, match="there is no such bucket: make it, or check its name"):
        write_new(files_at("az://missing/a"), "a", b"data")
