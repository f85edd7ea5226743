"""The memory tier in one process: what is kept, when it is resumed from, and that the store is never worse for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from store.catalog import open_catalog
from store.files import LocalFiles
from store.memory.held import look
from store.names import SaveId
from store.verify import verify
from tests.support.jobs import Job, same
from tests.support.memory_jobs import abandoned, memory, settled, tier_of


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_killed_job_goes_on_from_memory_where_that_is_newer(store: Path) -> None:
    one = Job(store, every=4, memory=memory(store))
    one.ckpt.resume()
    for _ in range(7):
        one.step()
        settled(one)
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
    one = Job(store, every=4, memory=memory(store), policy={"name": "parity", "k": 2})
    one.ckpt.resume()
    for _ in range(10):
        one.step()
        settled(one)
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
    one = Job(store, every=3, memory=memory(store))
    one.ckpt.resume()
    for _ in range(6):
        one.step()
        settled(one)
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
    assert look(tier_of(store)).versions
    one.ckpt.close()
    assert not any((store.parent / "shm").rglob("*.payload"))


def test_memory_before_the_first_commit_is_enough(store: Path) -> None:
    one = Job(store, every=100, memory=memory(store))
    one.ckpt.resume()
    for _ in range(5):
        one.step()
        settled(one)
    kept = one.weights()
    abandoned(one)
    two = Job(store, every=100, memory=memory(store))
    assert two.ckpt.resume() == 5
    assert same(two.weights(), kept)
    two.ckpt.save(wait=True)
    assert verify(open_catalog(LocalFiles(store))).resumable
    two.ckpt.close()


def test_a_version_that_is_not_finite_replaces_none(store: Path) -> None:
    one = Job(store, every=100, memory=memory(store))
    one.ckpt.resume()
    for _ in range(4):
        one.step()
        settled(one)
    with torch.no_grad():
        one.model.head.weight[0, 0] = float("nan")
    for _ in range(3):
        one.step()
        settled(one)
    abandoned(one)
    two = Job(store, every=100, memory=memory(store))
    assert two.ckpt.resume() == 4
    assert all(bool(torch.isfinite(value).all()) for value in two.weights().values())
    two.ckpt.close()
