"""The torch encoders' own manners; that they give numpy's bytes is in tests/contract/test_encodings.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monitor.save import torch_codecs as encoders
from store.encoding import CHUNK, ENCODINGS, WRITABLE, encoding_named
from store.errors import DamagedError, StoreError
from tests.support.entries import iter_chunks
from tests.support.reference_encodings import encode_chunk

LOSSY = [name for name in WRITABLE if not ENCODINGS[name].lossless]


@pytest.fixture
def values() -> torch.Tensor:
    return torch.rand(3, 131, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", WRITABLE)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_bytes_may_lie_anywhere(name: str, offset: int, values: torch.Tensor) -> None:
    expected, _ = encoders.encode(values, name)
    room = torch.zeros(offset + expected.numel() + 3, dtype=torch.uint8)
    out = room[offset : offset + expected.numel()]
    found, good = encoders.encode(values, name, out)
    assert found is out
    assert good
    assert out.equal(expected)
    assert not room[:offset].any()
    assert not room[offset + expected.numel() :].any()
    back = encoders.decode(out, name, torch.empty_like(values))
    assert back.equal(encoders.decode(expected, name, torch.empty_like(values)))


@pytest.mark.parametrize("name", WRITABLE)
def test_the_values_are_left_alone_and_need_no_graph(name: str, values: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(values.clone())
    data, good = encoders.encode(parameter, name)
    assert good
    assert parameter.equal(values)
    encoders.decode(data, name, parameter)
    coarse = {"int8-log2": 0.2, "int8-shared-exponent": 1.0}
    assert torch.allclose(parameter, values, atol=0.01, rtol=coarse.get(name, 0))
    assert parameter.grad_fn is None


@pytest.mark.parametrize("name", LOSSY)
def test_one_chunk_by_its_encoder(name: str, values: torch.Tensor) -> None:
    encoder = encoders.encoder_named(name)
    flat = values.view(-1)
    out = torch.empty(encoders.stored_bytes(flat, name), dtype=torch.uint8)
    assert encoder.encode(flat, out).item() is True
    assert out.numpy().tobytes() == encode_chunk(encoding_named(name), flat.numpy()).tobytes()
    assert (encoder.limits[0] == 0) == (not encoder.encode(-flat, out).item())


def test_raw_takes_any_dtype() -> None:
    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.float32):
        values = torch.arange(6).to(dtype)
        data, good = encoders.encode(values, "raw")
        assert good
        assert data.equal(values.view(torch.uint8))
        assert encoders.decode(data, "raw", torch.zeros(6, dtype=dtype)).equal(values)


def test_what_does_not_fit_together_is_refused(values: torch.Tensor) -> None:
    for out in (torch.empty(5, dtype=torch.uint8), torch.empty(2 * 393, dtype=torch.int8), torch.empty(2 * 786)[::2]):
        with pytest.raises(ValueError, match="bytes"):
            encoders.encode(values, "bf16", out)
    with pytest.raises(ValueError, match="contiguous"):
        encoders.encode(values.t(), "bf16")
    with pytest.raises(ValueError, match="float32"):
        encoders.encode(values.double(), "int8-block")
    with pytest.raises(StoreError, match="int9"):
        encoders.encode(values, "int9")
    with pytest.raises(DamagedError, match="raw"):
        encoders.encoder_named("raw")


def test_elements_with_odd_strides_that_count_as_contiguous() -> None:
    for values in (torch.ones(1).expand(1, 1), torch.ones(4)[::4], torch.empty(0).expand(3, 0)):
        for name in WRITABLE:
            data, good = encoders.encode(values, name)
            assert good
            assert data.numel() == encoders.stored_bytes(values, name)


@pytest.mark.cuda
@pytest.mark.parametrize("name", WRITABLE)
def test_cuda_gives_the_same_bytes(name: str) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x4F000000, 2 * CHUNK + 77, dtype=np.uint32)
    for values in (bits.view("<f4"), (bits >> 7).view("<f4"), rng.random(CHUNK, dtype="f4")):
        data, good = encoders.encode(torch.from_numpy(values).cuda(), name)
        expected = b"".join(encode_chunk(encoding_named(name), chunk).tobytes() for chunk in iter_chunks(values))
        assert good
        assert data.cpu().numpy().tobytes() == expected
        on_host = encoders.decode(data.cpu(), name, torch.empty(values.size))
        assert encoders.decode(data, name, torch.empty(values.size, device="cuda")).cpu().equal(on_host)
