"""Encodings where something is in their way: models in bfloat16, values that stand still late, policies that save a
part, and bounds on drift."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monitor
from monitor.config.schema import ENCODINGS
from monitor.save.encode import squared
from store.catalog import open_catalog
from store.encoding import RAW, encoding_named
from store.resolve import newest_resumable
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.internals import decide_without_update, hold_writer
from tests.support.reference_encodings import encode_chunk

DIFFERENCES = {"packing": 1, "differences": True}
DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip
State = dict[tuple[str, str], torch.Tensor]


class Job:
    """Two blocks and a head under AdamW, on data that follow from the step."""

    def __init__(self, store: Path, dtype: torch.dtype = torch.float32, seed: int = 3, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 96), nn.Linear(96, 4)).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        values = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **settings}
        self.ckpt = monitor.attach((self.model, self.optimizer), values)
        self.step = self.ckpt.resume()

    def update(self) -> None:
        generator = torch.Generator().manual_seed(self.step)
        self.optimizer.zero_grad()
        x = torch.randn(16, 96, generator=generator).to(self.model[0].weight.dtype)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.step += 1

    def train(self, steps: int, flush: bool = True) -> list[State]:
        """The state at each of the steps."""
        seen = []
        for _ in range(steps):
            self.update()
            report = self.ckpt.step()
            assert report is not None and report.skipped is None
            seen.append(self.state())
            if flush:
                self.ckpt.flush()
        return seen

    def state(self) -> State:
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name, "fp32"] = parameter.detach().clone()
            for slot in ("exp_avg", "exp_avg_sq"):
                found[name, slot] = self.optimizer.state[parameter][slot].clone()
        return found

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close(save=False)


def decoded(values: torch.Tensor, name: str) -> torch.Tensor:
    encoding, flat = encoding_named(name), values.numpy().reshape(-1)
    back = encoding.decode(encode_chunk(encoding, flat), flat.size, "F32")
    return torch.from_numpy(back.view(np.float32).copy()).view(values.shape)


def compact(state: State) -> State:
    return {key: decoded(values, ENCODINGS["compact"][key[1]]) for key, values in state.items()}


@pytest.mark.parametrize("settings", [{}, {"packing": 1}, DIFFERENCES], ids=["plain", "packed", "differences"])
@pytest.mark.parametrize("encoding", ["compact", "careful"])
def test_a_model_in_bfloat16_is_stored_as_it_is_and_exact(
    tmp_path: Path, encoding: str, settings: dict[str, Any]
) -> None:
    with Job(tmp_path, torch.bfloat16, encoding=encoding, **settings) as job:
        assert {values.dtype for values in job.train(3)[-1].values()} == {torch.bfloat16}
        live = job.state()
        job.update()
        after = job.state()
    with Job(tmp_path, torch.bfloat16, seed=4, encoding=encoding, **settings) as resumed:
        certificate = resumed.ckpt.certificate
        assert certificate is not None and certificate.exact
        assert {unit.encoding for unit in certificate.units} == {RAW}
        assert {unit.drift for unit in certificate.units} == {0.0}
        assert resumed.state().keys() == live.keys()
        assert all(torch.equal(values, live[key]) for key, values in resumed.state().items())
        resumed.update()
        assert all(torch.equal(values, after[key]) for key, values in resumed.state().items())


def test_a_model_half_in_bfloat16_is_not_exact(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(96, 96).bfloat16(), nn.LayerNorm(96), nn.Linear(96, 96), nn.Linear(96, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values = {"store": str(tmp_path), "every": 1, "metrics": {"enabled": False}, "encoding": "compact"}
    with monitor.attach((model, optimizer), values) as ckpt:
        ckpt.resume()
        hidden = model[0](torch.ones(4, 96).bfloat16()).float()
        model[3](model[2](model[1](hidden))).square().mean().backward()
        optimizer.step()
        ckpt.step()
        ckpt.flush()
        assert ckpt.resume() == 1
        assert ckpt.certificate is not None and not ckpt.certificate.exact
        found = {(unit.layer, unit.slot): unit.encoding for unit in ckpt.certificate.units}
    assert found["0", "fp32"] == RAW
    assert found["2", "fp32"] == "int16-shared-exponent"


@pytest.mark.parametrize("staging", ["eager", "lazy"])
@pytest.mark.parametrize("settings", [{}, DIFFERENCES], ids=["plain", "differences"])
def test_a_writer_that_comes_late_encodes_the_state_of_the_decision(
    tmp_path: Path, staging: str, settings: dict[str, Any]
) -> None:
    with Job(tmp_path, encoding="compact", staging=staging, **settings) as job:
        job.train(2)
        release = threading.Event()
        hold_writer(job.ckpt, release)
        live = job.train(1, flush=False)[-1]
        job.update()  # the live state moves on, and is not touched by what decoding gives
        after = job.state()
        release.set()
        job.ckpt.flush()
        assert all(torch.equal(values, after[key]) for key, values in job.state().items())
        wanted = compact(live)
    with Job(tmp_path, seed=4) as resumed:
        assert resumed.step == 3
        assert all(torch.equal(values, wanted[key]) for key, values in resumed.state().items())


@pytest.mark.parametrize(
    "policy", [{"name": "parity", "k": 2}, {"name": "threshold", "threshold": 0.3}],
    ids=lambda policy: policy["name"],
)  # fmt: skip
@pytest.mark.parametrize("settings", [{}, DIFFERENCES], ids=["plain", "differences"])
def test_policies_that_save_a_part_of_what_is_encoded(
    tmp_path: Path, policy: dict[str, Any], settings: dict[str, Any]
) -> None:
    with Job(tmp_path, encoding="compact", policy=policy, **settings) as job:
        states = [compact(state) for state in job.train(7)]
    assert verify(open_catalog(LocalFiles(tmp_path))).ok
    with Job(tmp_path, seed=4, policy=policy, resume={"at": "newest"}) as resumed:
        certificate = resumed.ckpt.certificate
        assert certificate is not None and not certificate.exact and resumed.step >= 6
        steps = {(unit.layer, unit.slot): unit.step for unit in certificate.units}
        assert len(set(steps.values())) > 1
        assert {unit.encoding for unit in certificate.units} == {
            "int16-shared-exponent",
            "int8-shared-exponent-128",
            "int8-log2",
        }
        for (name, slot), values in resumed.state().items():
            step = steps[name.split(".")[0], slot]
            assert torch.equal(values, states[step - 1][name, slot]), (name, slot, step)


def test_what_an_encoding_loses_is_known_however_small_or_large_the_values_are() -> None:
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-30, 1e-22, 1e-12, 1.0, 1e12, 1e25, 1e37):
        values = torch.randn(40_000, generator=generator) * scale
        wanted = float(values.double().square().sum())
        assert 0 < wanted < float("inf")
        assert squared(values) == pytest.approx(wanted, rel=1e-5)
    assert squared(torch.zeros(5)) == 0.0


def test_what_tiny_second_moments_lost_is_not_called_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, encoding={"exp_avg_sq": "int8-log2"}) as job:
        job.train(1)
        with torch.no_grad():
            for state in job.optimizer.state.values():
                state["exp_avg_sq"].mul_(1e-18)
        assert decide_without_update(job.ckpt).skipped is None
    manifest = newest_resumable(open_catalog(LocalFiles(tmp_path)))[0].manifest
    errors = [record.error for record in manifest.units if record.slot == "exp_avg_sq"]
    assert len(errors) == 4 and all(1e-4 < error < 0.2 for error in errors)


def test_buffers_of_every_dtype_come_back_packed_and_as_differences(tmp_path: Path) -> None:
    def build(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Linear(8, 8)
        for dtype in DTYPES:
            values = torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
            model.register_buffer(str(dtype).replace("torch.", "of_"), values)
        model.register_buffer("scalar", torch.tensor(seed))
        return model

    def attached(model: nn.Module) -> monitor.Checkpointer:
        values = {"store": str(tmp_path), "every": 1, "metrics": {"enabled": False}, "encoding": "compact"}
        return monitor.attach((model, torch.optim.AdamW(model.parameters())), {**values, **DIFFERENCES})

    model, other = build(1), build(2)
    with attached(model) as ckpt:
        ckpt.resume()
        for _ in range(3):
            for buffer in model.buffers():
                buffer.copy_(1 - buffer.double())
            ckpt.step()
            ckpt.flush()
    with attached(other) as ckpt:
        assert ckpt.resume() == 3
        assert ckpt.certificate is not None
        assert {unit.encoding for unit in ckpt.certificate.units if unit.slot == "buffer"} == {RAW}
    for one, two in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(one.double(), two.double())


def test_what_is_stored_raw_in_between_counts_in_the_size_of_the_unit(tmp_path: Path) -> None:
    with Job(tmp_path, encoding={"exp_avg_sq": "int8-log2"}) as job:
        job.train(1)
        bias = job.optimizer.state[job.model[0].bias]["exp_avg_sq"]
        with torch.no_grad():
            bias.mul_(1e3)[0] = -1e-12  # which the encoding does not hold
        assert decide_without_update(job.ckpt).skipped is None
        live = job.state()
    weight = live["0.weight", "exp_avg_sq"]
    back = decoded(weight, "int8-log2")
    lost = float((back - weight).double().square().sum())
    size = float(back.double().square().sum() + bias.double().square().sum())
    manifest = newest_resumable(open_catalog(LocalFiles(tmp_path)))[0].manifest
    record = next(record for record in manifest.units if (record.layer, record.slot) == ("0", "exp_avg_sq"))
    assert record.error == record.drift == pytest.approx((lost / size) ** 0.5, rel=1e-4)
