from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merger.plan import plan_merge
from merger.read import DamagedVersionError, Reader, find_damage
from store.catalog import open_catalog
from store.errors import MergeError
from store.layout import payload_path
from store.names import Fragment, SaveId, Unit
from store.versions import Bad
from tests.support.plain_stores import PlainStore
from tests.support.stores import FakeLayer, flip_byte

NUMEL = 103


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainStore, Reader]:
    """One parameter of odd size on three ranks."""
    store = PlainStore(tmp_path_factory.mktemp("cut") / "store", layers=[FakeLayer("only", NUMEL)], world_size=3)
    store.save(10)
    return store, Reader(store.files, plan_merge(open_catalog(store.files), None))


@given(start=st.integers(0, NUMEL), stop=st.integers(0, NUMEL), double=st.booleans())
def test_any_interval(cut: tuple[PlainStore, Reader], start: int, stop: int, double: bool) -> None:
    store, reader = cut
    start, stop = min(start, stop), max(start, stop)
    out = torch.full((stop - start,), torch.nan, dtype=torch.float64 if double else torch.float32)
    reader.fill(Fragment("only.weight", "exp_avg", start, stop - start), out)
    expected = store.values(Unit("only", "exp_avg"), 10)[start:stop]
    assert np.array_equal(out.numpy(), expected.astype(out.numpy().dtype))


def test_whole_tensors_and_each_byte_told_once(store: PlainStore) -> None:
    store.save(10)
    plan = plan_merge(open_catalog(store.files), None)
    told: list[int] = []
    reader = Reader(store.files, plan, told.append)
    for _ in range(2):
        for unit in store.units:
            found = reader.tensor(f"{unit.layer}.weight", unit.slot)
            assert found.numpy().tobytes() == store.values(unit, 10).tobytes()
    assert sum(told) == plan.bytes_to_read


def test_what_is_not_there(cut: tuple[PlainStore, Reader]) -> None:
    _, reader = cut
    with pytest.raises(MergeError, match=r"names no parameter other\.weight"):
        reader.tensor("other.weight", "fp32")
    with pytest.raises(MergeError, match=r"only\.weight/momentum: elements 0 to 103"):
        reader.tensor("only.weight", "momentum")
    assert not reader.has("only.weight", "momentum")


def test_every_damaged_version_is_found_and_named(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    plan = plan_merge(open_catalog(store.files), None)
    part = plan.sources["layers.1.weight", "exp_avg"][1].part
    path = tmp_path / "store" / payload_path(part.save, part.rank)
    for fqn, slot in (("layers.1.weight", "exp_avg"), ("norm.weight", "fp32")):
        entry = next(e for e in part.entries if (e.fqn, e.slot) == (fqn, slot))
        flip_byte(path, part.header_bytes + entry.offset + 3)
    with pytest.raises(DamagedVersionError, match=r"layers\.1/exp_avg of save 00000010-000001") as caught:
        Reader(store.files, plan).tensor("layers.1.weight", "exp_avg")
    assert caught.value.bad == Bad(SaveId(10, 1), Unit("layers.1", "exp_avg"))
    found = find_damage(store.files, plan)
    assert found.keys() == {Bad(SaveId(10, 1), Unit(*unit)) for unit in (("layers.1", "exp_avg"), ("norm", "fp32"))}
