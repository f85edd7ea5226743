"""Gradients in records of the journal: without loss, and in as few bytes as they need."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monitor.save.encode import encode_gradient
from store.encoding import CHUNK, encoding_named
from store.encoding.stream import EncodedEntry
from store.names import Fragment
from store.segment import StagedFragment
from tests.support.entries import decode_entry, reader

FACTOR = float(torch.tensor(1.0) / torch.tensor(1.7364))
SIZES = (1, 255, 256, 257, 1 << 17, (1 << 17) + 1, CHUNK, CHUNK + 3)


def encoded(values: torch.Tensor, factor: float = 1.0, level: int | None = None) -> tuple[StagedFragment, bytes]:
    """The fragment as it is stored, and its bytes, after a check that they give the same bits back."""
    fragment = Fragment("a", "grad", 7, values.numel())
    before = values.clone()
    made = encode_gradient("block.0", fragment, values, factor=factor, level=level)
    assert torch.equal(values.view(torch.uint8), before.view(torch.uint8))
    packed = isinstance(made.data, EncodedEntry) and made.data.packing is not None
    pieces = made.data.pieces() if isinstance(made.data, EncodedEntry) else [made.data]
    data = b"".join(bytes(piece) for piece in pieces)  # type: ignore[arg-type]  # each is valid until the next one
    chunks = decode_entry(reader(data), values.numel(), made.dtype, encoding_named(made.encoding), packed=packed)
    back = b"".join(chunk.tobytes() for chunk in chunks)
    assert back == values.view(torch.uint8).numpy().tobytes()
    assert (made.layer, made.fqn, made.slot, made.start, made.numel) == ("block.0", "a", "grad", 7, values.numel())
    return made, data


def whole(numel: int, seed: int = 0) -> torch.Tensor:
    """float32 values of bfloat16, with zeros of both signs."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul(1e-3).bfloat16().float()
    values[1::5], values[1::7] = 0.0, -0.0
    return values


@pytest.mark.parametrize("numel", SIZES)
def test_bfloat16_takes_two_bytes(numel: int) -> None:
    made, data = encoded(whole(numel))
    assert (made.encoding, len(data)) == ("bf16", 2 * numel)


@pytest.mark.parametrize("numel", SIZES)
def test_and_with_the_factor_of_clipping_four_more_a_chunk(numel: int) -> None:
    made, data = encoded(whole(numel).mul_(FACTOR), FACTOR)
    assert (made.encoding, len(data)) == ("bf16-scaled", 2 * numel + 4 * -(-numel // CHUNK))
    assert np.frombuffer(data[:4], "<f4")[0] == np.float32(FACTOR)


@pytest.mark.parametrize("factor", [1e-3, 0.5, 1.0 / 3.0, 0.999, 1.0 / 65536, 7.0])
def test_whatever_the_factor(factor: float) -> None:
    factor = float(np.float32(factor))
    made, _ = encoded(whole(100_000).mul_(factor), factor)
    assert made.encoding in ({"bf16"} if factor in (0.5, 1.0 / 65536) else {"bf16-scaled"})


@pytest.mark.parametrize("at", [0, 255, 256, (1 << 17) - 1, 1 << 17, CHUNK + 2])
def test_one_element_that_is_not_needs_all_of_them_raw(at: int) -> None:
    values = whole(CHUNK + 3).mul_(FACTOR)
    values.view(torch.int32)[at] ^= 1
    made, data = encoded(values, FACTOR)
    assert (made.encoding, len(data)) == ("raw", 4 * values.numel())


@pytest.mark.parametrize("factor", [1.0, FACTOR])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_are_raw(value: float, factor: float) -> None:
    values = whole(1000).mul_(factor)
    values[700] = value
    made, _ = encoded(values, factor)
    assert made.encoding == "raw"


def test_another_factor_than_the_gradients_were_multiplied_by_is_raw() -> None:
    assert (
        encoded(whole(5000).mul_(FACTOR), float(np.nextafter(np.float32(FACTOR), np.float32(1))))[0].encoding == "raw"
    )
    assert encoded(whole(5000).mul_(FACTOR), 1.0)[0].encoding == "raw"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_as_they_are(dtype: torch.dtype) -> None:
    values = torch.randn(1000).to(dtype)
    made, data = encoded(values, FACTOR)
    assert (made.encoding, len(data)) == ("raw", values.nbytes)


@pytest.mark.parametrize(
    ("half", "factor"),
    [(1.5 * 2.0**-125, FACTOR / 4), (2.0**-130, 1000.3), (2.0**20, 1e-40), (2.0**-120, FACTOR)],
    ids=["products", "values", "factor", "none"],
)
def test_threads_that_flush_subnormals_read_the_same_bits(half: float, factor: float) -> None:
    factor = float(np.float32(factor))
    values = torch.tensor([half, 0.3]).repeat(500).bfloat16().float().mul(factor)
    values[::7], values[::11] = 0.0, -0.0
    made, data = encoded(values, factor)
    assert made.encoding == ("bf16-scaled" if half == 2.0**-120 else "raw")
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        packed = isinstance(made.data, EncodedEntry) and made.data.packing is not None
        read = decode_entry(reader(data), values.numel(), made.dtype, encoding_named(made.encoding), packed=packed)
        back = b"".join(chunk.tobytes() for chunk in read)
    finally:
        torch.set_flush_denormal(False)
    assert back == values.numpy().tobytes()


@pytest.mark.parametrize("factor", [0.0, -0.0, float("inf"), float("nan"), 1e-45, 3e38, -0.5])
def test_a_factor_that_nothing_can_be_divided_by_leaves_them_raw(factor: float) -> None:
    assert encoded(torch.randn(1000), factor)[0].encoding == "raw"
    assert encoded(torch.full((1000,), float("nan")), factor)[0].encoding == "raw"


@pytest.mark.parametrize("level", [None, 1])
def test_nothing_is_written_of_an_empty_tensor(level: int | None) -> None:
    assert encoded(torch.empty(0), FACTOR, level)[1] == b""
    assert encoded(torch.empty(0, dtype=torch.bool), FACTOR, level)[1] == b""


@pytest.mark.parametrize("level", [None, 1])
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.int64, torch.complex64],
)
def test_buffers_are_of_any_dtype(dtype: torch.dtype, level: int | None) -> None:
    for bits in (torch.ones(800, dtype=torch.uint8), torch.zeros(800, dtype=torch.uint8)):
        assert encoded(bits.view(dtype), FACTOR, level)[0].encoding == "raw"


def test_few_elements_that_are_not_0_take_little_without_a_setting() -> None:
    values = torch.zeros(300_000)
    chosen = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(1))[:3000]
    values[chosen] = torch.randn(3000, generator=torch.Generator().manual_seed(2))
    made, data = encoded(values)
    assert made.encoding == "raw"
    assert len(data) < 0.055 * values.numel()
    assert len(encoded(torch.zeros(300_000))[1]) < 200


def test_packing_makes_the_bytes_of_bfloat16_fewer() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(3)).mul_(1e-3).bfloat16().float()
    for factor, name in ((1.0, "bf16"), (FACTOR, "bf16-scaled")):
        made, data = encoded(values * factor, factor, level=1)
        assert made.encoding == name
        assert len(data) < 1.5 * values.numel()
