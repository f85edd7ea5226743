"""How small a fragment will pack, guessed from a sample of it before a byte is written.

A sample is runs of whole pieces of values, spread evenly. It does not know where they come from: whoever holds the
fragment takes :func:`sample_runs` out of it, on whatever device. A guess, never a promise: the promise is
:func:`store.encoding.packing.packed_bound`.
"""

from __future__ import annotations

from store.encoding.base import Bytes, Encoding, Values, chunk_sizes
from store.encoding.dtypes import itemsize
from store.encoding.packing import frame_bound, pack_chunk

SAMPLE_RUN = 4096
"""Elements of one run; a multiple of BLOCK, long enough for zstd's tables to pay."""

SAMPLE_RUNS = 16
"""Runs of a sample: 65 536 elements, a few milliseconds of packing."""


def sample_runs(numel: int) -> list[slice]:
    """The elements of a fragment to take for a sample: all of a small one, else runs spread evenly over it."""
    if numel <= SAMPLE_RUN * SAMPLE_RUNS:
        return [slice(0, numel)] if numel else []
    last = (numel - SAMPLE_RUN) // SAMPLE_RUN
    starts = [k * last // (SAMPLE_RUNS - 1) * SAMPLE_RUN for k in range(SAMPLE_RUNS)]
    return [slice(start, start + SAMPLE_RUN) for start in starts]


def estimate(
    encoding: Encoding, dtype: str, numel: int, sample: Values, *, level: int = 1, base: Bytes | None = None
) -> int:
    """Bytes that a fragment of ``numel`` elements will pack to, judged by ``sample`` (1-d, at most CHUNK elements).

    ``base``: the encoded sample of the version that the difference would be taken to. For raw, ``sample`` is bytes
    or values. ValuesError as in encoding; ValueError for an empty sample of a fragment that is not empty.
    """
    if not numel:
        return 0
    if not sample.size:
        raise ValueError("an empty sample says nothing about a fragment that is not empty")
    encoded = encoding.encode(sample)
    taken = sample.nbytes // itemsize(dtype)
    lanes = encoding.lanes(taken, dtype)
    packed = len(pack_chunk(encoded, lanes, level, base))
    overhead = frame_bound(lanes) - encoded.size
    return round((packed - overhead) * numel / taken) + overhead * sum(1 for _ in chunk_sizes(numel))
