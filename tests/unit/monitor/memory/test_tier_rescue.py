"""What a dead job left in memory, written into its store: a commit like any other, or nothing at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monitor.config.load import Config
from store.catalog import open_catalog
from store.certificate import certify
from store.errors import DamagedError, FencedError, StoreInUseError
from store.memory.index import scan_node
from store.memory.rescue import NOTHING, REASON, WRITTEN, rescue_newest
from store.names import SaveId, part_path, payload_path, segment_dir
from store.resolve import resolve
from store.retention import Retention, execute, plan_prune
from store.session import claim_epoch
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.hooked import HookedFiles
from tests.support.jobs import Job, Model, same
from tests.support.kept import abandoned, catalog_of, kept_step, memory, tier_of


def died(store: Path, steps: int = 7, **settings: Any) -> dict[str, torch.Tensor]:
    """A job that committed every fourth step, kept each, and is dead. Its last state."""
    one = Job(store, **{"every": 4, "memory": memory(store), **settings})
    one.ckpt.resume()
    for _ in range(steps):
        kept_step(one)
    weights = one.weights()
    abandoned(one)
    return weights


def resumed(store: Path, tmp_path: Path, **settings: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """By a job on another node."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    two = Job(store, every=4, memory={"enabled": True, "path": str(elsewhere)}, **settings)
    step, weights = two.ckpt.resume(), two.weights()
    two.ckpt.close()
    return step, weights


def groups(store: Path) -> set[str]:
    return set(LocalFiles(store).list_dir("segments"))


def test_the_newest_version_becomes_a_commit(store: Path, tmp_path: Path) -> None:
    weights = died(store)
    states = torch.get_rng_state()
    done = rescue_newest(tier_of(store), catalog_of(store))
    assert (done.outcome, done.manifest and done.manifest.save) == (WRITTEN, SaveId(7, 1))
    catalog = catalog_of(store)
    assert [save.step for save in catalog.saves()] == [7, 4]
    manifest = catalog.manifest(SaveId(7, 1))
    assert (manifest.previous, manifest.commits) == (SaveId(4, 1).name, 2)
    assert {unit.reason for unit in manifest.units} == {REASON}
    assert verify(catalog).ok
    torch.manual_seed(1)
    assert resumed(store, tmp_path)[0] == 7
    assert torch.equal(torch.get_rng_state(), states)
    assert same(resumed(store, tmp_path)[1], weights)


def test_a_second_rescue_finds_nothing_to_do(store: Path) -> None:
    died(store)
    rescue_newest(tier_of(store), catalog_of(store))
    before = sorted(path for path in store.rglob("*"))
    assert rescue_newest(tier_of(store), catalog_of(store)).outcome == NOTHING
    assert sorted(path for path in store.rglob("*")) == before


def test_a_version_never_replaces_the_commit_of_its_name(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a damaged one: other ranks' parts may be whole, and newer commits may need them."""
    monkeypatch.setattr(Config, "shares_memory", lambda _: False)  # the save takes no memory of versions
    one = Job(store, every=4, memory=memory(store))
    one.ckpt.resume()
    for _ in range(7):
        kept_step(one)
    one.ckpt.save(wait=True)
    abandoned(one)
    part = store / part_path(SaveId(7, 1), 0)
    flipped = bytearray(part.read_bytes())
    flipped[200] ^= 1
    part.write_bytes(flipped)
    hints = ("LOCK", "LATEST")
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file() and path.name not in hints}
    assert sorted(scan_node(tier_of(store)).versions) == [SaveId(6, 1), SaveId(7, 1)]
    done = rescue_newest(tier_of(store), catalog_of(store))
    assert (done.outcome, done.manifest and done.manifest.save) == (WRITTEN, SaveId(6, 1)), "which no commit has"
    assert rescue_newest(tier_of(store), catalog_of(store)).outcome == NOTHING
    assert {path: path.read_bytes() for path in before} == before


