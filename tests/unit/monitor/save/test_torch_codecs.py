"""The torch encoders' own manners; that they give numpy's bytes is in tests/contract/test_encodings.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monitor.save.torch_codecs import encoder_named
from store.encoding import CHUNK, ENCODINGS, WRITABLE, encoding_named
from store.errors import DamagedError
from tests.support.entries import iter_chunks
from tests.support.reference_encodings import encode_chunk
from tests.support.torch_encodings import decode, encode

LOSSY = [name for name in WRITABLE if not ENCODINGS[name].lossless]


@pytest.fixture
def values() -> torch.Tensor:
    return torch.rand(393, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_bytes_may_lie_anywhere(name: str, offset: int, values: torch.Tensor) -> None:
    before = values.clone()
    expected, _ = encode(values, name)
    room = torch.zeros(offset + expected.numel() + 3, dtype=torch.uint8)
    out = room[offset : offset + expected.numel()]
    assert encode(values, name, out)[1]
    assert values.equal(before)
    assert out.equal(expected)
    assert not room[:offset].any()
    assert not room[offset + expected.numel() :].any()
    assert decode(out, name, values.numel()).equal(decode(expected, name, values.numel()))
    assert out.equal(expected)


@pytest.mark.parametrize("name", LOSSY)
def test_one_chunk_by_its_encoder(name: str, values: torch.Tensor) -> None:
    encoder = encoder_named(name)
    out = torch.empty(encoding_named(name).stored_bytes(values.numel(), "F32"), dtype=torch.uint8)
    assert encoder.encode(values, out).item() is True
    assert out.numpy().tobytes() == encode_chunk(encoding_named(name), values.numpy()).tobytes()
    assert (encoder.limits[0] == 0) == (not encoder.encode(-values, out).item())


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_bytes_do_not_depend_on_the_default_dtype(name: str, dtype: torch.dtype, values: torch.Tensor) -> None:
    expected, _ = encode(values, name)
    torch.set_default_dtype(dtype)
    try:
        data, good = encode(values, name)
        back = decode(data, name, values.numel())
    finally:
        torch.set_default_dtype(torch.float32)
    assert good
    assert data.equal(expected)
    assert back.equal(decode(expected, name, values.numel()))


@pytest.mark.parametrize("name", ["int9", "raw"])
def test_others_have_no_encoder(name: str) -> None:
    with pytest.raises(DamagedError, match=name):
        encoder_named(name)


@pytest.mark.parametrize("name", LOSSY)
def test_few_elements_with_any_stride(name: str) -> None:
    for values in (torch.ones(1).expand(1), torch.ones(4)[::4], torch.empty(0)):
        data, good = encode(values, name)
        assert good
        assert data.numpy().tobytes() == encode_chunk(encoding_named(name), values.numpy()).tobytes()


@pytest.mark.cuda
@pytest.mark.parametrize("name", LOSSY)
def test_cuda_gives_the_same_bytes(name: str) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x4F000000, 2 * CHUNK + 77, dtype=np.uint32)
    for values in (bits.view("<f4"), (bits >> 7).view("<f4"), rng.random(CHUNK, dtype="f4")):
        data, good = encode(torch.from_numpy(values).cuda(), name)
        expected = b"".join(encode_chunk(encoding_named(name), chunk).tobytes() for chunk in iter_chunks(values))
        assert good
        assert data.cpu().numpy().tobytes() == expected
        on_host = decode(data.cpu(), name, values.size)
        assert decode(data, name, values.size).cpu().equal(on_host)
