"""The memory tier in one process: what is kept, when it is resumed from, and that the store is never worse for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import monitor
from store.catalog import open_catalog
from store.errors import ConfigError
from store.memory.index import scan_node
from store.names import SaveId
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.internals import memory_of, wait_for_snapshot
from tests.support.jobs import Job, same
from tests.support.kept import abandoned, memory, settled, tier_of
from tests.support.memory_jobs import run, trained


def test_a_killed_job_goes_on_from_memory_where_that_is_newer(store: Path) -> None:
    one = trained(store, 7)
    kept, states = one.weights(), torch.get_rng_state()
    abandoned(one)
    assert [save.step for save in open_catalog(LocalFiles(store)).saves()] == [4]
    two = Job(store, every=4, memory=memory(store))
    torch.manual_seed(99)
    assert two.ckpt.resume() == 7
    assert same(two.weights(), kept)
    assert torch.equal(torch.get_rng_state(), states)
    certificate = two.ckpt.certificate
    assert certificate is not None and certificate.exact and certificate.step == 7
    assert {unit.source for unit in certificate.units} == {"memory"}
    two.ckpt.close()


def test_what_is_saved_after_memory_is_whole_on_disk(store: Path) -> None:
    one = trained(store, 10, policy={"name": "parity", "k": 2})
    abandoned(one)
    two = Job(store, every=4, memory=memory(store), policy={"name": "parity", "k": 2})
    assert two.ckpt.resume() == 10
    for _ in range(6):
        two.step()
    catalog = open_catalog(LocalFiles(store))
    assert catalog.saves()[0] == SaveId(16, 2)
    assert verify(catalog).resumable
    staleness = {unit.staleness for unit in catalog.manifest(SaveId(12, 2)).units if unit.moving}
    assert staleness <= {0, 4, 8}
    two.ckpt.close()


def test_the_store_is_taken_where_it_is_as_new(store: Path) -> None:
    one = trained(store, 6, every=3)
    abandoned(one)
    with_memory = Job(store, every=3, memory=memory(store))
    assert with_memory.ckpt.resume() == 6
    assert with_memory.ckpt.certificate is not None
    assert {unit.source for unit in with_memory.ckpt.certificate.units} == {""}
    with_memory.ckpt.close()


def test_closing_as_meant_gives_the_memory_back(store: Path) -> None:
    one = Job(store, every=4, memory=memory(store))
    one.ckpt.resume()
    for _ in range(6):
        one.step()
    settled(one)
    assert scan_node(tier_of(store)).versions
    one.ckpt.close()
    assert not any((store.parent / "shm").rglob("*.payload"))


def test_memory_before_the_first_commit_is_enough(store: Path) -> None:
    one = trained(store, 5, every=100)
    kept = one.weights()
    abandoned(one)
    two = Job(store, every=100, memory=memory(store))
    assert two.ckpt.resume() == 5
    assert same(two.weights(), kept)
    two.ckpt.save(wait=True)
    assert verify(open_catalog(LocalFiles(store))).resumable
    two.ckpt.close()


def test_a_version_that_is_not_finite_replaces_none(store: Path) -> None:
    one = trained(store, 4, every=100)
    with torch.no_grad():
        one.model.head.weight[0, 0] = float("nan")
    run(one, 3)
    abandoned(one)
    two = Job(store, every=100, memory=memory(store))
    assert two.ckpt.resume() == 4
    assert all(bool(torch.isfinite(value).all()) for value in two.weights().values())
    two.ckpt.close()


@pytest.mark.cuda  # pinned shared memory, a side stream
@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_on_cuda_versions_are_copied_into_pinned_shared_memory(store: Path, staging: str) -> None:
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    values = {"store": str(store), "every": 100, "staging": staging, "memory": memory(store)}
    ckpt = monitor.attach((model, optimizer), {**values, "metrics": {"enabled": False}})
    ckpt.resume()
    for _ in range(5):
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        ckpt.step()
        wait_for_snapshot(ckpt)
    tier = memory_of(ckpt)
    assert tier is not None and tier._buffers._pins
    held = scan_node(tier_of(store)).versions
    newest = held[max(held)][0]
    entry = next(one for one in newest.record.part.entries if one.slot == "fp32" and one.fqn == "weight")
    data = newest.payload.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    assert data == model.weight.detach().cpu().numpy().tobytes()
    ckpt.close()


def test_encoded_versions_take_a_third_and_are_not_called_exact(store: Path) -> None:
    one = trained(store, 5, every=100, width=64, memory=memory(store, encoding="compact"))
    kept = one.weights()
    (held,) = scan_node(tier_of(store)).versions[SaveId(5, 1)].values()
    raw = sum(value.numel() * 4 for value in kept.values())
    assert sum(entry.nbytes for entry in held.record.part.entries) < 0.36 * raw
    abandoned(one)
    two = Job(store, every=100, width=64, memory=memory(store, encoding="compact"))
    assert two.ckpt.resume() == 5
    certificate = two.ckpt.certificate
    assert certificate is not None and not certificate.exact
    assert {unit.encoding for unit in certificate.units if unit.moving} == {
        "int16-shared-exponent",
        "int8-shared-exponent-128",
        "int8-log2",
    }
    assert 0 < (certificate.max_error or 0) < 0.6
    for name, value in two.weights().items():
        bound = 0.6 if "exp_avg" in name else 0.02
        assert (value - kept[name]).norm() <= bound * kept[name].norm(), name
    two.ckpt.close()


def test_an_encoding_that_loses_bits_is_refused_where_the_bounds_want_exact_ones(store: Path) -> None:
    with pytest.raises(ConfigError, match=r"bounds.precision: exact forbids memory.encoding"):
        Job(store, bounds={"precision": "exact"}, memory=memory(store, encoding="compact"))


def test_layers_that_are_older_in_the_newest_commit_come_from_memory(store: Path) -> None:
    settings = {"every": 4, "policy": {"name": "parity", "k": 2}, "resume": {"at": "newest"}}
    one = Job(store, **settings, memory=memory(store, every=4))
    one.ckpt.resume()
    at: dict[int, dict[str, torch.Tensor]] = {}
    for step in range(1, 13):
        one.step()
        settled(one)
        at[step] = one.weights()
    abandoned(one)
    commit = open_catalog(LocalFiles(store)).saves()[0]
    node = scan_node(tier_of(store))
    assert (commit.step, max(node.versions).step) == (12, 9)
    two = Job(store, **settings, memory=memory(store, every=4))
    assert two.ckpt.resume() == 12
    certificate = two.ckpt.certificate
    assert certificate is not None and not certificate.exact and certificate.max_staleness == 3
    sources = {unit.source: unit.step for unit in certificate.units if unit.moving}
    assert sources == {"": 12, "memory": 9}
    from_memory = {unit.layer for unit in certificate.units if unit.source}
    for name, value in two.weights().items():
        layer = next(layer for layer in two.ckpt.layers if name.startswith(layer))
        assert torch.equal(value, at[9 if layer in from_memory else 12][name]), name
    two.step()
    for _ in range(7):
        two.step()
    assert verify(open_catalog(LocalFiles(store))).resumable
    two.ckpt.close()


def test_a_step_that_the_job_went_back_behind_is_not_in_memory_any_more(store: Path) -> None:
    one = trained(store, 7)
    assert one.ckpt.resume() == 7
    back = memory_of(one.ckpt)
    assert back is not None and back.newest == SaveId(7, 1)
    assert set(scan_node(tier_of(store)).versions) == {SaveId(7, 1)}
    one.ckpt.close()