def test_before_the_first_commit(store: Path, tmp_path: Path) -> None:
    weights = died(store, every=100)
    assert rescue_newest(tier_of(store), catalog_of(store)).outcome == WRITTEN
    assert catalog_of(store).manifest(SaveId(7, 1)).previous is None
    assert same(resumed(store, tmp_path)[1], weights)


def test_what_never_moves_stays_where_it_is(store: Path) -> None:
    one = Job(store, every=4, memory=memory(store))
    one.model.embed.requires_grad_(False)
    one.ckpt.resume()
    for _ in range(10):
        kept_step(one)
    abandoned(one)
    assert rescue_newest(tier_of(store), catalog_of(store)).outcome == WRITTEN
    catalog = catalog_of(store)
    frozen = [unit for unit in catalog.manifest(SaveId(10, 1)).units if unit.slot == "frozen"]
    assert frozen and {unit.version.step for unit in frozen} < {4, 8}
    assert verify(catalog).ok


def test_an_encoded_version_stays_encoded_and_is_not_called_exact(store: Path, tmp_path: Path) -> None:
    died(store, memory=memory(store, encoding="compact"))
    assert rescue_newest(tier_of(store), catalog_of(store)).outcome == WRITTEN
    catalog = catalog_of(store)
    lossy = [unit for unit in catalog.manifest(SaveId(7, 1)).units if unit.slot in ("fp32", "exp_avg")]
    assert lossy and all(unit.encoding != "raw" and unit.error > 0 for unit in lossy)
    assert verify(catalog).ok
    assert not certify(resolve(catalog, SaveId(7, 1))).exact
    assert resumed(store, tmp_path)[0] == 7


