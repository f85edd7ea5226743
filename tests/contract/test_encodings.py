"""What every encoding must do, run on all of them; and that torch gives the bytes of the reference encoders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from store.encoding import (
    BLOCK,
    CHUNK,
    ENCODINGS,
    INT8_LOG2,
    INT8_SHARED_EXPONENT,
    INT8_SHARED_EXPONENT_128,
    INT8_SQRT_BLOCK,
    INT16_SHARED_EXPONENT,
    RAW,
    WRITABLE,
    Encoding,
    chunk_sizes,
)
from store.encoding.base import PIECE, lanes_bytes
from store.encoding.compression import frame_bound, pack_chunk, packed_bound
from store.encoding.stream import BaseEntry, Packing
from store.errors import DamagedError
from tests.support import torch_encodings
from tests.support.entries import decode_entry, encode_entry, iter_chunks, reader, split_chunks, unpack_chunk
from tests.support.error_bounds import error_bound
from tests.support.reference_encodings import ValuesError, encode_chunk

Floats = NDArray[np.float32]
READ = sorted(ENCODINGS)
LOSSY = [name for name in WRITABLE if not ENCODINGS[name].lossless]
SIZES = (0, 1, 2, 63, 64, 65, 127, 128, 1000, 4096, 4097, PIECE - 1, PIECE + 65, CHUNK, CHUNK + 1, 2 * CHUNK + 77)
LARGEST = 3.3e38
RANGE = {INT8_LOG2: 5.1e9} | dict.fromkeys(
    (INT8_SHARED_EXPONENT_128, INT8_SHARED_EXPONENT, INT16_SHARED_EXPONENT), 2.55e38
)
"""Of those that hold less."""


@pytest.fixture(params=READ)
def readable(request: pytest.FixtureRequest) -> Encoding:
    """Any that a store may hold; earlier releases made those that are only read."""
    return ENCODINGS[request.param]


@pytest.fixture(params=WRITABLE)
def encoding(request: pytest.FixtureRequest) -> Encoding:
    return ENCODINGS[request.param]


@pytest.fixture(params=LOSSY)
def lossy(request: pytest.FixtureRequest) -> Encoding:
    return ENCODINGS[request.param]


def normal(numel: int, scale: float = 1e-2, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(numel) * scale).astype("<f4")


def fitting(encoding: Encoding, values: Floats) -> Floats:
    """The values, or where the encoding knows no signs their magnitudes, cut to its range; -0.0 stays."""
    if encoding.name in RANGE:
        values = np.clip(values, -RANGE[encoding.name], RANGE[encoding.name])
    return np.where(values < 0, -values, values) if encoding.name in (INT8_LOG2, INT8_SQRT_BLOCK) else values


@st.composite
def floats(draw: st.DrawFn) -> Floats:
    """Finite values: any bits, one scale, many scales, subnormal ones, zeros of both signs, powers of two."""
    numel = draw(
        st.integers(0, 3 * BLOCK + 1) | st.integers(64 * BLOCK - 2, 130 * BLOCK) | st.integers(255 * BLOCK, 258 * BLOCK)
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    exponent = draw(st.floats(-46, 38.4))
    with np.errstate(over="ignore"):
        made = {
            "bits": lambda: rng.integers(0, 2**32, numel, dtype=np.uint32).view("<f4"),
            "scale": lambda: (rng.standard_normal(numel) * 10.0**exponent).astype("<f4"),
            "scales": lambda: (rng.standard_normal(numel) * 10.0 ** rng.uniform(-46, exponent, numel)).astype("<f4"),
            "tiny": lambda: rng.integers(0, 1 << 24, numel, dtype=np.uint32).view("<f4"),
            "zeros": lambda: rng.choice(np.array([0.0, -0.0, 10.0**exponent], "<f4"), numel),
            "powers": lambda: np.exp2(rng.integers(-149, 128, numel)).astype("<f4"),
            "huge": lambda: (rng.uniform(-1, 1, numel) * 3.4028234e38).astype("<f4"),
        }[draw(st.sampled_from(["bits", "scale", "scales", "tiny", "zeros", "powers", "huge"]))]()
    return np.where(np.isfinite(made), made, np.float32(0))


def encode_all(encoding: Encoding, values: Floats) -> NDArray[np.uint8]:
    return np.concatenate([np.zeros(0, np.uint8), *(encode_chunk(encoding, chunk) for chunk in iter_chunks(values))])


def decode_all(encoding: Encoding, data: NDArray[np.uint8], numel: int) -> Floats:
    chunks = zip(split_chunks(data, encoding, numel, "F32"), chunk_sizes(numel), strict=True)
    return np.concatenate([np.zeros(0, "<f4"), *(encoding.decode(chunk, n, "F32").view("<f4") for chunk, n in chunks)])


def bounds(encoding: Encoding, values: Floats) -> NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *(error_bound(encoding, chunk) for chunk in iter_chunks(values))])


def in_torch(name: str, values: Floats) -> tuple[NDArray[np.uint8], bool]:
    data, good = torch_encodings.encode(torch.from_numpy(values.copy()), name)
    return data.numpy(), good


def same(one: Floats, other: Floats) -> bool:
    return one.tobytes() == other.tobytes()


@pytest.mark.parametrize("numel", SIZES)
def test_sizes_are_known_beforehand_and_errors_within_bounds(readable: Encoding, numel: int) -> None:
    encoding = readable
    values = fitting(encoding, normal(numel))
    data = encode_all(encoding, values)
    assert data.size == encoding.stored_bytes(numel, "F32")
    assert data.size == sum(lanes_bytes(encoding.lanes(size, "F32")) for size in chunk_sizes(numel))
    back = decode_all(encoding, data, numel)
    assert np.all(np.abs(back.astype(np.float64) - values) <= bounds(encoding, values))
    assert same(back, values) or not encoding.lossless


@pytest.mark.parametrize("numel", SIZES)
def test_a_chunk_is_decoded_into_the_memory_given(lossy: Encoding, numel: int) -> None:
    data, out = encode_all(lossy, fitting(lossy, normal(numel))), np.full(numel, np.nan, "<f4")
    start = 0
    for chunk, size in zip(split_chunks(data, lossy, numel, "F32"), chunk_sizes(numel), strict=True):
        found = lossy.decode(chunk, size, "F32", out[start : start + size])
        assert np.shares_memory(found, out)
        start += size
    assert same(out, decode_all(lossy, data, numel))


@pytest.mark.parametrize("numel", SIZES)
def test_torch_gives_the_same_bytes_and_values(lossy: Encoding, numel: int) -> None:
    values = fitting(lossy, normal(numel, seed=numel))
    data, good = in_torch(lossy.name, values)
    assert good
    assert data.tobytes() == encode_all(lossy, values).tobytes()
    back = torch_encodings.decode(torch.from_numpy(data), lossy.name, numel)
    assert same(back.numpy(), decode_all(lossy, data, numel))


@settings(max_examples=1000, deadline=None)
@given(values=floats(), name=st.sampled_from(LOSSY))
def test_any_finite_values_alike_in_numpy_and_torch(values: Floats, name: str) -> None:
    encoding = ENCODINGS[name]
    found, good = in_torch(name, values)
    try:
        data = encode_all(encoding, values)
    except ValuesError:
        assert not good
        return
    assert good
    assert data.tobytes() == found.tobytes()
    back = torch_encodings.decode(torch.from_numpy(found), name, values.size)
    assert same(back.numpy(), decode_all(encoding, data, values.size))


def test_values_at_the_very_edge_of_a_code_alike_in_numpy_and_torch(lossy: Encoding) -> None:
    values = fitting(lossy, normal(CHUNK))
    edge = lossy.decode(encode_chunk(lossy, values), CHUNK, "F32").view("<f4")
    for towards in (0, -np.inf, np.inf):
        moved = fitting(lossy, np.nextafter(edge, np.float32(towards)) if towards else edge)
        assert in_torch(lossy.name, moved)[0].tobytes() == encode_chunk(lossy, moved).tobytes()


@settings(max_examples=1000, deadline=None)
@given(values=floats(), name=st.sampled_from(READ))
def test_bounds_and_stability_hold_for_any_finite_values(values: Floats, name: str) -> None:
    encoding = ENCODINGS[name]
    values = fitting(encoding, np.clip(values, -LARGEST, LARGEST))
    data = encode_all(encoding, values)
    back = decode_all(encoding, data, values.size)
    assert np.all(np.isfinite(back))
    assert np.all(np.abs(back.astype(np.float64) - values) <= bounds(encoding, values))
    assert encode_all(encoding, back).tobytes() == data.tobytes()  # so that decoding again gives the same too
    assert same(back, values) or not encoding.lossless


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("numel", [1, 64, 65, PIECE + 65])
def test_what_is_not_finite_is_refused_wherever_it_stands(lossy: Encoding, bad: float, numel: int) -> None:
    for at in {0, numel // 2, numel - 1}:
        values = fitting(lossy, normal(numel))
        values[at] = bad
        with pytest.raises(ValuesError):
            encode_chunk(lossy, values)
        assert not in_torch(lossy.name, values)[1]


def test_torch_refuses_what_only_one_chunk_cannot_hold(lossy: Encoding) -> None:
    values = fitting(lossy, normal(CHUNK + 70))
    values[-1] = np.nan
    assert not in_torch(lossy.name, values)[1]
    values[-1], values[0] = 0, np.nan
    assert not in_torch(lossy.name, values)[1]


def test_raw_holds_everything() -> None:
    values = np.array([np.nan, np.inf, -0.0, 1e-45], "<f4")
    assert same(decode_all(ENCODINGS[RAW], encode_all(ENCODINGS[RAW], values), 4), values)


def test_threads_that_flush_subnormals_give_the_same_bytes(lossy: Encoding) -> None:
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 25, 4096, dtype=np.uint32) | (rng.integers(0, 2, 4096, dtype=np.uint32) << 31)
    values = fitting(lossy, bits.view("<f4"))
    values[:1024:BLOCK] = 2.0**-118.5  # a scale at which subnormal values might get a code
    values[2048:] *= np.float32(2) ** 30
    expected = encode_all(lossy, values)
    back = decode_all(lossy, expected, values.size)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        assert encode_all(lossy, values).tobytes() == expected.tobytes()
        assert in_torch(lossy.name, values)[0].tobytes() == expected.tobytes()
        assert same(decode_all(lossy, expected, values.size), back)
        found = torch_encodings.decode(torch.from_numpy(expected), lossy.name, values.size)
        assert same(found.numpy(), back)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("numel", [1, 65, 5000])
@pytest.mark.parametrize("with_base", [False, True])
def test_packing_loses_nothing_and_never_grows_beyond_its_bound(
    encoding: Encoding, numel: int, with_base: bool
) -> None:
    values = fitting(encoding, normal(numel))
    data, lanes = encode_chunk(encoding, values), encoding.lanes(numel, "F32")
    base = encode_chunk(encoding, fitting(encoding, values * np.float32(1.001))) if with_base else None
    noise = np.random.default_rng(1).integers(0, 256, data.size, dtype=np.uint8)
    for content in (data, noise):
        frame = pack_chunk(content, lanes, 1, base)
        assert len(frame) <= frame_bound(lanes) == packed_bound(encoding, numel, "F32")
        assert unpack_chunk(frame, lanes, base).tobytes() == content.tobytes()


@pytest.mark.parametrize("numel", [0, 1, CHUNK, CHUNK + 77])
@pytest.mark.parametrize("kind", ["plain", "packed", "difference", "difference to packed"])
def test_a_fragment_streams_there_and_back(encoding: Encoding, numel: int, kind: str) -> None:
    values = fitting(encoding, normal(numel))
    old = fitting(encoding, values + normal(numel, 1e-5, seed=2))
    base_chunks = (
        [encode_chunk(encoding, chunk) for chunk in iter_chunks(old)] if kind.startswith("difference") else None
    )
    packing = None if kind == "plain" else Packing(1, base_chunks)
    data = b"".join(encode_entry(iter_chunks(values), encoding, numel, "F32", packing))
    if packing is None:
        assert len(data) == encoding.stored_bytes(numel, "F32")
    else:
        assert len(data) <= packed_bound(encoding, numel, "F32")

    def base() -> BaseEntry | None:
        if base_chunks is None:
            return None
        packed = kind.endswith("packed")
        return BaseEntry(
            reader(b"".join(encode_entry(iter_chunks(old), encoding, numel, "F32", Packing() if packed else None))),
            packed,
        )

    def read(stored: bytes) -> Iterator[NDArray[np.float32]]:
        chunks = decode_entry(reader(stored), numel, "F32", encoding, packed=packing is not None, base=base())
        return (chunk.view("<f4") for chunk in chunks)

    found = np.concatenate([np.zeros(0, "<f4"), *read(data)])
    assert same(found, decode_all(encoding, encode_all(encoding, values), numel))
    with pytest.raises(DamagedError, match="more bytes"):
        list(read(data + b"\0"))
    for cut_off in {1, len(data) // 2, len(data)} if data else set():
        with pytest.raises(DamagedError):
            list(read(data[:-cut_off]))


def test_only_raw_holds_other_dtypes(lossy: Encoding) -> None:
    assert lossy.applies("F32")
    for dtype in ("BF16", "F16", "F64", "I64", "BOOL", "X9"):
        assert not lossy.applies(dtype)
        with pytest.raises(DamagedError, match="dtype"):
            lossy.stored_bytes(64, dtype)
    with pytest.raises(ValueError, match="float32"):
        encode_chunk(lossy, np.zeros(4, "<f8"))


def test_a_chunk_of_another_size_is_damage(encoding: Encoding) -> None:
    data = encode_chunk(encoding, fitting(encoding, normal(100)))
    for wrong in (data[:-1], np.append(data, np.uint8(0)), data[:0]):
        with pytest.raises(DamagedError, match="bytes; "):
            encoding.decode(wrong, 100, "F32")


@settings(max_examples=150, deadline=None)
@given(data=st.binary(min_size=0, max_size=400), name=st.sampled_from(READ))
def test_decoding_any_bytes_gives_finite_values_or_damage(data: bytes, name: str) -> None:
    encoding = ENCODINGS[name]
    for numel in range(401 if name != RAW else 0):
        if encoding.stored_bytes(numel, "F32") == len(data):
            with contextlib.suppress(DamagedError):
                assert np.all(np.isfinite(encoding.decode(np.frombuffer(data, np.uint8), numel, "F32")))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), shape=st.sampled_from(["normal", "one in each block", "just above codes"]),
       exponent=st.integers(-30, 37))  # fmt: skip
def test_the_relative_bound_holds_over_many_values(seed: int, shape: str, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    numel = int(rng.integers(1, 5 * BLOCK) if seed % 2 else rng.integers(63 * BLOCK, 300 * BLOCK))
    made = rng.standard_normal(numel)
    if shape == "one in each block":
        made = np.where(np.arange(numel) % BLOCK == 0, 1.0, rng.uniform(0, 1e-4, numel))
    elif shape == "just above codes":  # the worst there is: each as far off as it can be
        made = np.where(np.arange(numel) % BLOCK == 0, 1.0, (rng.integers(0, 127, numel) + 0.4999) / 127)
    for name in LOSSY:
        lossy = ENCODINGS[name]
        scale = 10.0 ** max(exponent, -20 if name == INT8_LOG2 else -30)
        values = fitting(lossy, (made * scale).astype("<f4"))
        back = lossy.decode(encode_chunk(lossy, values), numel, "F32").astype(np.float64)
        size = float(np.linalg.norm(back))
        assert np.linalg.norm(back - values) <= lossy.relative_bound * size
