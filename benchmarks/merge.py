"""What rebuilding costs: time against ``cp`` of the same bytes and against DeepSpeed's own tools, and memory.

    python benchmarks/merge.py [--layers 12 24 48] [--stages 2 3] [--rounds 3] [--dir DIR] [--json FILE]

For each stage and size a real engine on two ranks trains a little and saves, into a store and with DeepSpeed
itself; then, in turns and side by side:

1. the merge of the store into DeepSpeed's files, against ``cp`` and ``sync`` of DeepSpeed's files (and against
   ``cp`` that leaves them in the page cache: a merge never does);
2. resuming in place against ``engine.load_checkpoint``;
3. DeepSpeed's checkpoint into a universal one, against ``ds_to_universal``, as whole commands;
4. the peak memory of a merge, over what the program takes with nothing to merge;
5. one size, its layers taken from 2, 8 and 18 commits of a store by a recipe. (From as many of DeepSpeed's own
   checkpoints the bytes read do grow: a flat partition has one checksum, so all of it is read for any part of it);
6. planning for 16,384 ranks and 126 layers, on generated parts (``benchmarks/planning.py``).

Exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.figures import Figure, report  # noqa: E402
from benchmarks.planning import planning  # noqa: E402
from merger.merge import merge  # noqa: E402
from merger.recipe.parse import read_recipe  # noqa: E402

MiB = 1 << 20
SOURCES = (2, 8, 18)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 24, 48], help="12 make 110 million parameters")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--planning", type=int, nargs="*", default=[4096, 8192, 16384], help="ranks to plan for")
    parser.add_argument("--dir", type=Path, default=None, help="where to write; needs about 40 GB")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    figures: list[Figure] = []
    for stage in options.stages:
        for layers in options.layers:
            with tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir=options.dir) as folder:
                figures += Bench(stage, layers, options.rounds, Path(folder)).figures()
    if options.layers:
        with tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir=options.dir) as folder:
            figures += growth(options.rounds, Path(folder))
    with tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir=options.dir) as folder:
        figures += planning(options.planning, Path(folder))
    return report("rebuilding", figures, options.json)


class Bench:
    """One engine's state, and everything that is done with it."""

    def __init__(self, stage: int, layers: int, rounds: int, folder: Path) -> None:
        self.rounds, self.folder = rounds, folder
        self.name = f"ZeRO-{stage}, {layers} layers"
        self.seen: dict[str, list[float]] = train(folder, stage=stage, layers=layers, rounds=rounds)
        self.store, self.own = folder / "store", folder / "own"

    def figures(self) -> list[Figure]:
        self._note("copy", self._copy)  # warms the page cache
        merge(self.store, self.folder / "warm")
        self._drop("warm")
        self.seen.pop("copy"), self.seen.pop("copy_synced")
        for _ in range(self.rounds):
            self._copy()
            self._note("merge", lambda: merge(self.store, self.folder / "merged"), "merged")
            self._note("universal", self._universal, "universal")
            self._note("ds_universal", self._ds_universal, "ds_universal")
        return [
            Figure(f"{self.name}: DeepSpeed's files", _size(self.own) / 1e9, "GB"),
            Figure(f"{self.name}: merge", self._middle("merge"), "s"),
            self._ratio("merge", "copy_synced", "cp and sync of the same bytes", 1.5),
            self._ratio("merge", "copy", "cp into the page cache", None),
            self._ratio("resume", "load", "engine.load_checkpoint", 1.1),
            self._ratio("universal", "ds_universal", "ds_to_universal, whole commands", 1.0),
            Figure(
                f"{self.name}: peak memory of a merge", self._memory() / MiB, "MiB", "the program with nothing", 1024
            ),
        ]

    def _copy(self) -> None:
        """What the system needs for the same bytes, left in memory and brought to the device."""
        os.sync()
        began = time.perf_counter()
        subprocess.run(["cp", "-r", str(self.own), str(self.folder / "copy")], check=True)
        self.seen.setdefault("copy", []).append(time.perf_counter() - began)
        subprocess.run(["sync", "-f", str(self.folder / "copy")], check=True)
        self.seen.setdefault("copy_synced", []).append(time.perf_counter() - began)
        self._drop("copy")

    def _universal(self) -> None:
        command = [sys.executable, "-m", "deploy.cli", "merge", str(self.own), "--layout", "universal"]
        _run([*command, "--out", str(self.folder / "universal")])

    def _ds_universal(self) -> None:
        tag = (self.own / "latest").read_text()
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        _run(
            [
                *command,
                "--input_folder",
                str(self.own / tag),
                "--output_folder",
                str(self.folder / "ds_universal" / tag),
            ]
        )

    def _memory(self) -> float:
        """Bytes on top of a merge of a store of the same kind without anything worth mentioning in it."""
        return peak_memory([str(self.store), str(self.folder / "memory")]) - peak_memory([])

    def _note(self, name: str, action: Callable[[], object], made: str = "") -> None:
        os.sync()
        began = time.perf_counter()
        action()
        self.seen.setdefault(name, []).append(time.perf_counter() - began)
        if made:
            self._drop(made)

    def _drop(self, name: str) -> None:
        shutil.rmtree(self.folder / name)

    def _middle(self, name: str) -> float:
        return statistics.median(self.seen[name])

    def _ratio(self, name: str, against: str, told: str, goal: float | None) -> Figure:
        value = statistics.median(a / b for a, b in zip(self.seen[name], self.seen[against], strict=True))
        return Figure(f"{self.name}: {name}", value, "x", told, goal)


