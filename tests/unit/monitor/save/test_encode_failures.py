"""Ways in which saves that are encoded, or several of one step, could have misled: each was seen to, once."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from monitor.save.encode import LIFE
from monitor.save.torch_codecs import EncodedCopy
from store.catalog import open_catalog
from store.certificate import certify
from store.errors import ConfigError
from store.names import FROZEN, SaveId
from store.resolve import newest_resumable
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.internals import LATER, base_bytes, hold_writer, job_of, packer_of, settle_save


class Job:
    """Any model under AdamW."""

    def __init__(self, store: Path, model: nn.Module | None = None, lr: float = 1e-3, **settings: Any) -> None:
        torch.manual_seed(3)
        self.model = model or nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=lr)
        values = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **settings}
        self.ckpt = monitor.attach((self.model, self.optimizer), values)
        self.ckpt.resume()

    def update(self, size: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 64) * size).square().mean().backward()
        self.optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.update()
            self.ckpt.step()
            self.ckpt.flush()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close(save=False)


def exact(store: Path) -> bool:
    return certify(newest_resumable(open_catalog(LocalFiles(store)))[0]).exact


def flip(store: Path, save: SaveId, fqn: str, slot: str) -> None:
    catalog = open_catalog(LocalFiles(store))
    part = catalog.group(save, catalog.manifest(catalog.saves()[0]).groups[save.name]).parts[0]
    entry = next(e for e in part.entries if (e.fqn, e.slot) == (fqn, slot))
    path = store / f"segments/{save.name}/rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[part.header_bytes + entry.offset] ^= 1
    path.write_bytes(data)


# ---- several saves of one step


def test_a_branch_that_was_left_is_never_taken_for_exact(tmp_path: Path) -> None:
    with Job(tmp_path, policy={"name": "parity", "k": 2}) as job:
        job.train(4)
        held = threading.Event()

        hold_writer(job.ckpt, held)
        job.update()
        job.ckpt.step()
        threading.Timer(0.5, held.set).start()
        job.ckpt.resume()
        torch.manual_seed(99)
        job.update(3.0)
        job.ckpt.step()
        job.ckpt.flush()
        live = [parameter.detach().clone() for parameter in job.model.parameters()]
    resumed = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with Job(tmp_path, resumed) as again:
        assert again.ckpt.certificate is not None
        same = all(torch.equal(a, b) for a, b in zip(live, resumed.parameters(), strict=True))
        assert same or not again.ckpt.certificate.exact


def test_a_fallback_to_another_save_of_the_step_is_not_exact(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.train(1)
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.mul_(0.5)
        job.ckpt.save(wait=True)
    newest = open_catalog(LocalFiles(tmp_path)).saves()[0]
    assert newest.step == 1 and newest.epoch > 1 and exact(tmp_path)
    flip(tmp_path, newest, "0.weight", "fp32")
    with Job(tmp_path) as again:
        assert again.ckpt.certificate is not None
        assert [unit.fallback for unit in again.ckpt.certificate.units].count(True) == 1
        assert not again.ckpt.certificate.exact


def test_a_layer_that_the_health_gate_held_back_is_not_exact(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.train(1)
        with torch.no_grad():
            job.model[1].weight.mul_(0.5)  # type: ignore[index]
            job.model[0].weight[0, 0] = float("nan")  # type: ignore[index]
        job.ckpt.save(wait=True)
    assert not exact(tmp_path)


# ---- one base for many


def test_a_base_does_not_live_for_ever(tmp_path: Path) -> None:
    settings = {"encoding": "compact", "packing": 1, "differences": True, "retention": {"keep_last": 99}}
    with Job(tmp_path, lr=1e-7, **settings) as job:
        job.train(LIFE + 3)
    catalog = open_catalog(LocalFiles(tmp_path))
    resting = [catalog.manifest(save).units for save in catalog.saves()]
    first = SaveId(1, 1).name
    assert sum(any(first in unit.bases for unit in units) for units in resting) == LIFE


def test_one_bad_bit_in_a_base_does_not_take_every_commit(tmp_path: Path) -> None:
    settings = {"encoding": "compact", "packing": 1, "differences": True}
    retention = {"keep_last": 2, "log_spaced": False}
    with Job(tmp_path, lr=1e-7, retention=retention, **settings) as job:
        job.train(LIFE + 6)
    catalog = open_catalog(LocalFiles(tmp_path))
    unit = next(one for one in catalog.manifest(catalog.saves()[0]).units if one.layer == "0" and one.slot == "fp32")
    flip(tmp_path, SaveId.parse(unit.bases[0]), "0.weight", "fp32")
    resumable = verify(open_catalog(LocalFiles(tmp_path))).resumable
    assert resumable is not None
    with Job(tmp_path, **settings) as again:
        assert again.ckpt.certificate is not None


# ---- what encoding at staging may run into


@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_no_memory_for_encoding_costs_the_economy_not_the_training(
    tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: EncodedCopy) -> None:
        raise torch.OutOfMemoryError("no room on the device")

    monkeypatch.setattr(EncodedCopy, "_encode", refuse)
    with Job(tmp_path, encoding="compact", encode="staging", staging=staging) as job:
        job.train(2)
        job.update()
        live = {name: value.clone() for name, value in job.model.state_dict().items()}
        job.ckpt.step()
        job.ckpt.flush()
    assert exact(tmp_path)  # all of it was copied as it is
    resumed = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with Job(tmp_path, resumed):
        assert all(torch.equal(value, live[name]) for name, value in resumed.state_dict().items())


def test_the_same_values_are_refused_wherever_they_are_encoded(tmp_path: Path) -> None:
    told = []
    for encode in ("staging", "saving"):
        with Job(tmp_path / encode, encoding={"fp32": "bf16"}, encode=encode) as job:
            with torch.no_grad():
                job.model[0].weight[0, 0] = 3.35e38  # type: ignore[index]
            job.ckpt.save()
            job.update()
            with torch.no_grad():
                job.model[0].weight[0, 0] = 3.35e38  # type: ignore[index]
            job.ckpt.step()
            job.ckpt.flush()
        catalog = open_catalog(LocalFiles(tmp_path / encode))
        save = catalog.saves()[0]
        part = catalog.group(save, catalog.manifest(save).groups[save.name]).parts[0]
        told.append(next(e.encoding for e in part.entries if (e.fqn, e.slot) == ("0.weight", "fp32")))
    assert told == ["raw", "raw"]


def test_bytes_that_an_encoder_does_not_vouch_for_are_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check beforehand and the encoder's own may come apart one day: then the save fails, and is reported."""
    with Job(tmp_path) as job:
        job.train(2)
    monkeypatch.setattr("monitor.save.encode.in_range", lambda values, unsigned: torch.ones((), dtype=torch.bool))
    with Job(tmp_path, encoding={"exp_avg": "int8-log2"}) as job:  # holds no negative values
        job.update()
        job.ckpt.step()
        job.ckpt.flush()
    assert job.ckpt.metrics.registry.get_sample_value("driftpoint_failures_total", {"reason": "SaveError"}) == 1
    assert open_catalog(LocalFiles(tmp_path)).saves() == [SaveId(2, 1), SaveId(1, 1)]
    assert verify(open_catalog(LocalFiles(tmp_path))).ok


