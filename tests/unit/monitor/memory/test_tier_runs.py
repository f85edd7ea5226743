"""Whole runs with the memory tier, in one process: policies, encodings, budgets, frozen weights, going back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from store.catalog import open_catalog
from store.memory.index import scan_node
from store.names import FROZEN, SaveId
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support import jobs
from tests.support.internals import saver_of
from tests.support.jobs import Job, same
from tests.support.kept import abandoned, memory, settled, tier_of
from tests.support.memory_jobs import kept_steps, run, sources, state_in, trained, version
from tests.support.slow import others_slow


def commits(store: Path) -> list[SaveId]:
    return open_catalog(LocalFiles(store)).saves()


POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "full, lossy": {"policy": "full", "encoding": "compact"},
    "full, lossy while staging": {"policy": "full", "encoding": "compact", "encode": "staging"},
    "full, differences": {"policy": "full", "packing": 1, "differences": True},
    "parity": {"policy": {"name": "parity", "k": 3}, "encoding": "compact", "packing": 1},
    "parity in bounds": {"policy": {"name": "parity", "k": 3}, "bounds": {"max_drift": 0.3, "max_staleness": 8}},
    "filter": {"policy": "filter"},
    "threshold": {"policy": {"name": "threshold", "threshold": 0.05}, "encoding": "compact"},
    "budget": {"policy": "budget", "budget": {"bytes_per_hour": 1e9, "burst_seconds": 0.3}, "encoding": "compact"},
    "auto": {"policy": "full", "every": "auto"},
}


@pytest.mark.parametrize("staging", others_slow(["lazy", "eager"]))
@pytest.mark.parametrize("name", POLICIES)
def test_under_every_policy_what_comes_back_from_memory_is_exact(store: Path, name: str, staging: str) -> None:
    settings = {"every": 4, "memory": memory(store), "staging": staging, **POLICIES[name]}
    one = trained(store, 13, **settings)
    one.step()
    kept, rng = one.weights(), torch.get_rng_state()
    one.update()  # what is copied beside the next step must be of the step before
    abandoned(one)
    two = Job(store, **settings)
    assert two.ckpt.resume() == 14
    assert same(two.weights(), kept) and torch.equal(torch.get_rng_state(), rng)
    assert sources(two) == {"memory"}
    assert two.ckpt.certificate is not None and two.ckpt.certificate.exact
    assert two.ckpt.certificate.max_staleness == 0 and not two.ckpt.certificate.lossy
    run(two, 9)
    abandoned(two)
    assert verify(open_catalog(LocalFiles(store))).ok
    three = Job(store, **settings)
    three.ckpt.resume()
    assert three.ckpt.certificate is not None and three.ckpt.certificate.exact
    three.ckpt.save(wait=True)
    three.ckpt.close(save=False)
    assert not list((store.parent / "shm").rglob("rank-*"))
    assert verify(open_catalog(LocalFiles(store))).ok


def test_what_is_committed_after_memory_is_never_called_fresher_than_it_is(store: Path) -> None:
    """Units that a commit after the resume takes from before it have a distance that nobody measured."""
    settings = {"every": 4, "memory": memory(store), "policy": {"name": "parity", "k": 2}}
    one = trained(store, 10, **settings)
    abandoned(one)
    two = Job(store, **settings)
    assert two.ckpt.resume() == 10
    run(two, 2)
    manifest = open_catalog(LocalFiles(store)).manifest(SaveId(12, 2))
    old = [unit for unit in manifest.units if unit.moving and unit.save != manifest.save.name]
    assert old and all(unit.drift is None and unit.staleness == 12 - unit.version.step for unit in old)
    two.ckpt.close(save=False)


def test_a_policy_that_goes_by_drift_stores_everything_after_memory(store: Path) -> None:
    settings = {"every": 4, "memory": memory(store), "policy": {"name": "threshold", "threshold": 1e9}}
    one = trained(store, 10, **settings)
    abandoned(one)
    two = Job(store, **settings)
    assert two.ckpt.resume() == 10
    run(two, 2)
    manifest = open_catalog(LocalFiles(store)).manifest(SaveId(12, 2))
    assert {unit.save for unit in manifest.units if unit.moving} == {manifest.save.name}
    two.ckpt.close(save=False)


def test_observing_needs_no_memory(store: Path) -> None:
    one = Job(store, every=2, memory=memory(store), policy={"name": "observe", "inner": "full"})
    assert one.ckpt.resume() == 0
    for _ in range(5):
        one.step()
    one.ckpt.close(save=False)
    assert not list((store.parent / "shm").iterdir())


@pytest.mark.slow
def test_a_job_that_fails_often_gets_on_and_its_budget_holds(store: Path) -> None:
    rate = 200_000.0
    settings = {
        "width": 48, "every": 3, "memory": memory(store), "policy": "budget", "retention": {"keep_last": 10_000},
        "budget": {"bytes_per_hour": rate * 3600, "burst_seconds": 0.2},
    }  # fmt: skip
    at = 0
    for incarnation in range(8):
        one = Job(store, **settings)
        resumed = one.ckpt.resume()
        assert resumed >= at - 1, "a composite counts as of its effective step, and memory as of its own"
        run(one, 4)
        at = resumed + 4
        assert at >= 3 * (incarnation + 1)
        # The size of the run state is found out by saving it, so a small budget may be that much off, and says so.
        assert one.metric("driftpoint_budget_overdraft_bytes_total") <= 12_000
        abandoned(one)
    catalog = open_catalog(LocalFiles(store))
    sizes = {save: catalog.manifest(save).groups[save.name].payload_bytes for save in catalog.saves()}
    first = min(sizes)
    assert all(size < sizes[first] for save, size in sizes.items() if save != first), "no full save at each resume"
    assert verify(catalog).ok


# ---- frozen weights


class Frozen(jobs.Model):
    """Only what lies around the blocks is trained, and one parameter in them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.blocks.requires_grad_(False)
        self.blocks[2][0].bias.requires_grad_(True)


