from __future__ import annotations

from pathlib import Path

import pytest

from merger.checkpoint import Checkpoint
from merger.plan import Request, open_request, plan_merge
from merger.sources.store import StoreSource
from store.errors import MergeError, NothingToResumeError
from store.names import Unit
from store.schema import ManifestRecord
from tests.support.plain_stores import PlainStore
from tests.support.stores import StoreBuilder, flip_byte


def checkpoint(store: StoreBuilder, step: int | str | None = None) -> Checkpoint:
    return StoreSource(store.root).checkpoint(step, frozenset())


def test_the_newest_commit_with_each_unit_at_its_own_version(store: PlainStore) -> None:
    store.save(10)
    newest = store.save(20, slots=("fp32",))
    found = checkpoint(store)
    assert (found.step, found.certificate.save, found.problems) == (20, newest.name, ())
    steps = {(unit.layer, unit.slot): unit.step for unit in found.certificate.units}
    assert all(step == {True: 20, False: 10}[slot == "fp32"] for (_, slot), step in steps.items())
    assert sum(e.block.nbytes for extents in found.index.names().values() for e in extents) == sum(
        12 * layer.numel for layer in store.layers
    )
    assert found.framework_state["param_groups"][0]["params"] == store.fqns
    assert [found.run_states[rank].user[0]["rank"] for rank in (0, 1)] == [0, 1]


def test_what_the_ranks_had_for_themselves_is_a_problem(store: PlainStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of another layout holds one rank's buffers."""
    own, made = {"rank_buffers": ["norm.running_mean", "head.weight/step"]}, store.run_state
    monkeypatch.setattr(store, "run_state", lambda step, rank: {**made(step, rank), **own})
    store.save(10)
    found = checkpoint(store)
    named = "ranks had different values of norm.running_mean, head.weight/step: the first rank's are taken"
    assert named in found.certificate.problems and not found.certificate.exact


def test_the_plan_says_what_is_read_and_written(store: PlainStore) -> None:
    store.save(10)
    request = Request(store.root)
    plan = plan_merge(open_request(request), request)
    total = sum(12 * layer.numel for layer in store.layers)
    assert plan.bytes_to_read == total
    assert total < plan.bytes_to_write < total + 20_000


def test_a_named_commit(store: PlainStore) -> None:
    first = store.save(10)
    store.save(20)
    assert checkpoint(store, first.name).certificate.save == first.name


def test_a_commit_that_is_not_there_is_told_with_those_that_are(store: PlainStore) -> None:
    store.save(10)
    with pytest.raises(MergeError, match="no commit 00000011-000001; the newest are: 00000010-000001"):
        checkpoint(store, "00000011-000001")


def test_a_commit_that_is_deleted_while_it_is_looked_for(store: PlainStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the job, whose rule keeps few: it is no weights-only commit either."""
    save = store.save(10)
    store.save(20)
    found = StoreSource(store.root)
    monkeypatch.setattr(found, "_meant", lambda *_: (save, None))
    (store.root / "manifests" / f"{save}.json").unlink()
    with pytest.raises(MergeError, match="was deleted meanwhile"):
        found.checkpoint(10, frozenset())


def test_an_empty_store(store: PlainStore) -> None:
    with pytest.raises(NothingToResumeError, match="yet"):
        checkpoint(store)


def test_a_hole_names_the_parameter(store: PlainStore, monkeypatch: pytest.MonkeyPatch) -> None:
    make = store._manifest

    def with_a_larger_tensor(*args: object) -> ManifestRecord:
        manifest = make(*args)  # type: ignore[arg-type]
        larger = manifest.tensors["layers.1.weight"].replace(shape=(70,))
        return manifest.replace(tensors={**manifest.tensors, "layers.1.weight": larger})

    monkeypatch.setattr(store, "_manifest", with_a_larger_tensor)
    store.save(10)
    with pytest.raises(MergeError, match=r"layers\.1\.weight/exp_avg: elements 64 to 70"):
        checkpoint(store)


def test_a_slot_that_is_not_there_at_all_is_a_hole(store: PlainStore, monkeypatch: pytest.MonkeyPatch) -> None:
    make = store._manifest

    def without_weights(*args: object) -> ManifestRecord:
        manifest = make(*args)  # type: ignore[arg-type]
        lost = Unit("norm", "fp32")
        return manifest.replace(units=tuple(unit for unit in manifest.units if unit.unit != lost))

    monkeypatch.setattr(store, "_manifest", without_weights)
    store.save(10)
    with pytest.raises(MergeError, match=r"incomplete.*norm\.weight/fp32: elements 0 to 8"):
        checkpoint(store)


def test_damaged_run_state_falls_back_to_the_commit_before(store: PlainStore) -> None:
    first = store.save(10)
    second = store.save(20)
    flip_byte(store.payload(second, rank=1))  # the run state is last in a payload
    plan = checkpoint(store)
    assert plan.certificate.save == first.name
    assert any("run state of 00000020-000001 is damaged" in problem for problem in plan.problems)
    with pytest.raises(MergeError, match=r"00000020-000001 cannot be rebuilt: .*run state"):
        checkpoint(store, second.name)


def test_a_run_state_of_something_else(tmp_path: Path) -> None:
    store = StoreBuilder(tmp_path / "store")
    store.save(10)
    with pytest.raises(MergeError, match="has no framework state"):
        checkpoint(store)
