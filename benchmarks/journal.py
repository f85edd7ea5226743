"""What the journal costs, and how fast its steps are taken again.

    python benchmarks/journal.py [--stage 2] [--ranks 2] [--precision bf16] [--layers 12] [--steps 12] [--rounds 3]
                                 [--json FILE]

Two ranks with one thread each and gloo, or one rank on a GPU; a Llama of 110 million parameters at ZeRO-2. In turns: a
process that trains without the journal, and one with it. Then a process that resumes the save before the first recorded
step and takes the steps again, beside one that resumes without them. Bytes are those of the files.

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
from benchmarks.ranks import torchrun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="each needs a device of its own, unless that is a CPU")
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        default="bf16",
        help="without AVX-512 or AMX, bf16 takes minutes a step",
    )
    parser.add_argument("--layers", type=int, default=12, help="12 make 110 million parameters")
    parser.add_argument("--rows", type=int, default=2, help="sequences of 256 tokens a step and rank")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="where to write; needs about 10 GB")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    seen: dict[str, list[Any]] = {"off": [], "journal": [], "resume": [], "plain resume": [], "bytes": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir=options.dir) as folder:
            one_round(options, Path(folder), seen)
    return report(
        f"the journal, ZeRO-{options.stage}, {options.precision}, ranks: {options.ranks}", figures(seen), options.json
    )


def one_round(options: argparse.Namespace, folder: Path, seen: dict[str, list[Any]]) -> None:
    def run(way: str, store: str) -> Any:
        names = ("stage", "precision", "layers", "rows", "steps")
        arguments = [f"--{name}={getattr(options, name)}" for name in names]
        out = folder / "result.json"
        out.unlink(missing_ok=True)
        arguments += [f"--way={way}", f"--store={folder / store}"]
        return torchrun("journal_worker.py", arguments, out, options.ranks)

    seen["off"].append(run("off", "off"))
    seen["journal"].append(run("journal", "on"))
    records = [one for one in (folder / "on/journal/segments").iterdir() if any(one.iterdir())]
    nbytes = sum(file.stat().st_size for one in records for file in one.iterdir())
    seen["bytes"].append(nbytes / len(records))
    seen["resume"].append(run("resume", "on"))
    (folder / "on/journal/segments").rename(folder / "aside")
    seen["plain resume"].append(run("resume", "on"))


def figures(seen: dict[str, list[Any]]) -> list[Figure]:
    def median(way: str, key: str) -> float:
        return statistics.median(one[key] for one in seen[way])

    parameters, off = seen["off"][0]["parameters"], median("off", "seconds")
    ratios = [on["seconds"] / without["seconds"] for on, without in zip(seen["journal"], seen["off"], strict=True)]
    written = [on["written"] / without["seconds"] for on, without in zip(seen["journal"], seen["off"], strict=True)]
    again = [
        (one["seconds"] - plain["seconds"]) / (one["step"] - plain["step"])
        for one, plain in zip(seen["resume"], seen["plain resume"], strict=True)
    ]
    return [
        Figure("parameters", parameters / 1e6, "million"),
        Figure("step without", off, "s"),
        Figure("step with the journal", statistics.median(ratios), "x", f"without; {spread(ratios)}", 1.03),
        Figure("the same, until all is written", statistics.median(written), "x", f"without; {spread(written)}"),
        Figure("bytes a parameter and step", statistics.median(seen["bytes"]) / parameters, "", "12 of a full save"),
        Figure("resume without", median("plain resume", "seconds"), "s"),
        Figure("a step taken again", statistics.median(again), "s"),
        Figure("the same, of a step of training", statistics.median(again) / off, "x", spread(again), 0.1),
    ]


def spread(values: list[float]) -> str:
    return f"from {min(values):.4g} to {max(values):.4g}"


if __name__ == "__main__":
    sys.exit(main())