def adapted(store: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Job:
    """A job that trains adapters: blocks are frozen."""
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "Model", Frozen)
        return Job(store, memory=memory(store), **settings)


def test_frozen_weights_come_from_the_store_and_the_rest_from_memory(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = adapted(store, monkeypatch, every=4)
    one.ckpt.resume()
    run(one, 7)
    assert kept_steps(store) == [], "until what memory does not hold is known to be committed"
    run(one, 4)
    kept = one.weights()
    abandoned(one)
    assert not [entry for entry in version(store).records[0].entries if entry.slot == FROZEN]
    two = adapted(store, monkeypatch, every=4)
    assert two.ckpt.resume() == 11
    assert same(two.weights(), kept)
    assert two.ckpt.certificate is not None
    assert {(unit.source, unit.slot == FROZEN) for unit in two.ckpt.certificate.units} == {
        ("memory", False),
        ("", True),
    }
    run(two, 3)
    two.ckpt.close(save=False)


@pytest.mark.parametrize("how", ["in place", "through data"])
def test_frozen_weights_that_the_script_changes_are_never_claimed(
    store: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    one = adapted(store, monkeypatch, every=4)
    one.ckpt.resume()
    run(one, 10)
    before = one.weights()
    weight = one.model.blocks[0][0].weight
    if how == "in place":
        with torch.no_grad():
            weight.add_(1.0)
    else:
        weight.data.add_(1.0)
    run(one, 1)
    abandoned(one)
    two = adapted(store, monkeypatch, every=4)
    found = two.ckpt.resume()
    if how == "in place":
        assert found == 10, "no version since"
        assert same(two.weights(), before)
    else:
        assert found == 11
        assert two.ckpt.certificate is not None and not two.ckpt.certificate.exact
    two.ckpt.close(save=False)


def test_frozen_weights_changed_and_committed_are_kept_with_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = adapted(store, monkeypatch, every=4)
    one.ckpt.resume()
    run(one, 10)
    with torch.no_grad():
        one.model.blocks[0][0].weight.add_(1.0)
    run(one, 1)
    assert kept_steps(store)[-1] == 10
    run(one, 6)
    assert kept_steps(store)[-1] == 17
    kept = one.weights()
    abandoned(one)
    two = adapted(store, monkeypatch, every=4)
    assert two.ckpt.resume() == 17
    assert same(two.weights(), kept)
    two.ckpt.close(save=False)


def test_going_back_behind_a_change_of_frozen_weights_keeps_versions_again(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later save of the frozen weights is given up with the branch that it was on."""
    one = adapted(store, monkeypatch, every=4)
    one.ckpt.resume()
    run(one, 5)
    with torch.no_grad():
        one.model.blocks[0][0].weight.add_(1.0)
    run(one, 3)
    assert commits(store)[0].step == 8
    (store / "manifests" / "00000008-000001.json").unlink()  # as a prune by hand would
    abandoned_versions = tier_of(store)
    for place in abandoned_versions.generations():
        for slot in (0, 1):
            place.record(0, slot).unlink(missing_ok=True)
    assert one.ckpt.resume() == 4
    run(one, 3)
    assert kept_steps(store)[-1] == 7
    one.ckpt.close(save=False)


# ---- the table changes


def test_unfrozen_parameters_are_in_the_next_version(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = adapted(store, monkeypatch, every=4)
    one.ckpt.resume()
    run(one, 9)
    one.model.blocks.requires_grad_(True)
    run(one, 2)
    assert kept_steps(store)[-1] == 11, "the save before, which knows the old units, was settled by version 9"
    run(one, 2)
    kept = one.weights()
    assert kept_steps(store)[-1] == 13
    assert same(state_in(store), kept)
    abandoned(one)
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 13
    assert same(two.weights(), kept)
    run(two, 2)
    two.ckpt.close(save=False)
    assert verify(open_catalog(LocalFiles(store))).ok


def test_parameters_unfrozen_while_a_save_is_under_way(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version must not change what is known of the units before the save that is of the old ones is settled."""
    one = adapted(store, monkeypatch, every=4, policy={"name": "threshold", "threshold": 1e-9})
    one.ckpt.resume()
    run(one, 9)
    released = threading.Event()
    files = one.hook()
    files.before = lambda name, path: released.wait(180) if "segments" in path else None
    for _ in range(3):
        one.step(flush=False)
    assert saver_of(one.ckpt).in_progress
    one.model.blocks.requires_grad_(True)
    for _ in range(2):
        one.step(flush=False)
        settled(one)
    released.set()
    one.ckpt.flush()
    run(one, 5)
    assert one.metric("driftpoint_failures_total", kind="save") == 0
    kept = one.weights()
    assert same(state_in(store), kept)
    assert verify(open_catalog(LocalFiles(store))).ok
    one.ckpt.save(wait=True)
    abandoned(one)
    (store.parent / "shm").rename(store.parent / "gone")
    two = Job(store, every=4, memory=memory(store))
    two.ckpt.resume()
    assert same(two.weights(), kept)
    two.ckpt.close(save=False)


# ---- run state


class Grows:
    """Its state takes more room at every step."""

    def __init__(self) -> None:
        self.seen = torch.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        self.seen = torch.cat([self.seen, torch.randn(200_000)])
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_run_state_that_grows_finds_room(store: Path) -> None:
    grows = Grows()
    one = trained(store, 7, every=100, state=[grows])
    seen = grows.seen.clone()
    abandoned(one)
    again = Grows()
    two = Job(store, every=100, memory=memory(store), state=[again])
    assert two.ckpt.resume() == 7
    assert torch.equal(again.seen, seen)
    two.ckpt.close(save=False)


# ---- the same process, back and forth


def test_resume_called_again_stands_on_the_newest_version(store: Path) -> None:
    one = trained(store, 6)
    kept = one.weights()
    one.update()
    assert one.ckpt.resume() == 6
    assert same(one.weights(), kept)
    for round_ in range(3):
        run(one, 3)
        kept = one.weights()
        one.update()
        assert one.ckpt.resume() == 6 + 3 * (round_ + 1)
        assert same(one.weights(), kept)
    abandoned(one)
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 15
    assert same(two.weights(), kept)
    two.ckpt.close(save=False)
    assert verify(open_catalog(LocalFiles(store))).ok


def test_resume_called_again_before_the_first_own_version(store: Path) -> None:
    one = trained(store, 6)
    kept = one.weights()
    abandoned(one)
    two = Job(store, every=4, memory=memory(store))
    for _ in range(3):
        assert two.ckpt.resume() == 6
        assert same(two.weights(), kept)
        two.update()
    assert two.ckpt.resume() == 6
    run(two, 3)
    assert kept_steps(store)[-1] == 9
    assert len(list((store.parent / "shm").rglob("*.payload"))) == 2
    two.ckpt.close(save=False)


def test_names_are_never_used_twice_when_a_job_goes_back(store: Path) -> None:
    """Versions of the branch that was left must not pass for those of the new one."""
    one = trained(store, 7)
    for place in tier_of(store).generations():
        for slot in (0, 1):
            place.record(0, slot).unlink(missing_ok=True)
    assert one.ckpt.resume() == 4
    run(one, 2)
    found = max(scan_node(tier_of(store)).versions)
    assert found == SaveId(6, 2)
    kept = one.weights()
    abandoned(one)
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 6
    assert same(two.weights(), kept)
    two.ckpt.close(save=False)


def test_a_save_by_hand_at_the_step_of_a_version(store: Path) -> None:
    one = trained(store, 5, every=100)
    one.ckpt.save(wait=True)
    assert commits(store)[0] == SaveId(5, 1)
    kept = one.weights()
    abandoned(one)
    two = Job(store, every=100, memory=memory(store))
    assert two.ckpt.resume() == 5
    assert same(two.weights(), kept)
    run(two, 1)
    two.ckpt.save(wait=True)
    run(two, 1)
    kept = two.weights()
    abandoned(two)
    three = Job(store, every=100, memory=memory(store))
    assert three.ckpt.resume() == 7
    assert same(three.weights(), kept)
    three.ckpt.close(save=False)
    assert verify(open_catalog(LocalFiles(store))).ok


def test_a_composite_resumed_at_its_effective_step_and_then_from_memory(store: Path) -> None:
    settings = {"every": 2, "policy": {"name": "parity", "k": 3}, "resume": {"at": "effective"}}
    one = trained(store, 20, **settings, memory=memory(store, every=1000))
    abandoned(one)
    two = Job(store, **settings, memory=memory(store))
    stands = two.ckpt.resume()
    assert stands < 20 and sources(two) == {""}
    run(two, 3)
    kept, at = two.weights(), stands + 3
    newest = max(scan_node(tier_of(store)).versions)
    abandoned(two)
    three = Job(store, **settings, memory=memory(store))
    assert three.ckpt.resume() == newest.step <= at
    if newest.step == at:
        assert same(three.weights(), kept)
    assert sources(three) == {"memory"}
    assert three.ckpt.certificate is not None and three.ckpt.certificate.exact
    run(three, 8)
    abandoned(three)
    (store.parent / "shm").rename(store.parent / "gone")
    four = Job(store, **settings, memory=memory(store))
    assert four.ckpt.resume() > 0
    assert four.ckpt.certificate is not None and not four.ckpt.certificate.exact
    four.ckpt.close(save=False)
    assert verify(open_catalog(LocalFiles(store))).ok


def test_two_stores_in_one_process(tmp_path: Path) -> None:
    stores = [tmp_path / "a" / "store", tmp_path / "b" / "store"]
    shared = {"enabled": True, "every": 1, "path": str(tmp_path)}
    jobs = [Job(store, every=4, memory=shared) for store in stores]
    for one in jobs:
        one.ckpt.resume()
    for _ in range(6):
        for one in jobs:
            run(one, 1)
    kept = [one.weights() for one in jobs]
    abandoned(jobs[0])
    jobs[1].ckpt.close()
    again = Job(stores[0], every=4, memory=shared)
    assert again.ckpt.resume() == 6 and same(again.weights(), kept[0])
    other = Job(stores[1], every=4, memory=shared)
    assert other.ckpt.resume() == 6
    again.ckpt.close()
    other.ckpt.close()
    assert not list(tmp_path.glob("driftpoint-*/*"))


def test_on_a_single_node_there_are_no_peers_and_that_is_said(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = trained(store, 6, memory=memory(store, peers=True))
    assert "all ranks are on one node" in caplog.text
    assert one.metric("driftpoint_failures_total", reason="peer") == 1
    abandoned(one)
    again = Job(store, every=4, memory=memory(store, peers=True))
    assert again.ckpt.resume() == 6 and sources(again) == {"memory"}
    again.ckpt.close()
    assert kept_steps(store) == []