# ---- memory, and settings


def test_no_copy_is_kept_of_what_does_not_move(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    with Job(tmp_path, model, packing=1, differences=True) as job:
        job.train(2)
        bases = packer_of(job.ckpt).begin(LATER, 0, None).bases
        assert bases and not any(fragment.slot == FROZEN for fragment in bases)


def test_a_save_by_hand_keeps_no_copy_either(tmp_path: Path) -> None:
    with Job(tmp_path, encoding={"fp32": "bf16"}, packing=1, differences=True) as job:
        job.train(2)
        packer = packer_of(job.ckpt)
        before = base_bytes(packer)
        job.ckpt.save(wait=True)
        assert base_bytes(packer) <= before


@pytest.mark.parametrize("encoding", ["int8-block", "int8-shared-exponent"])
@pytest.mark.parametrize("slot", ["exp_avg_sq", "max_exp_avg_sq", "square_avg"])
def test_what_updates_are_divided_by_is_never_rounded_down_to_nothing(tmp_path: Path, slot: str, encoding: str) -> None:
    with pytest.raises(ConfigError, match=f"{slot}.*int8-log2"):
        Job(tmp_path, encoding={slot: encoding})


def test_a_slot_that_there_is_not_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "driftpoint"), Job(tmp_path, encoding={"weights": "bf16"}) as job:
        job.train(2)
    told = [record.message for record in caplog.records if "weights" in record.message]
    assert len(told) == 1 and "fp32" in told[0]


def test_observe_sees_what_encoding_would_lose(tmp_path: Path) -> None:
    settings = {"encoding": "compact"}
    with Job(tmp_path / "none", lr=0.0, policy="observe", **settings) as watching, Job(
        tmp_path / "real", lr=0.0, **settings
    ) as saving:  # fmt: skip
        seen = []
        for job in (watching, saving):
            torch.manual_seed(7)
            for _ in range(2):
                job.update()
                job.ckpt.step()
                job.ckpt.flush()
            settle_save(job.ckpt, 2)
            inner = job_of(job.ckpt)
            local = inner.table.local()
            found = {unit: inner.meter.measure(unit, local[unit].tensors) for unit in local if unit.slot == "fp32"}
            seen.append({str(unit): measure.moved_sq for unit, measure in found.items()})
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)
    assert all(drift for drift in seen[0].values())
