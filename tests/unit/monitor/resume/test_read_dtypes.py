"""What a live dtype can hold of stored values: exactly, rounded, or not at all; and what a mask may become."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import monitor
from monitor.adapters.base import FragmentPlace
from monitor.resume.read import encoding_loss
from store.errors import ModelMismatchError, UnsupportedError
from store.names import BUFFER, WEIGHTS, Fragment

INF, NAN = float("inf"), float("nan")
F64, F32, F16, BF16, E4M3 = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
LOWEST = torch.finfo(F32).min


def lost(values: list[float] | torch.Tensor, stored: torch.dtype, live: torch.dtype, slot: str = WEIGHTS) -> str | None:
    host = values.to(stored) if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=stored)
    return encoding_loss(host, FragmentPlace(Fragment("a.b", slot, 0, host.numel()), live))


@pytest.mark.parametrize("slot", [WEIGHTS, BUFFER])
@pytest.mark.parametrize(
    ("values", "stored", "live"),
    [
        ([0.1, NAN, INF, -INF], F32, F32),
        ([0.5, -1.25, NAN], F32, BF16),
        ([0.5, NAN, INF, -INF, -0.0], F32, F16),
        ([0.1, NAN], BF16, F32),
        ([NAN] * 3, F64, F32),
        ([1, 2, 3], torch.int64, torch.int32),
        ([1, 0], torch.int64, torch.bool),
        ([1, 2, 300], torch.int64, F32),
        ([1.0, 2.0], F32, torch.int64),
        ([1.5, NAN], E4M3, F32),
        ([], F32, F16),
    ],
)
def test_what_is_held_exactly(values: list[float], stored: torch.dtype, live: torch.dtype, slot: str) -> None:
    assert lost(values, stored, live, slot) is None


@pytest.mark.parametrize("slot", [WEIGHTS, BUFFER])
@pytest.mark.parametrize(
    ("values", "stored", "live"),
    [
        ([0.1], F32, BF16),
        ([0.1, NAN, INF], F32, F16),
        ([1e-30], F32, F16),
        ([65519.0], F32, F16),
        ([0.1], F64, F32),
        ([2**24 + 1], torch.int64, F32),
        ([0.3], F32, E4M3),
    ],
)
def test_what_is_rounded_is_told(values: list[float], stored: torch.dtype, live: torch.dtype, slot: str) -> None:
    found = lost(values, stored, live, slot)
    assert found is not None
    assert f"a.b/{slot} was rounded from {stored} to {live}" in found


@pytest.mark.parametrize("slot", [WEIGHTS, BUFFER])
@pytest.mark.parametrize(
    ("values", "stored", "live"),
    [
        ([1e6], F32, F16),
        ([-1e9, 1.0], F32, F16),
        ([65520.0], F32, F16),
        ([1e300], F64, F32),
        ([70000], torch.int64, F16),
        ([2**40], torch.int64, torch.int32),
        ([-1], torch.int64, torch.uint8),
        ([0.5], F32, torch.int64),
        ([INF], F32, torch.int64),
        ([NAN], F32, torch.int64),
        ([2], torch.int64, torch.bool),
        ([1e9], F32, E4M3),
        ([INF], F32, E4M3),
        (torch.tensor([1 + 1j]), torch.complex64, F32),
    ],
)
def test_what_would_be_another_state_is_refused(
    values: list[float] | torch.Tensor, stored: torch.dtype, live: torch.dtype, slot: str
) -> None:
    with pytest.raises(ModelMismatchError, match=rf"a\.b/{slot}.*{stored}.*{live}.*wider dtype"):
        lost(values, stored, live, slot)


@pytest.mark.parametrize("live", [BF16, F16])
@pytest.mark.parametrize("value", [LOWEST, -LOWEST])
def test_the_extremes_of_a_dtype_in_a_buffer_become_infinite(value: float, live: torch.dtype) -> None:
    found = lost([0.0, value, 1.0], F32, live, BUFFER)
    assert found is not None
    assert f"the extremes of {F32} in a.b/buffer became infinite in {live}" in found
    assert lost([torch.finfo(F64).min], F64, F32, BUFFER) is not None


@pytest.mark.parametrize("live", [BF16, F16])
def test_the_extremes_of_a_dtype_in_a_weight_are_refused(live: torch.dtype) -> None:
    with pytest.raises(ModelMismatchError, match="too large"):
        lost([LOWEST], F32, live, WEIGHTS)


def test_large_tensors_are_looked_at_to_the_end() -> None:
    values = torch.zeros((1 << 22) + 1)
    assert lost(values, F32, F16) is None
    values[0] = 0.1
    assert "rounded" in (lost(values, F32, F16) or "")
    values[-1] = LOWEST
    assert "infinite" in (lost(values, F32, F16, BUFFER) or "")
    values[0] = 1e6
    with pytest.raises(ModelMismatchError):
        lost(values, F32, F16, BUFFER)


# ---- the same through a store


class Masked(nn.Module):
    """A causal mask as an fp32 model makes it, and a statistic."""

    def __init__(self, forbidden: float = LOWEST, statistic: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((8, 8), forbidden).triu(1))
        self.register_buffer("largest", torch.tensor(statistic))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def attached(store: Path, model: nn.Module) -> monitor.Checkpointer:
    settings = {"store": str(store), "every": 1, "metrics": {"enabled": False}}
    return monitor.attach((model, torch.optim.SGD(model.parameters(), lr=0.1)), settings)


def save(store: Path, model: nn.Module) -> None:
    with attached(store, model) as ckpt:
        ckpt.resume()
        assert ckpt.save(wait=True).skipped is None


@pytest.mark.parametrize("forbidden", [LOWEST, -INF])
@pytest.mark.parametrize("live", [BF16, F16])
def test_a_mask_of_an_fp32_run_is_what_the_dtype_makes_of_it(
    tmp_path: Path, live: torch.dtype, forbidden: float, caplog: pytest.LogCaptureFixture
) -> None:
    one = Masked(forbidden)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.fill_(0.5)
    save(tmp_path / "store", one)
    other = Masked(0.0).to(live)
    with attached(tmp_path / "store", other) as ckpt:
        assert ckpt.resume() == 0
        certificate = ckpt.certificate
    assert torch.equal(other.mask, one.mask.to(live))
    assert bool(other.mask.isinf().any()) and not bool(other.mask.isnan().any())
    assert certificate is not None and certificate.exact == (forbidden == -INF)
    assert any("became infinite" in problem for problem in certificate.problems) == (forbidden == LOWEST)
    assert ("became infinite" in caplog.text) == (forbidden == LOWEST)


def test_a_statistic_that_is_too_large_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    save(tmp_path / "store", Masked(statistic=1e6))
    other = Masked(0.0).half()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with attached(tmp_path / "store", other) as ckpt, pytest.raises(ModelMismatchError, match=r"largest/buffer"):
        ckpt.resume()
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


# ---- shapes


class Bank(nn.Module):
    """A buffer that grows while training."""

    def __init__(self, size: int, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)
        self.register_buffer("bank", torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_buffer_that_has_grown_says_what_to_do(tmp_path: Path) -> None:
    save(tmp_path / "store", Bank(7))
    with attached(tmp_path / "store", Bank(4)) as ckpt, pytest.raises(ModelMismatchError) as caught:
        ckpt.resume()
    text = str(caught.value)
    assert "bank (7,) -> (4,)" in text
    assert "give bank the shape (7,) before resume()" in text
    assert "persistent=False" in text and "state=[...]" in text
    assert "fix the model" not in text


def test_a_weight_of_another_shape_says_nothing_of_buffers(tmp_path: Path) -> None:
    save(tmp_path / "store", Bank(7, width=8))
    with attached(tmp_path / "store", Bank(7, width=9)) as ckpt, pytest.raises(ModelMismatchError) as caught:
        ckpt.resume()
    assert "fix the model" in str(caught.value) and "persistent" not in str(caught.value)


def test_a_model_that_does_not_know_its_shapes_yet_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(UnsupportedError, match=r"0\.weight has no shape yet.*run a batch"):
        attached(tmp_path / "store", model)
