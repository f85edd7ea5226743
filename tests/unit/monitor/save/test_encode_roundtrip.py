"""Saves in every encoding, packed and as differences: what a resume gives back is what decoding gives, to the bit, and
drift, error and certificate say so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monitor
import policies.encodings
from monitor.config.schema import ENCODINGS
from monitor.save import torch_codecs
from monitor.save.encode import LIFE
from store.catalog import open_catalog
from store.encoding import ENCODINGS as BY_NAME
from store.encoding import INT8_SQRT_BLOCK, RAW, encoding_named
from store.errors import ConfigError
from store.names import SaveId, Unit
from store.resolve import newest_resumable
from store.schema import Entry
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.reference_encodings import encode_chunk

SLOTS = ("fp32", "exp_avg", "exp_avg_sq")
WAYS: dict[str, dict[str, Any]] = {
    "compact": {"encoding": "compact"},
    "careful": {"encoding": "careful"},
    "compact while staging": {"encoding": "compact", "encode": "staging"},
    "careful while staging, differences": {
        "encoding": "careful",
        "encode": "staging",
        "packing": 1,
        "differences": True,
    },
    "packed": {"packing": 1},
    "compact packed": {"encoding": "compact", "packing": 1},
    "differences": {"packing": 1, "differences": True},
    "compact differences": {"encoding": "compact", "packing": 3, "differences": True},
    "careful differences": {"encoding": "careful", "packing": 1, "differences": True},
}


class Job:
    """Two blocks and a head under AdamW, on data that follows from the step."""

    def __init__(self, store: Path, lr: float = 1e-3, **settings: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 96), nn.Linear(96, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        values = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **settings}
        self.ckpt = monitor.attach((self.model, self.optimizer), values)
        self.step = self.ckpt.resume()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 96, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.step += 1
            report = self.ckpt.step()
            assert report is not None and report.skipped is None
            self.ckpt.flush()

    def state(self) -> dict[tuple[str, str], torch.Tensor]:
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name, "fp32"] = parameter.detach().clone()
            for slot in ("exp_avg", "exp_avg_sq"):
                found[name, slot] = self.optimizer.state[parameter][slot].clone()
        return found

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()


def decoded(values: torch.Tensor, name: str) -> torch.Tensor:
    encoding, flat = encoding_named(name), values.numpy().reshape(-1)
    back = encoding.decode(encode_chunk(encoding, flat), flat.size, "F32")
    return torch.from_numpy(back.view(np.float32).copy()).view(values.shape)


def encodings(way: str) -> Mapping[str, str]:
    return ENCODINGS[WAYS[way].get("encoding", "raw")]


def entries(store: Path, step: int) -> list[Entry]:
    catalog = open_catalog(LocalFiles(store))
    save = SaveId(step, 1)
    return [entry for part in catalog.group(save, catalog.manifest(save).groups[save.name]).parts.values()
            for entry in part.entries]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_resume_gives_back_what_decoding_gives(tmp_path: Path, way: str) -> None:
    with Job(tmp_path, **WAYS[way]) as job:
        job.train(6)
        live = job.state()
    with Job(tmp_path, **WAYS[way]) as resumed:
        assert resumed.step == 6
        assert resumed.ckpt.certificate is not None
        assert resumed.ckpt.certificate.exact == (encodings(way) == {})
        for (name, slot), found in resumed.state().items():
            wanted = decoded(live[name, slot], encodings(way).get(slot, RAW)) if encodings(way) else live[name, slot]
            assert torch.equal(found, wanted), (name, slot)
    assert verify(open_catalog(LocalFiles(tmp_path))).ok


@pytest.mark.parametrize("way", WAYS)
def test_the_manifest_knows_what_was_lost(tmp_path: Path, way: str) -> None:
    with Job(tmp_path, **WAYS[way]) as job:
        job.train(3)
        live = job.state()
    resolution, _ = newest_resumable(open_catalog(LocalFiles(tmp_path)))
    for record in resolution.manifest.units:
        name = encodings(way).get(record.slot, RAW)
        assert record.encoding == name
        if name == RAW:
            assert (record.error, record.drift) == (0.0, 0.0)
            continue
        mine = {
            key: values for key, values in live.items() if key[1] == record.slot and key[0].startswith(record.layer)
        }
        back = {key: decoded(values, name) for key, values in mine.items()}
        lost = sum(float((back[key] - values).double().square().sum()) for key, values in mine.items())
        size = sum(float(values.double().square().sum()) for values in back.values())
        assert record.error == pytest.approx((lost / size) ** 0.5, rel=1e-5)
        assert record.drift == record.error > 0


def test_where_it_is_encoded_makes_no_difference(tmp_path: Path) -> None:
    told = []
    for encode in ("staging", "saving"):
        with Job(tmp_path / encode, encoding="compact", encode=encode) as job:
            job.train(3)
        manifest = open_catalog(LocalFiles(tmp_path / encode)).manifest(SaveId(3, 1))
        stored = [(e.fqn, e.slot, e.encoding, e.xxh3_128) for e in entries(tmp_path / encode, 3)]
        told.append((stored, {record.unit: pytest.approx(record.error, rel=1e-5) for record in manifest.units}))
    assert told[0] == told[1]


def test_drift_is_measured_against_what_decoding_gives(tmp_path: Path) -> None:
    settings = {
        "encoding": "compact",
        "drift": {"width": 1 << 15},  # more than any unit has, so each is kept whole
        "policy": {"name": "threshold", "threshold": 1e9},
    }
    with Job(tmp_path, **settings) as job:
        job.train(1)  # the first save is full
        first = job.state()
        generator = torch.Generator().manual_seed(1)
        job.optimizer.zero_grad()
        job.model(torch.randn(16, 96, generator=generator)).square().mean().backward()
        job.optimizer.step()
        told = job.ckpt.step()
        assert told is not None
        now = job.state()
    shown = {(one.unit.layer, one.unit.slot): one.drift for one in told.stats}
    for (layer, slot), drift in shown.items():
        back = {key: decoded(values, ENCODINGS["compact"][slot]) for key, values in first.items()
                if key[1] == slot and key[0].startswith(layer)}  # fmt: skip
        moved = sum(float((now[key] - values).double().square().sum()) for key, values in back.items())
        size = sum(float(values.double().square().sum()) for values in back.values())
        assert drift == pytest.approx((moved / size) ** 0.5, rel=1e-5)


def test_differences_are_taken_to_a_base_while_they_pay(tmp_path: Path) -> None:
    with Job(tmp_path, lr=1e-5, encoding={"fp32": "bf16"}, packing=1, differences=True) as job:
        job.train(8)
    first = {(e.fqn, e.slot): e for e in entries(tmp_path, 1)}
    last = {(e.fqn, e.slot): e for e in entries(tmp_path, 8)}
    weight = ("0.weight", "fp32")
    assert first[weight].base is None and last[weight].base == "00000007-000001"
    assert last[weight].nbytes < 0.5 * first[weight].nbytes
    manifest = open_catalog(LocalFiles(tmp_path)).manifest(SaveId(8, 1))
    assert "00000001-000001" in manifest.groups


def test_a_manifest_lists_all_that_a_chain_needs_and_chains_end(tmp_path: Path) -> None:
    with Job(tmp_path, lr=1e-4, encoding={"fp32": "bf16"}, packing=1, differences=True,
             retention={"keep_last": 99}) as job:  # fmt: skip
        job.train(3 * LIFE + 4)
    catalog, first, begun, chain = open_catalog(LocalFiles(tmp_path)), "", list[int](), list[str]()
    for save in reversed(catalog.saves()):
        entry = next(e for e in entries(tmp_path, save.step) if (e.fqn, e.slot) == ("0.weight", "fp32"))
        if entry.base is None:
            first, chain = save.name, []
        elif entry.base == first:
            begun.append(save.step)
            chain = [first]
        assert entry.base == (chain[-1] if chain else None)
        unit = next(one for one in catalog.manifest(save).units if one.unit == Unit("0", "fp32"))
        assert set(chain) <= set(unit.bases) <= set(catalog.manifest(save).groups)
        chain.append(save.name)
    assert begun == [2, LIFE + 3, 2 * LIFE + 3, 3 * LIFE + 3]
    assert catalog.record.reader == 6


def test_a_damaged_base_costs_what_depends_on_it(tmp_path: Path) -> None:
    with Job(tmp_path, lr=1e-5, encoding={"fp32": "bf16"}, packing=1, differences=True,
             retention={"keep_last": 9}) as job:  # fmt: skip
        job.train(4)
    base = next(e for e in entries(tmp_path, 1) if (e.fqn, e.slot) == ("0.weight", "fp32"))
    path = tmp_path / "segments/00000001-000001/rank-00000.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    data = bytearray(path.read_bytes())
    data[header + base.offset + base.nbytes // 2] ^= 1
    path.write_bytes(data)
    report = verify(open_catalog(LocalFiles(tmp_path)))
    assert report.resumable is None  # the weights of block 0 have no version that does not rest on it
    with pytest.raises(Exception, match=r"00000001-000001|whole"):
        Job(tmp_path)


def test_a_save_that_is_asked_for_is_exact(tmp_path: Path) -> None:
    with Job(tmp_path, encoding="compact", packing=1) as job:
        job.train(2)
        job.ckpt.save(wait=True)
        live = job.state()
    with Job(tmp_path, encoding="compact") as resumed:
        assert resumed.ckpt.certificate is not None and resumed.ckpt.certificate.exact
        assert all(torch.equal(values, live[key]) for key, values in resumed.state().items())


class EarlierEncoder:
    """``int8-sqrt-block``, as earlier releases wrote it."""

    limits = 0.0, 3.3e38

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(torch.from_numpy(encode_chunk(BY_NAME[INT8_SQRT_BLOCK], values.numpy())))
        return torch.tensor(True)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.from_numpy(BY_NAME[INT8_SQRT_BLOCK].decode(data.numpy(), out.numel(), "F32")))


def test_a_store_of_an_earlier_release_is_resumed_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    differences = {"packing": 1, "differences": True}
    with monkeypatch.context() as patch:
        patch.setitem(torch_codecs._ENCODERS, INT8_SQRT_BLOCK, EarlierEncoder())
        patch.setattr(policies.encodings, "WRITABLE", sorted(BY_NAME))
        with Job(tmp_path, encoding={"exp_avg_sq": INT8_SQRT_BLOCK}, **differences) as job:
            job.train(2)
            live = job.state()
    with pytest.raises(ConfigError, match="can only be read: take int8-log2"):
        Job(tmp_path, encoding={"exp_avg_sq": INT8_SQRT_BLOCK})
    assert open_catalog(LocalFiles(tmp_path)).record.reader == 1
    with Job(tmp_path, encoding="compact", **differences) as resumed:
        for (name, slot), found in resumed.state().items():
            flat = live[name, slot].numpy().reshape(-1)
            if slot == "exp_avg_sq":
                flat = BY_NAME[INT8_SQRT_BLOCK].decode(encode_chunk(BY_NAME[INT8_SQRT_BLOCK], flat), flat.size, "F32")
            assert np.array_equal(found.numpy().reshape(-1), flat), (name, slot)
        resumed.train(2)
    catalog = open_catalog(LocalFiles(tmp_path))
    assert {unit.encoding for unit in catalog.manifest(catalog.saves()[0]).units} == {
        "int16-shared-exponent",
        "int8-shared-exponent-128",
        "int8-log2",
    }
    assert catalog.record.reader == 6
    assert verify(catalog).ok


@pytest.mark.parametrize("encode", ["staging", "saving"])
def test_values_that_an_encoding_cannot_hold_are_stored_raw(tmp_path: Path, encode: str) -> None:
    with Job(tmp_path, encoding={"fp32": "int8-log2"}, encode=encode) as job:  # weights have both signs
        job.train(1)
        live = job.state()
    assert {e.encoding for e in entries(tmp_path, 1)} <= {"raw", "int8-log2"}
    assert next(e for e in entries(tmp_path, 1) if (e.fqn, e.slot) == ("0.weight", "fp32")).encoding == "raw"
    with Job(tmp_path, encoding={"fp32": "int8-log2"}) as resumed:
        assert torch.equal(resumed.state()["0.weight", "fp32"], live["0.weight", "fp32"])


@pytest.mark.parametrize("encode", ["staging", "saving"])
def test_values_that_are_not_finite_never_replace_a_version(tmp_path: Path, encode: str) -> None:
    with Job(tmp_path, encoding="compact", encode=encode) as job:
        job.train(2)
        with torch.no_grad():
            job.model[0].weight[0, 0] = float("nan")
        job.ckpt.save()
        job.ckpt.flush()
    manifest = newest_resumable(open_catalog(LocalFiles(tmp_path)))[0].manifest
    assert {u.version.step for u in manifest.units if u.layer == "0" and u.slot == "fp32"} == {2}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"encoding": "compact", "bounds": {"precision": "exact"}}, "loses bits"),
        ({"encoding": "compakt"}, "did you mean 'compact'"),
        ({"encoding": {"fp32": "bf61"}}, "did you mean 'bf16'"),
        ({"differences": True}, "packing"),
        ({"packing": 40}, "packing"),
    ],
)
def test_senseless_settings(tmp_path: Path, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Job(tmp_path, **settings)