def growth(rounds: int, folder: Path) -> list[Figure]:
    """The same bytes out of more and more commits: each is read once, so the time should not grow."""
    train(folder, stage=3, layers=max(SOURCES), rounds=0, saves=max(SOURCES))
    steps = list(range(1, max(SOURCES) + 1))
    times: dict[int, list[float]] = {count: [] for count in SOURCES}
    for _ in range(rounds + 1):
        for count in SOURCES:
            recipe = folder / "recipe.yaml"
            sources = {f"s{i}": {"path": str(folder / "store"), "step": steps[-count + i]} for i in range(count)}
            last = f"s{count - 1}"
            form = {"sources": sources, "parity": list(sources), "auxiliary": last, "run_state": last}
            recipe.write_text(json.dumps(form))
            os.sync()
            began = time.perf_counter()
            merge(None, folder / "merged", recipe=read_recipe(recipe))
            times[count].append(time.perf_counter() - began)
            shutil.rmtree(folder / "merged")
    middle = {count: statistics.median(found[1:]) for count, found in times.items()}
    base = middle[SOURCES[0]]
    return [
        Figure(f"merge of {count} sources", middle[count] / base, "x", f"of {SOURCES[0]}", 1.25)
        for count in SOURCES[1:]
    ]


def train(folder: Path, *, stage: int, layers: int, rounds: int, saves: int = 0) -> dict[str, list[float]]:
    """Train, save and load under torchrun; what was measured, by name."""
    out = folder / "result.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *(str(HERE / "merge_worker.py"), f"--stage={stage}", f"--rounds={rounds}", f"--layers={layers}"),
        *(f"--folder={folder}", f"--out={out}", f"--saves={saves}"),
    ]
    _run(command)
    seen: dict[str, list[float]] = json.loads(out.read_text())
    return seen


MEMORY = """
import resource, sys
from pathlib import Path
import deepspeed
from merger.merge import merge
from torch._subclasses.fake_tensor import FakeTensorMode
if sys.argv[1:]:
    merge(Path(sys.argv[1]), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_memory(arguments: Sequence[str]) -> float:
    """Peak resident bytes of a process that merges, or only imports what a merge needs."""
    command = [sys.executable, "-c", MEMORY, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment())
    return float(done.stdout.split()[-1])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(HERE.parent)}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
