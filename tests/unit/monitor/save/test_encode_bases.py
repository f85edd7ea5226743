"""Bases that differences are taken to, through the whole checkpointer: whatever happens to the job or the store, a save
after it comes about and can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from monitor.api import attach_counted
from store.catalog import open_catalog
from store.errors import StorageError
from store.names import SaveId
from store.schema import Entry
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.hooked import Hook, HookedFiles, nothing
from tests.support.internals import LATER, base_bytes, decide_without_update, hook_files, packer_of, settle_save

DIFFERENCES: dict[str, Any] = {"packing": 1, "differences": True, "encoding": {"fp32": "bf16"}}


class Job:
    """Three layers under AdamW at a small learning rate, so that differences pay; data follow from the step."""

    def __init__(self, store: Path, **settings: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        values = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **DIFFERENCES, **settings}
        self.ckpt = monitor.attach((self.model, self.optimizer), values)
        self.step = self.ckpt.resume()
        self.store = store

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 64, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.step += 1
            report = self.ckpt.step()
            assert report is not None and report.skipped is None
            self.ckpt.flush()

    def hook(self) -> HookedFiles:
        return hook_files(self.ckpt)

    def newest(self) -> SaveId:
        return open_catalog(LocalFiles(self.store)).saves()[0]

    def base_of(self, fqn: str) -> str | None:
        """Of its weights in the newest save."""
        catalog, save = open_catalog(LocalFiles(self.store)), self.newest()
        parts = catalog.group(save, catalog.manifest(save).groups[save.name]).parts
        found: list[Entry] = [e for e in parts[0].entries if (e.fqn, e.slot) == (fqn, "fp32")]
        return found[0].base

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()


def test_a_layer_that_is_frozen_and_thawed_begins_with_a_new_base(tmp_path: Path) -> None:
    with Job(tmp_path, retention={"keep_last": 1, "log_spaced": False}) as job:
        job.train(3)
        assert job.base_of("1.weight") == "00000002-000001"
        freeze(job.model[1], True)
        job.train(1)
        assert job.base_of("0.weight") == "00000003-000001"
        job.ckpt.save(wait=True)  # raw: nothing rests on the first save any more
        job.train(1)
        freeze(job.model[1], False)
        job.train(3)
        assert job.newest().step == 8
        assert job.base_of("1.weight") == "00000007-000002"
        live = {name: value.to(torch.bfloat16) for name, value in job.model.named_parameters()}
    assert verify(open_catalog(LocalFiles(tmp_path))).ok
    with Job(tmp_path) as resumed:
        assert resumed.step == 8
        assert all(
            torch.equal(value.to(torch.bfloat16), live[name]) for name, value in resumed.model.named_parameters()
        )


def test_going_back_leaves_the_bases_of_this_process_behind(tmp_path: Path) -> None:
    with Job(tmp_path, retention={"keep_last": 9}) as job:
        job.train(1)
        job.ckpt.save(wait=True)  # raw: another version, which is whole
        job.train(3)
        assert job.base_of("0.weight") == "00000003-000002"
        damage(tmp_path, SaveId(2, 2), "0.weight")
        job.step = job.ckpt.resume()
        job.train(3)
        last = job.newest()
    with Job(tmp_path) as resumed:
        assert resumed.step == last.step
        assert resumed.ckpt.certificate is not None
        assert not [unit for unit in resumed.ckpt.certificate.units if unit.fallback]


@pytest.mark.parametrize("encoding", [DIFFERENCES["encoding"], "compact"])
@pytest.mark.parametrize("settled", [True, False])
def test_a_framework_that_goes_back_leaves_the_bases_behind(tmp_path: Path, encoding: Any, settled: bool) -> None:
    """It loads a checkpoint of its own, and tells this by its count of steps."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer, count = torch.optim.AdamW(model.parameters(), lr=1e-5), 0
    values = {"store": str(tmp_path), "every": 1, "metrics": {"enabled": False}, **DIFFERENCES, "encoding": encoding}
    with attach_counted((model, optimizer), values, None, lambda: count) as ckpt:
        ckpt.resume()

        def train(steps: int) -> None:
            nonlocal count
            for _ in range(steps):
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                count += 1
                ckpt.step()
                if settled or count < 6:
                    ckpt.flush()

        train(6)
        count = 3
        train(3)
        ckpt.flush()
    catalog = open_catalog(LocalFiles(tmp_path))
    newest = catalog.manifest(catalog.saves()[0])
    assert newest.save == SaveId(6, 2)
    assert any(record.bases for record in newest.units)
    assert all(SaveId.parse(name).epoch == 2 for name in newest.groups)


