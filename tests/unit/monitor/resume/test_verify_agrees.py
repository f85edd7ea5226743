"""`verify` names the commit that a resume takes, also where run states are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.catalog import Catalog, open_catalog
from store.certificate import certify, run_saves
from store.names import SaveId, payload_path
from store.resolve import newest_resumable
from store.segment import read_part
from store.storage.local import LocalFiles
from store.verify import VerifyReport, verify
from tests.support.jobs import job

PARITY = {"policy": {"name": "parity", "k": 4}}


def catalog_of(store: Path) -> Catalog:
    return open_catalog(LocalFiles(store))


def flip_run_state(store: Path, save: SaveId) -> None:
    catalog = catalog_of(store)
    part = read_part(catalog.files, catalog.store_id, save, 0)
    tensor = next(tensor for tensor in part.run_tensors if tensor.nbytes)
    path = store / payload_path(save, 0)
    data = bytearray(path.read_bytes())
    data[part.header_bytes + tensor.offset] ^= 1
    path.write_bytes(data)


def trained(store: Path) -> list[SaveId]:
    """A job's saves whose run state a resume of its newest commit may take, best first; its own comes last."""
    with job(store, **PARITY) as one:
        one.ckpt.resume()
        for _ in range(7):
            one.step()
    resolution = newest_resumable(catalog_of(store))[0]
    found = list(run_saves(resolution, certify(resolution).effective_step))
    assert len(found) > 1 and found[-1] == SaveId(7, 1)
    return found


def taken(store: Path) -> tuple[VerifyReport, SaveId | None]:
    """What verify says, and the commit that a resume takes."""
    report = verify(catalog_of(store))
    with job(store, **PARITY) as one:
        one.ckpt.resume()
        found = one.ckpt.certificate
        return report, None if found is None else SaveId(found.step, 1)


@pytest.mark.parametrize("damaged", ["own", "all others", "all"])
def test_the_commit_that_verify_names_is_the_one_that_is_resumed(tmp_path: Path, damaged: str) -> None:
    saves = trained(tmp_path / "store")
    for save in {"own": saves[-1:], "all others": saves[:-1], "all": saves}[damaged]:
        flip_run_state(tmp_path / "store", save)
    report, resumed = taken(tmp_path / "store")
    assert not report.ok and report.resumable == resumed
    assert report.commits[0].state == ("damaged" if damaged == "all" else "fallback")
    assert (resumed == SaveId(7, 1)) is (damaged != "all")
