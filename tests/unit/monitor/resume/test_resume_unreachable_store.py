"""A bucket that does not answer says nothing of what it holds: a resume fails then, and goes back behind no commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor
from store.catalog import open_catalog
from store.errors import UnreachableError
from store.location import files_at
from store.resolve import newest_resumable
from store.storage.bucket import ObjectOptions
from store.verify import verify
from tests.support.faulty import Fault, Proxy
from tests.support.s3 import BUCKET, KEYS, Server
from tests.support.slow import others_slow

RETRY = 0.3


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with Server() as server, Proxy(server.port) as proxy:
        yield proxy


def attached(proxy: Proxy, folder: Path) -> tuple[monitor.Checkpointer, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    settings: dict[str, Any] = {
        "store": f"s3://{BUCKET}/{folder.name}",
        "s3": {"endpoint": f"http://127.0.0.1:{proxy.port}", "allow_http": True, "retry_seconds": RETRY},
        "every": 1,
        "policy": "full",
        "metrics": {"enabled": False},
        "trace": {"path": str(folder / "trace.jsonl")},
    }
    return monitor.attach((model, optimizer), settings), model, optimizer


@pytest.fixture
def saved(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The newer of a job's two commits."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    proxy.set(None)
    ckpt, model, optimizer = attached(proxy, tmp_path)
    with ckpt:
        for _ in range(ckpt.resume(), 2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            ckpt.step()
            ckpt.flush()
    return "00000002-000001"


@pytest.mark.parametrize(
    "of", others_slow(["manifests/{}.json", "segments/{}/rank-00000.json", "segments/{}/rank-00000.safetensors"])
)
def test_a_resume_fails_and_the_next_one_gets_the_newest(proxy: Proxy, saved: str, of: str, tmp_path: Path) -> None:
    silent = of.format(saved)
    ckpt, model, _ = attached(proxy, tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    proxy.set(Fault(503, lambda asked: asked.method == "GET" and asked.path.endswith(silent)))
    with ckpt, pytest.raises(UnreachableError, match="fewer requests"):
        ckpt.resume()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    proxy.set(None)
    again, _, _ = attached(proxy, tmp_path)
    with again:
        assert again.resume() == 2


@pytest.mark.slow
def test_nor_is_what_does_not_answer_called_damaged(proxy: Proxy, saved: str, tmp_path: Path) -> None:
    files = files_at(
        f"s3://{BUCKET}/{tmp_path.name}", ObjectOptions(f"http://127.0.0.1:{proxy.port}", retry_seconds=RETRY)
    )
    catalog = open_catalog(files)
    for silent in (f"{saved}.json", f"{saved}/rank-00000.json", f"{saved}/rank-00000.safetensors"):
        proxy.set(Fault(503, lambda asked, silent=silent: asked.method == "GET" and asked.path.endswith(silent)))  # type: ignore[misc]
        with pytest.raises(UnreachableError):
            verify(catalog)
    proxy.set(None)
    assert verify(catalog).ok
    assert newest_resumable(catalog)[0].manifest.save.name == saved
