"""``driftpoint doctor`` at a bucket: what it says of a real server, and of one that lacks something; nothing stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.doctor.base import Finding, Plan, clock
from deploy.doctor.bucket import check_bucket
from monitor.config.load import Config
from store.location import ObjectUrl, place_of
from store.storage.bucket import Bucket, ObjectOptions
from store.storage.object_store import ObjectFiles
from tests.support.cli import Here
from tests.support.faulty import Asked, Fault, Proxy
from tests.support.s3 import BUCKET, KEYS, Server
from tests.support.stores import StoreBuilder

URL = f"s3://{BUCKET}/doctor"
PLAN = Plan(Config(), 10**6)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Before an empty prefix."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    server.put("doctor", {})
    with Proxy(server.port) as proxy:
        yield proxy


def found(proxy: Proxy, fault: Fault | None = None) -> dict[str, Finding]:
    url = place_of(URL)
    assert isinstance(url, ObjectUrl)
    options = ObjectOptions(f"http://127.0.0.1:{proxy.port}", retry_seconds=1.0, part_mib=5)
    proxy.set(fault)
    return {one.check: one for one in check_bucket(ObjectFiles(url, Bucket(url.bucket, options), url.prefix), PLAN)}


@pytest.mark.slow
def test_the_whole_command_leaves_a_store_as_it_was(
    here: Here, proxy: Proxy, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    builder = StoreBuilder(tmp_path / "store")
    builder.save(10)
    server.put("doctor", {str(p.relative_to(builder.root)): p.read_bytes() for p in builder.root.rglob("*.*")})
    before = server.objects("doctor")
    (tmp_path / "driftpoint.yaml").write_text(f"store: {URL}\ns3: {{endpoint: 'http://127.0.0.1:{proxy.port}'}}\n")
    answer = here("doctor", "--json")
    assert answer.code == 0, answer.out
    findings = {one["check"]: one for one in answer.json["findings"]}
    assert answer.json["store"] == URL
    for check in ("bucket", "clock", "semantics", "space", "store", "resume", "leftovers"):
        assert findings[check]["state"] == "ok", findings[check]
    assert findings["resume"]["seen"].startswith("from step 10, exact")
    assert server.objects("doctor") == before
    assert server.unfinished_uploads() == []


def test_a_server_that_keeps_no_condition_fails(proxy: Proxy, server: Server) -> None:
    findings = found(proxy, Fault("unconditional", lambda _: True))
    assert findings["semantics"].state == "fail"
    assert "If-None-Match" in findings["semantics"].seen
    assert "of 4 concurrent conditional puts" in findings["semantics"].seen
    assert findings["semantics"].todo
    assert server.objects("doctor") == {}


def test_a_healthy_one_has_what_a_store_needs(proxy: Proxy, server: Server) -> None:
    findings = found(proxy)
    assert {one.state for one in findings.values()} == {"ok"}
    assert any("partNumber" in asked.query for asked in proxy.asked), "the upload was one in parts"
    assert server.objects("doctor") == {}


def refused(asked: Asked) -> bool:
    return asked.query == "delete" or asked.method == "DELETE"


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (Fault(403, lambda _: True), "bucket"),
        (Fault(403, lambda asked: asked.method == "PUT"), "writing"),
        (Fault(403, refused), "writing"),
    ],
    ids=["nothing", "no put", "no delete"],
)
def test_what_is_not_permitted_fails_and_says_what_to_do(proxy: Proxy, fault: Fault, check: str) -> None:
    one = found(proxy, fault)[check]
    assert one.state == "fail"
    assert "check the credentials" in one.seen
    assert "docs/object-stores.md" in one.todo


@pytest.mark.parametrize(("off", "state"), [(0.0, "ok"), (-3600.0, "warn"), (3600.0, "warn")])
def test_clocks(off: float, state: str) -> None:
    now = time.time()
    assert clock("the server's", now - 1.0, float(int(now + off)), "").state == state
