"""Every release reads what was written in format 1, to the bit."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from store.catalog import Catalog, open_catalog
from store.certificate import certify
from store.fragments import FragmentIndex
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment, SaveId, Unit, payload_path
from store.resolve import Resolution, newest_resumable, resolve
from store.retention import Retention, execute, plan_prune
from store.segment import read_leaves
from store.session import claim_epoch, read_epoch
from store.state_tree import decode
from store.storage.local import LocalFiles
from store.verify import verify
from tests.golden.make_format_1 import SLOTS, TENSORS, WORLD, run_state, units, value
from tests.support.entries import read_entry

GOLDEN = Path(__file__).parent / "store-format-1"
FIRST, SECOND = SaveId(10, 1), SaveId(20, 2)


@pytest.fixture
def catalog() -> Catalog:
    return open_catalog(LocalFiles(GOLDEN))


def test_it_verifies(catalog: Catalog) -> None:
    report = verify(catalog)
    assert report.ok, report
    assert [commit.save for commit in report.commits] == [SECOND, FIRST]
    assert report.resumable == SECOND


def test_its_records(catalog: Catalog) -> None:
    assert catalog.saves() == [SECOND, FIRST]
    assert catalog.proven() == {FIRST}
    assert [read_epoch(catalog.files, epoch).epoch for epoch in (1, 2)] == [1, 2]
    manifest = catalog.manifest(SECOND)
    assert (manifest.previous, manifest.commits, manifest.world_size) == (FIRST.name, 2, WORLD)
    assert (manifest.framework, manifest.policy, manifest.bytes_avoided) == ("golden", "parity", 60)
    assert manifest.tensors == TENSORS
    assert list(manifest.tensors) == list(TENSORS)
    assert [layer.name for layer in manifest.layers] == ["embed", "block.0"]
    assert {unit.unit: (unit.version, unit.moving, unit.drift) for unit in manifest.units} == {
        Unit("embed", FROZEN): (FIRST, False, 0.125),
        Unit("block.0", WEIGHTS): (SECOND, True, 0.0),
        Unit("block.0", "exp_avg"): (FIRST, True, 0.125),
        Unit("block.0", BUFFER): (SECOND, False, 0.0),
    }


@pytest.mark.parametrize("save", [FIRST, SECOND])
def test_every_value(catalog: Catalog, save: SaveId) -> None:
    resolution = resolve(catalog, save)
    assert resolution.problems == ()
    assert set(resolution.versions) == set(units())
    for unit, names in units().items():
        version = resolution.versions[unit].save
        for fqn in names:
            assert read(catalog, resolution, fqn, unit) == value(fqn, unit.slot, version).tobytes(), (unit, fqn)


def read(catalog: Catalog, resolution: Resolution, fqn: str, unit: Unit) -> bytes:
    record = TENSORS[fqn]
    numel, width = math.prod(record.shape), {"BF16": 2, "F32": 4, "I64": 8}[SLOTS[record.kind][unit.slot]]
    data = bytearray(numel * width)
    index = FragmentIndex(resolution.versions[unit].sources)
    assert index.dtype(fqn, unit.slot) == SLOTS[record.kind][unit.slot]
    for copy in index.cover(Fragment(fqn, unit.slot, 0, numel)):
        assert (copy.source_start, copy.numel) == (0, copy.source.entry.numel)
        place = memoryview(data)[copy.target_start * width : (copy.target_start + copy.numel) * width]
        read_entry(catalog.files, copy.source.part, copy.source.entry, place)
    return bytes(data)


@pytest.mark.parametrize("save", [FIRST, SECOND])
def test_every_run_state(catalog: Catalog, save: SaveId) -> None:
    parts = resolve(catalog, save).run_parts
    assert parts[0].facts == {"zero_stage": 2}
    for rank in range(WORLD):
        found = decode(parts[rank].run_state, read_leaves(catalog.files, parts[rank]), lambda leaf: leaf)
        wanted = run_state(save, rank)
        assert list(found) == list(wanted)
        assert {key: shape_of(item) for key, item in found.items()} == {
            key: shape_of(item) for key, item in wanted.items()
        }


def shape_of(item: Any) -> Any:
    return (item.dtype, item.tolist()) if isinstance(item, np.ndarray) else (type(item), repr(item))


def test_its_certificates(catalog: Catalog) -> None:
    resolution, passed_over = newest_resumable(catalog)
    assert passed_over == ()
    certificate = certify(resolution)
    assert (certificate.save, certificate.exact, certificate.max_staleness) == (SECOND.name, False, 10)
    assert certificate.max_drift == 0.125
    assert certify(resolve(catalog, FIRST)).exact


def test_the_library_opens_its_payloads() -> None:
    with safe_open(GOLDEN / payload_path(SECOND, 0), framework="np") as payload:
        start = payload.get_tensor("block.0.weight/fp32/0")
        assert start.tolist() == value("block.0.weight", WEIGHTS, SECOND)[:4].tolist()
        assert "run_state/0" in payload.keys()  # noqa: SIM118 - not a mapping


def test_a_job_goes_on_from_it(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "store")
    files = LocalFiles(tmp_path / "store")
    catalog = open_catalog(files)
    assert claim_epoch(files, catalog.store_id).epoch == 3
    plan = plan_prune(catalog, Retention(keep_last=1, log_spaced=False))
    assert (plan.keep, plan.blocked, plan.unrecognised) == ((FIRST, SECOND), None, ())
    execute(files, plan)
    assert verify(open_catalog(files)).ok
