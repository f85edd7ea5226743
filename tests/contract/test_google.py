"""A job whose store is a bucket of Google's: killed within a commit, resumed, checked and pruned; and what is said
where something is missing. The server is our own, with credentials from its own metadata server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import monitor
from deploy.doctor.base import Plan
from deploy.doctor.bucket import check_bucket
from monitor.config.load import Config
from store.catalog import open_catalog
from store.errors import StorageError
from store.location import files_at
from store.storage.atomic import write_new
from store.storage.bucket import ObjectOptions
from store.storage.object_store import ObjectFiles
from tests.support.cli import ROOT, Here
from tests.support.faulty import Fault, Proxy
from tests.support.gcs import BUCKET, GoogleServer

STORE = f"gs://{BUCKET}/runs/one"
PART = 5 << 20


def trained(store: str) -> Iterator[tuple[int, str]]:
    """Train to step 5 from the newest commit; steps and losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 800), nn.Linear(800, 600), nn.Linear(600, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    retention = {"keep_last": 1, "log_spaced": False}
    settings = {"store": store, "every": 1, "metrics": {"enabled": False}, "retention": retention}
    with monitor.attach((model, optimizer), {**settings, "s3": {"part_mib": 5}}) as ckpt:
        for step in range(ckpt.resume(), 5):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            yield step, loss.item().hex()
            ckpt.step()
            ckpt.flush()


@pytest.fixture(scope="module")
def google() -> Iterator[GoogleServer]:
    with GoogleServer() as google:
        yield google


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(capsys, monkeypatch)


@pytest.fixture
def proxy(google: GoogleServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.chdir(tmp_path)  # where the drift traces go
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Proxy(google.port) as proxy:
        for name, value in {**google.environment, "GOOGLE_BASE_URL": f"http://127.0.0.1:{proxy.port}"}.items():
            monkeypatch.setenv(name, value)
        yield proxy


def test_a_killed_job_goes_on_as_if_it_had_not_been(proxy: Proxy, google: GoogleServer, here: Here) -> None:
    undisturbed = list(trained(f"gs://{BUCKET}/runs/other"))
    third = "manifests/00000003-"
    proxy.set(Fault("kill", lambda asked: asked.conditional and third in asked.path))
    program = "import sys; from tests.contract.test_google import trained; print(list(trained(sys.argv[1])))"
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.Popen([sys.executable, "-c", program, STORE], env={**os.environ, **threads})
    proxy.aim(killed.pid)
    assert killed.wait(180) == -9
    assert not any(third in name for name in google.objects("runs/one")), "killed before its commit"
    proxy.set(None)
    assert list(trained(STORE)) == undisturbed[2:]
    in_parts = [one for one in google.asked if one.startswith("POST uploadId runs/one/")]
    assert len(in_parts) >= 5, "payloads are larger than a part"
    (newest, *older) = open_catalog(files_at(STORE)).saves()
    assert newest.step == 5 and len(older) <= 1  # pruned, but for the last that is proven
    assert here("verify", STORE).code == 0


def test_doctor_tries_a_bucket(proxy: Proxy, google: GoogleServer, here: Here) -> None:
    answer = here("doctor", f"gs://{BUCKET}/new", "--json")
    states = {one["check"]: one["state"] for one in answer.json["findings"]}
    assert (states["bucket"], states["semantics"]) == ("ok", "ok"), answer
    assert google.objects("new") == {}
    proxy.set(Fault("unconditional", lambda _: True))
    files = files_at(f"gs://{BUCKET}/new")
    assert isinstance(files, ObjectFiles)
    found = {one.check: one for one in check_bucket(files, Plan(Config(), 10**6))}
    assert found["semantics"].state == "fail"
    assert "the condition of a put" in found["semantics"].seen
    assert google.objects("new") == {} and google.unfinished_uploads() == []


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
        ("GOOGLE_APPLICATION_CREDENTIALS", "/none.json", BUCKET, "must name the file of a service account"),
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
