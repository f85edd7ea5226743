"""Room is made on a full disk while a unit of the resumed commit lives on in an older one only."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.catalog import open_catalog
from store.errors import NoSpaceError
from store.names import Unit
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.hooked import nothing
from tests.support.jobs import flip_bit, job


def full(operation: str, path: str) -> None:
    if operation == "write":
        raise NoSpaceError(f"cannot write {path}: the filesystem is full")


@pytest.mark.parametrize("policy", ["full", {"name": "threshold", "threshold": 1e9, "slots": {"fp32": 0.0}}])
def test_the_version_that_a_unit_fell_back_to_is_not_deleted(tmp_path: Path, policy: object) -> None:
    store = tmp_path / "store"
    with job(store) as one:
        one.step()
        one.step()
    flip_bit(store, Unit("blocks.1", "exp_avg"), "00000002-000001")
    with job(store, policy=policy) as other:
        assert other.ckpt.resume() == 2
        files = other.hook()
        files.before = full
        for _ in range(2):
            other.step()
        assert verify(open_catalog(LocalFiles(store))).resumable is not None
        files.before = nothing
        for _ in range(3):
            other.step()
    report = verify(open_catalog(LocalFiles(store)))
    assert report.commits[0].state == "ok"
    assert report.resumable == report.commits[0].save
