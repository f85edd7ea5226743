"""A job whose store is a bucket of Google's: killed within a commit, resumed, checked and pruned; and what is said where
something is missing. The server is our own, with credentials from its own metadata server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.catalog import open_catalog
from store.errors import StorageError, UnsupportedError
from store.location import files_at
from store.storage.atomic import write_new
from store.storage.bucket import ObjectOptions
from tests.support.cli import ROOT
from tests.support.faulty import Fault, Proxy
from tests.support.gcs import BUCKET, GoogleServer

STORE = f"gs://{BUCKET}/runs/one"
PART = 5 << 20

TRAIN = """
import sys
import torch
from torch import nn
import monitor

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 800), nn.Linear(800, 600), nn.Linear(600, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
settings = {"store": sys.argv[1], "every": 1, "metrics": {"enabled": False}, "s3": {"part_mib": 5}}
settings["retention"] = {"keep_last": 1, "log_spaced": False}
with monitor.attach((model, optimizer), settings) as ckpt:
    first = ckpt.resume()
    print("began", first, flush=True)
    for step in range(first, 5):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        print(step, loss.item().hex(), flush=True)
        ckpt.step()
        ckpt.flush()
"""


@pytest.fixture(scope="module")
def google() -> Iterator[GoogleServer]:
    with GoogleServer() as google:
        yield google


@pytest.fixture
def proxy(google: GoogleServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.chdir(tmp_path)  # where the drift traces go
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Proxy(google.port) as proxy:
        for name, value in {**google.environment, "GOOGLE_BASE_URL": f"http://127.0.0.1:{proxy.port}"}.items():
            monkeypatch.setenv(name, value)
        yield proxy


def python(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=180)
    return out.splitlines()


def test_a_killed_job_goes_on_as_if_it_had_not_been(proxy: Proxy, google: GoogleServer) -> None:
    undisturbed = said(python("-c", TRAIN, f"gs://{BUCKET}/runs/other"))
    assert undisturbed[0] == "began 0" and len(undisturbed) == 6
    third = "manifests/00000003-"
    proxy.set(Fault("kill", lambda asked: asked.conditional and third in asked.path, after=False))
    killed = python("-c", TRAIN, STORE)
    proxy.aim(killed.pid)
    assert said(killed) == undisturbed[:4]
    assert killed.returncode == -9
    assert not any(third in name for name in google.objects("runs/one"))
    proxy.set(None)
    assert said(python("-c", TRAIN, STORE)) == ["began 2", *undisturbed[3:]]
    in_parts = [one for one in google.asked if one.startswith("POST uploadId runs/one/")]
    assert len(in_parts) >= 5, "payloads are larger than a part"
    (newest, *older) = open_catalog(files_at(STORE)).saves()
    assert newest.step == 5 and len(older) <= 1  # pruned, but for the last that is proven
    verify = python("-m", "deploy.cli", "verify", STORE)
    said(verify)
    assert verify.returncode == 0


def test_doctor_tries_a_bucket(proxy: Proxy, google: GoogleServer) -> None:
    proxy.set(None)
    found = json.loads("\n".join(said(python("-m", "deploy.cli", "doctor", f"gs://{BUCKET}/new", "--json"))))
    states = {one["check"]: one["state"] for one in found["findings"]}
    assert (states["bucket"], states["semantics"]) == ("ok", "ok"), found
    assert google.objects("new") == {}
    proxy.set(Fault("unconditional", lambda _: True))
    found = json.loads("\n".join(said(python("-m", "deploy.cli", "doctor", f"gs://{BUCKET}/new", "--json"))))
    (semantics,) = (one for one in found["findings"] if one["check"] == "semantics")
    assert semantics["state"] == "fail" and "condition of a put" in semantics["seen"], semantics
    with pytest.raises(UnsupportedError, match="ignores the condition of a put"):
        files_at(f"gs://{BUCKET}/new").require_conditional_puts()  # type: ignore[attr-defined]


@pytest.mark.parametrize("patched", [False, True])
def test_an_upload_whose_beginning_gets_no_answer_is_begun_again(proxy: Proxy, patched: bool) -> None:
    """obstore repeats that request for S3, and not for Google."""
    data = bytes(PART + 1)
    proxy.set(Fault("hang", lambda one: one.query.startswith("uploads") and not proxy.struck, after=True, seconds=1.0))
    files = files_at(f"gs://{BUCKET}/patched-{patched}", ObjectOptions(request_seconds=0.5, part_mib=5))
    write_new(files, "a", lambda file: file.write(data), patched=patched, most=len(data))
    assert proxy.struck == 1
    assert files.read("a", len(data)) == data


def test_what_is_there_is_removed_although_something_is_not(proxy: Proxy) -> None:
    proxy.set(None)
    files = files_at(f"gs://{BUCKET}/removed")
    for name in ("a", "b", "c"):
        write_new(files, name, b"data")
    files.unlink_all(["a", "never", "b", "c"])
    assert files.list_dir("") == []


@pytest.mark.parametrize(
    ("variable", "value", "bucket", "said"),
    [
        ("GOOGLE_BASE_URL", None, "missing", "there is no such bucket: make it, or check its name"),
        ("GOOGLE_BEARER_TOKEN", "expired", BUCKET, "check the credentials .*GOOGLE_APPLICATION_CREDENTIALS"),
        ("GCE_METADATA_HOST", "127.0.0.1:9", BUCKET, "there are no credentials.*GOOGLE_APPLICATION_CREDENTIALS"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/none.json", BUCKET, "GOOGLE_APPLICATION_CREDENTIALS names no file"),
        ("GOOGLE_ALLOW_HTTP", "false", BUCKET, "the endpoint is not https"),
        ("GOOGLE_BASE_URL", "http://127.0.0.1:9", BUCKET, "cannot be reached.*GOOGLE_BASE_URL"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(
    proxy: Proxy, variable: str, value: str | None, bucket: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv(variable, value)
    with pytest.raises(StorageError, match=said):
        write_new(files_at(f"gs://{bucket}/a", ObjectOptions(retry_seconds=0.5)), "a", b"data")