def test_the_error_of_an_encoded_unit_is_over_its_raw_fragments_too(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which hold most of its norm here."""

    class Mixed(Model):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.head.register_parameter("scale", nn.Parameter(torch.full((2,), 1e3, dtype=torch.float64)))

    monkeypatch.setattr("tests.support.jobs.Model", Mixed)
    died(store, memory=memory(store, encoding="compact"))
    assert rescue_newest(tier_of(store), catalog_of(store)).outcome == WRITTEN
    errors = {str(unit.unit): unit.error for unit in catalog_of(store).manifest(SaveId(7, 1)).units}
    assert 0.0 < 100 * errors["head/fp32"] < errors["embed/fp32"] < 2e-3


def test_a_living_job_is_left_alone(store: Path) -> None:
    one = Job(store, every=4, memory=memory(store))
    one.ckpt.resume()
    for _ in range(6):
        kept_step(one)
    with pytest.raises(StoreInUseError, match="lives"):
        rescue_newest(tier_of(store), catalog_of(store))
    one.ckpt.close()
    assert rescue_newest(tier_of(store), catalog_of(store)).outcome == NOTHING


def test_fenced_before_it_began(store: Path) -> None:
    died(store)
    claim_epoch(LocalFiles(store), catalog_of(store).store_id)
    before = groups(store)
    with pytest.raises(FencedError):
        rescue_newest(tier_of(store), catalog_of(store))
    assert groups(store) == before


@pytest.mark.parametrize("moment", ["create", "sync", "link"])
def test_fenced_while_it_writes(store: Path, moment: str) -> None:
    died(store)
    files = HookedFiles(LocalFiles(store))
    before = groups(store)

    def claim(operation: str, path: str) -> None:
        if operation == moment and "00000007-000001" in path:
            files.before = lambda *_: None
            claim_epoch(LocalFiles(store), catalog_of(store).store_id)

    files.before = claim
    with pytest.raises(FencedError):
        rescue_newest(tier_of(store), open_catalog(files))
    assert [save.step for save in catalog_of(store).saves()] == [4]
    assert groups(store) == before
    plan = plan_prune(catalog_of(store), Retention())
    assert not (plan.groups or plan.temporaries or plan.unrecognised or plan.blocked)
    assert verify(catalog_of(store)).ok


def test_fenced_once_it_is_there(store: Path) -> None:
    """The claimant finds it, so that it stays."""
    died(store)
    files = HookedFiles(LocalFiles(store))

    def claim(operation: str, path: str) -> None:
        if operation == "link" and path == "manifests/00000007-000001.json":
            claim_epoch(LocalFiles(store), catalog_of(store).store_id)

    files.after = claim
    with pytest.raises(FencedError):
        rescue_newest(tier_of(store), open_catalog(files))
    assert [save.step for save in catalog_of(store).saves()] == [7, 4]
    assert verify(catalog_of(store)).ok


def test_one_that_comes_when_its_segments_were_pruned_goes_again(store: Path) -> None:
    """Stopped before the manifest had its name, for as long as another job took over, saved and pruned."""
    died(store)
    files = HookedFiles(LocalFiles(store))

    def another(operation: str, path: str) -> None:
        if operation == "link" and path == "manifests/00000007-000001.json":
            files.before = lambda *_: None
            two = Job(store, every=4, memory={"enabled": False})
            two.ckpt.resume()
            two.ckpt.save(wait=True)
            two.ckpt.close()
            execute(LocalFiles(store), plan_prune(catalog_of(store), Retention()))

    files.before = another
    with pytest.raises(FencedError):
        rescue_newest(tier_of(store), open_catalog(files))
    assert SaveId(7, 1) not in catalog_of(store).saves()
    assert segment_dir(SaveId(7, 1)) not in groups(store)
    assert verify(catalog_of(store)).ok


def test_bytes_that_are_wrong_are_not_committed(store: Path) -> None:
    died(store)
    flip(store, SaveId(7, 1))
    done = rescue_newest(tier_of(store), catalog_of(store))
    assert done.manifest is not None and done.manifest.save == SaveId(6, 1), "the one before is whole"
    assert SaveId(7, 1).name not in groups(store)
    assert verify(catalog_of(store)).ok


def test_where_all_bytes_are_wrong_nothing_is_written(store: Path) -> None:
    died(store)
    before = groups(store)
    for save in (SaveId(7, 1), SaveId(6, 1)):
        flip(store, save)
    with pytest.raises(DamagedError, match="no version in memory is whole"):
        rescue_newest(tier_of(store), catalog_of(store))
    assert groups(store) == before


def test_what_a_save_of_the_same_name_left_is_replaced(store: Path) -> None:
    """Killed in the middle of a save by hand, of the step that memory has."""
    weights = died(store)
    files = LocalFiles(store)
    files.make_dir(segment_dir(SaveId(7, 1)))
    for path in (payload_path(SaveId(7, 1), 0), f"{segment_dir(SaveId(7, 1))}/.tmp-0123456789ab-rank-00000.json"):
        file = files.create(path)
        file.write(b"half of it")
        file.close()
    assert rescue_newest(tier_of(store), catalog_of(store)).outcome == WRITTEN
    assert verify(catalog_of(store)).ok
    assert files.list_dir(segment_dir(SaveId(7, 1))) == ["rank-00000.json", "rank-00000.safetensors"]
    assert same(resumed(store, store.parent)[1], weights)


def flip(store: Path, save: SaveId) -> None:
    payload = scan_node(tier_of(store)).versions[save][0].payload
    data = bytearray(payload.read_bytes())
    data[4] ^= 1
    payload.write_bytes(data)


def test_what_jobs_on_a_copy_of_the_store_kept_is_not_written_into_it(store: Path) -> None:
    """Both claimed the same epoch: the number alone would let it pass."""
    died(store)
    copy = store.parent / "copy"
    shutil.copytree(store, copy)
    two = Job(copy, every=100, memory=memory(store))
    two.ckpt.resume()
    for _ in range(5):
        kept_step(two)
    abandoned(two)
    assert claim_epoch(LocalFiles(store), catalog_of(store).store_id).epoch == 2
    before = catalog_of(store).saves()
    assert rescue_newest(tier_of(store), catalog_of(store)).outcome == NOTHING
    assert catalog_of(store).saves() == before
    assert rescue_newest(tier_of(store), catalog_of(copy)).outcome == WRITTEN
