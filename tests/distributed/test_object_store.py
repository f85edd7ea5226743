"""A job of two ranks whose store is in a bucket: killed, it goes on to the last bit as if it had not been; and of two
jobs on one store the older is fenced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.launch import Launched, torchrun
from tests.support.s3 import BUCKET, KEYS, Server, tiny_parts

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]

PART_MIB = 5
STEPS, KILL_AT = 11, 8


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server, tiny_parts(), pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        yield server


def cases(server: Server) -> list[dict[str, Any]]:
    def settings(name: str, **more: Any) -> dict[str, Any]:
        s3 = {"endpoint": f"http://127.0.0.1:{server.port}", "allow_http": True, "part_mib": PART_MIB}
        return {"store": f"s3://{BUCKET}/jobs/{name}", "s3": s3, **more}

    return [
        {"name": "full", "kind": "ddp", "every": 3, "settings": settings("full")},
        {
            "name": "differences", "kind": "ddp", "every": 3,
            "settings": settings("differences", packing=1, differences=True),
        },
    ]  # fmt: skip


@pytest.fixture(scope="module")
def launched(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    spec = {"cases": cases(server), "steps": STEPS, "kill_at": KILL_AT}
    done = torchrun("resume_train.py", 2, spec, tmp_path_factory.mktemp("launch"), restarts=1)
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.mark.parametrize("case", ["full", "differences"])
def test_a_killed_job_goes_on_as_if_it_had_not_been(launched: Launched, case: str) -> None:
    assert launched.of("dies")
    for resumed in launched.of("resumed", case=case):
        assert resumed["step"] == 6
        assert resumed["exact"]
    straight = {(one["step"], tuple(one["losses"])) for one in launched.of("straight", case=case)}
    gone_on = {(one["step"], tuple(one["losses"])) for one in launched.of("continued", case=case)}
    assert {step for step, _ in gone_on} == set(range(6, STEPS))
    assert gone_on <= straight
    ends = [one["hashes"] for one in launched.of("end", case=case)]
    assert len(ends) == 4
    assert sorted(map(json.dumps, ends[:2])) == sorted(map(json.dumps, ends[2:]))


@pytest.mark.parametrize("case", ["full", "differences"])
def test_its_store_is_one_in_a_directory_too(launched: Launched, server: Server, case: str, tmp_path: Path) -> None:
    """Copied out of the bucket, nothing is missing, and not a byte is wrong."""
    report = verify(open_catalog(LocalFiles(server.copied(f"jobs/{case}", tmp_path))))
    assert report.ok, report
    assert report.commits[0].save.name == "00000009-000002"
