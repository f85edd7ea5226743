"""What saving costs a whole training: the time of a step with saving on against off, in blocks of one process.

    python benchmarks/overhead.py [--stage 2] [--cycles 5] [--seconds 1.0] [--json FILE]

Two ranks with one thread each, gloo, a Llama whose batch is chosen so that a step takes ``--seconds`` at least. Blocks
of 10 steps follow each other: saving off, full saves every 10 steps, the same with versions in memory, and in turn what
else there is (encoded, with drift measured). A block's time counts until all that it began is done. Its ratio is to the
block without saving of the same cycle; of these ratios the mean is told, with its 95 % interval.

Exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.figures import Figure, report
from benchmarks.intervals import paired
from benchmarks.ranks import torchrun

GOALS = {"full": 1.02, "memory auto": 1.02}
TOLD = {
    "full": "full save every {block} steps",
    "memory auto": "full save every {block} steps, and memory, every: auto",
    "memory each step": "full save every {block} steps, and memory at each step",
    "compact": "full save every {block} steps, encoding compact",
    "threshold, sketch": "threshold 0.01 every {block} steps, drift sketch",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=384, help="8 layers of it make 26 million parameters")
    parser.add_argument("--cycles", type=int, default=5, help="pairs of the rows that have a goal")
    parser.add_argument("--extras", type=int, default=2, help="of the four other rows in each cycle")
    parser.add_argument("--block", type=int, default=10, help="steps; one decision in each")
    parser.add_argument("--seconds", type=float, default=1.0, help="that a step takes at least")
    parser.add_argument("--dir", type=Path, default=None, help="where to write; needs about 5 GB")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir=options.dir) as folder,
        tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir="/dev/shm") as shared,
    ):
        names = ("stage", "layers", "hidden", "cycles", "extras", "block", "seconds")
        arguments = [f"--{name}={getattr(options, name)}" for name in names]
        arguments += [f"--folder={folder}", f"--shared={shared}"]
        seen = torchrun("overhead_worker.py", arguments, Path(folder) / "result.json")
    return report(
        f"what saving costs training, ZeRO-{options.stage}, two ranks", figures(seen, options.block), options.json
    )


def figures(seen: dict[str, Any], block: int) -> list[Figure]:
    """seen: as a worker's :meth:`result` gives it."""
    steps: dict[str, dict[str, float]] = seen["steps"]
    off = steps["off"]
    step = statistics.fmean(off.values())
    found = [
        Figure("parameters", seen["parameters"] / 1e6, "million"),
        Figure("sequences of 256 tokens a step and rank", seen["rows"], ""),
        Figure("step without saving", step, "s", f"blocks from {min(off.values()):.4g} to {max(off.values()):.4g} s"),
        Figure("state a rank and second of step", seen["bytes_a_rank"] / step / 1e6, "MB/s"),
    ]
    for name, told in TOLD.items():
        if name in steps:
            pairs = paired([*steps[name].values()], [off[number] for number in steps[name]])
            row = f"step, {told.format(block=block)}"
            found.append(Figure(row, pairs.mean, "x", f"off; {pairs}", GOALS.get(name)))
        if seen["blocks"].get(name) and name.startswith("memory"):
            each = seen["versions"][name] / seen["blocks"][name]
            found.append(Figure(f"versions in memory a block, {name.removeprefix('memory ')}", each, ""))
    return found


if __name__ == "__main__":
    sys.exit(main())