def test_a_save_that_fails_is_no_base(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        files = job.hook()
        files.before = refusing("link", "manifests/")
        job.train(1)
        files.before = nothing
        job.train(3)
        assert job.newest() == SaveId(4, 1)
        assert job.base_of("0.weight") == "00000003-000001"
    assert verify(open_catalog(LocalFiles(tmp_path))).ok


def test_a_save_that_broke_off_teaches_nothing_about_speed(tmp_path: Path) -> None:
    with Job(tmp_path, packing="auto", differences=False) as job:
        files = job.hook()
        files.before = refusing("sync", "segments/")
        job.train(2)
        settle_save(job.ckpt, job.step)
        assert next_level(job) is None, "no level is known"
        files.before = nothing
        job.train(1)
        settle_save(job.ckpt, job.step)
        assert next_level(job) == 1, "the one after no compression"


def test_memory_is_that_of_the_encoded_bases(tmp_path: Path) -> None:
    with Job(tmp_path, encoding="compact") as job:
        job.train(3)
        weights = sum(p.numel() for p in job.model.parameters())
        blocks = sum(-(-p.numel() // 64) for p in job.model.parameters())
        steps = 4 * len(list(job.model.parameters()))
        saved = weights * 3 + 8 * blocks + steps  # first moments differ too much to be kept
        assert saved < base_bytes(packer_of(job.ckpt)) <= 2 * saved  # the whole, and the newest


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_damage_in_a_chain_costs_no_more_than_it_must(tmp_path: Path, keep: int) -> None:
    """Whatever retention keeps otherwise, the version before the damaged one stands in: its bytes are there."""
    with Job(tmp_path, retention={"keep_last": keep, "log_spaced": False}) as job:
        job.train(7)
        assert job.base_of("0.weight") == "00000006-000001"
    damage(tmp_path, SaveId(5, 1), "0.weight")
    with Job(tmp_path) as resumed:
        assert resumed.ckpt.certificate is not None
        fallen = {unit.layer: unit.save for unit in resumed.ckpt.certificate.units if unit.fallback}
        assert fallen == {"0": "00000004-000001"}


def test_where_there_is_little_room_no_save_needs_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(tmp_path, retention={"keep_last": 1, "log_spaced": False}) as job:
        job.train(3)
        assert job.base_of("0.weight") == "00000002-000001"
        whole = sum(path.stat().st_size for path in (tmp_path / "segments/00000001-000001").iterdir())
        monkeypatch.setattr("store.retention.free_bytes", lambda files: 3 * (whole + (1 << 16)) // 2)
        job.train(2)  # after the first of them it is known
        assert job.base_of("0.weight") is None
        job.train(1)
        assert job.base_of("0.weight") is None
        assert len(list((tmp_path / "segments").iterdir())) == 1, "the chain is gone"
        monkeypatch.undo()
        job.train(2)
        assert job.base_of("0.weight") == "00000007-000001"


@pytest.mark.parametrize("staging", ["eager", "lazy"])
@pytest.mark.parametrize("large", [1e20, 3e38])
def test_values_whose_squares_are_too_large_for_float32(tmp_path: Path, large: float, staging: str) -> None:
    encoding = {"fp32": "bf16", "exp_avg_sq": "int8-log2"}
    with Job(tmp_path, encoding=encoding, staging=staging) as job:
        job.train(2)
        with torch.no_grad():
            job.model[0].weight[0, 0] = large
            job.optimizer.state[job.model[0].weight]["exp_avg_sq"][1, 1] = large
        assert decide_without_update(job.ckpt).skipped is None
        job.ckpt.flush()
    with Job(tmp_path, encoding=encoding) as resumed:
        assert resumed.step == 3
        assert resumed.model[0].weight[0, 0] == torch.tensor(large).bfloat16().float()
        found = {(u.layer, u.slot): u.drift for u in resumed.ckpt.certificate.units}  # type: ignore[union-attr]
        assert found["0", "fp32"] is not None and 0 < found["0", "fp32"] < 0.01


def next_level(job: Job) -> int | None:
    """The zstd level of an empty save with all time in the world: one above the highest that was measured."""
    return packer_of(job.ckpt).begin(LATER, 0, 1e9).level


def freeze(layer: nn.Module, frozen: bool) -> None:
    for parameter in layer.parameters():
        parameter.requires_grad_(not frozen)
        parameter.grad = None


def refusing(operation: str, folder: str) -> Hook:
    def refuse(asked: str, path: str) -> None:
        if asked == operation and path.startswith(folder):
            raise StorageError(f"{path} is refused")

    return refuse


def damage(store: Path, save: SaveId, fqn: str) -> None:
    catalog = open_catalog(LocalFiles(store))
    part = catalog.group(save, catalog.manifest(save).groups[save.name]).parts[0]
    entry = next(e for e in part.entries if (e.fqn, e.slot) == (fqn, "fp32"))
    path = store / f"segments/{save.name}/rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[part.header_bytes + entry.offset + entry.nbytes // 2] ^= 1
    path.write_bytes(data)
