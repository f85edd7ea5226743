"""How long the arithmetic on fragments takes at the size of the largest jobs: 16,384 ranks, 126 layers.

A layer is one tensor, of which every rank holds a box, or a flat range as under ZeRO-3. Stored fragments are indexed,
and then those of all ranks of another mesh are found in them, or whole tensors, as a merge does. In one process,
without files and without garbage collection, as in a resume. Each figure holds the indexing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import Figure, report
from store.fragments import FragmentIndex
from store.names import Box, Fragment

SIDE = 16_384
"""Rows and columns of a tensor."""

BOXES_GOAL, FLAT_GOAL = 15.0, 60.0
"""Seconds."""


class Stored(NamedTuple):
    """A fragment in a store, without the file that it is in."""

    fqn: str
    slot: str
    start: int
    stop: int
    box: Box | None
    dtype: str = "F32"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    gc.disable()
    layers = range(options.layers)
    stored, wanted = [mesh(str(one), 2048, 8) for one in layers], [mesh(str(one), 1024, 16) for one in layers]
    whole = [[Fragment(str(one), "fp32", 0, SIDE * SIDE)] for one in layers]
    ranges, others = ([flat(str(one), count) for one in layers] for count in (16_384, 12_288))
    boxes = f"{len(stored[0])} boxes a tensor"
    figures = [
        Figure("another mesh", seconds(stored, wanted), "s", f"{boxes}, 2048 × 8 to 1024 × 16", BOXES_GOAL),
        Figure("whole tensors", seconds(stored, whole), "s", boxes, BOXES_GOAL),
        Figure("another number of ranks", seconds(ranges, others), "s", "16384 to 12288 flat ranges", FLAT_GOAL),
    ]
    return report(f"Fragments of {options.layers} layers", figures, options.json)


def mesh(name: str, rows: int, columns: int) -> list[Fragment]:
    """Return the boxes of a tensor on a mesh of ``rows`` by ``columns`` ranks."""
    sizes = SIDE // rows, SIDE // columns
    places = ((row * sizes[0], column * sizes[1]) for row in range(rows) for column in range(columns))
    return [Fragment.of_box(name, "fp32", Box(place, sizes, (SIDE, SIDE))) for place in places]


def flat(name: str, count: int) -> list[Fragment]:
    """Return the flat ranges of a tensor on so many ranks, of sizes that differ by one."""
    cuts = [SIDE * SIDE * rank // count for rank in range(count + 1)]
    return [Fragment(name, "fp32", start, stop - start) for start, stop in pairwise(cuts)]


def seconds(stored: Sequence[Sequence[Fragment]], wanted: Sequence[Sequence[Fragment]]) -> float:
    """Return the time to index what is stored, and to find all that is wanted; tensor by tensor, as a job does."""
    spans = [Stored(one.fqn, one.slot, one.start, one.stop, one.box) for tensor in stored for one in tensor]
    began = time.perf_counter()
    index = FragmentIndex(spans)
    for tensor in wanted:
        index.cover_all(tensor)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
