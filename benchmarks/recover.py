"""How fast a killed job is back: from memory, and from disk with its files in the page cache and without.

    python benchmarks/recover.py [--stage 2] [--rounds 3] [--layers 12] [--slow 200] [--json FILE]

A job of two ranks commits a step, keeps the next one in memory and is killed (SIGKILL, all ranks). Then it is started
again and again, by turns: to resume from memory; with memory switched off, from a warm disk; and from a cold one,
where the store is a copy that was never read. Each
start is killed the same way, before it keeps or commits anything, so all of them find the same. What was resumed is
compared to the bit with what was saved. Told are the seconds of ``ckpt.resume()`` and those from the start of the
processes to the end of the first step, of the slowest rank, as medians. Floors: one copy of the same bytes in memory,
and a plain read of the cold files.

Then the same cold start with reads limited to ``--slow`` MB/s for both ranks together, as where many nodes share
storage.

Exits 1 when a goal is missed. Where files cannot be had out of the page cache, the cold rows are left out, loudly.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.figures import Figure, report
from benchmarks.page_cache import cached_share, chill, warm
from benchmarks.ranks import Ranks
from benchmarks.throttle import throttled

MEMORY, WARM, COLD, SLOW = "memory", "warm disk", "cold disk", "cold slow disk"
STEP = {MEMORY: 3, WARM: 2, COLD: 2, SLOW: 2}
"""See ``recover_worker.py``."""

Seen = dict[str, list[dict[str, Any]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12, help="12 make 110 million parameters")
    parser.add_argument("--slow", type=float, default=200, help="MB/s of the slow disk")
    parser.add_argument("--dir", type=Path, default=None, help="where to write; needs about 4 GB")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir=options.dir) as folder,
        tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir="/dev/shm") as shared,
    ):
        bench = Bench(Path(folder), Path(shared), options.stage, options.layers, options.slow)
        for _ in range(options.rounds):
            bench.round()
    return report(
        f"recovering a killed job, ZeRO-{options.stage}, two ranks",
        figures(bench.seen, bench.how, bench.reads, options.slow),
        options.json,
    )


class Bench:
    """how: by what means files got out of the page cache; None where they did not. reads: seconds for all of them."""

    def __init__(self, folder: Path, shared: Path, stage: int, layers: int, slow: float) -> None:
        self.rate = 1e6 * slow
        self.folder, self.store = folder, folder / "store"
        self.cold = folder / "cold"
        self.arguments = [f"--stage={stage}", f"--layers={layers}", f"--shared={shared}"]
        self.seen: Seen = {}
        self.how: str | None = None
        self.reads: list[float] = []
        self.digests = [one["digests"] for one in self.killed("begin", self.store)]

    def round(self) -> None:
        self.note(MEMORY, self.killed("memory", self.store))
        for _ in range(3):  # the kernel may take some of it back
            warm(self.store)
            if (share := cached_share(self.store)) > 0.99:
                break
        if share < 0.95:
            raise RuntimeError(f"read just now, only {100 * share:.0f} % of the store is in the page cache")
        self.note(WARM, self.killed("disk", self.store))
        if self.never_read() is None:
            print(
                "NOT MEASURED: cold disk. The store's files stay in the page cache, whatever is tried", file=sys.stderr
            )
            return
        self.note(COLD, self.killed("disk", self.cold))
        if self.never_read() is not None:
            began = time.perf_counter()
            warm(self.cold)
            self.reads.append(time.perf_counter() - began)
            self.slowly()

    def slowly(self) -> None:
        if self.never_read() is not None:
            with throttled(self.cold, self.rate) as limited:
                if limited:
                    self.note(SLOW, self.killed("disk", self.cold))

    def never_read(self) -> str | None:
        """A copy of the store, on the disk alone: what was read once may stay in caches below the kernel. None where
        it stays in the page cache."""
        shutil.rmtree(self.cold, ignore_errors=True)
        shutil.copytree(self.store, self.cold)
        self.how = chill(self.cold)
        return self.how

    def killed(self, mode: str, store: Path) -> list[dict[str, Any]]:
        """What each rank tells of one start of the job, which is killed then."""
        with Ranks("recover_worker.py", [f"--mode={mode}", f"--store={store}", *self.arguments], self.folder) as ranks:
            return ranks.results()

    def note(self, source: str, told: list[dict[str, Any]]) -> None:
        for one, digests in zip(told, self.digests, strict=True):
            if one["step"] != STEP[source] or one["digest"] != digests[str(one["step"])]:
                raise RuntimeError(f"{source}: step {one['step']} came back, expected {STEP[source]}, or other values")
        self.seen.setdefault(source, []).append(told[0])


def figures(seen: Seen, how: str | None, reads: list[float], slow: float) -> list[Figure]:
    """seen: by source, what rank 0 told in each round. reads: seconds for plain reads of the cold files. slow: MB/s."""

    def middle(source: str, name: str) -> float:
        return median(one[name] for one in seen[source])

    def ratio(name: str, against: str) -> float:
        return middle(MEMORY, name) / middle(against, name)

    nbytes = seen[MEMORY][0]["bytes"]
    found = [Figure("state, both ranks", nbytes / 1e6, "MB")]
    for source in seen:
        told = {COLD: f"out of the page cache by {how}", SLOW: f"{slow:.0f} MB/s for both ranks"}.get(source, "")
        found += [
            Figure(f"resume from {source}", middle(source, "resume"), "s", told),
            Figure(f"resume from {source}", nbytes / middle(source, "resume") / 1e9, "GB/s", "both ranks"),
            Figure(f"start of the processes to the first step, {source}", middle(source, "first_step"), "s"),
        ]
    copied = median(one["copy"] for told in seen.values() for one in told)
    found += [
        Figure("copy of the state in memory", copied, "s"),
        Figure("resume from memory", median(one["resume"] / one["copy"] for one in seen[MEMORY]), "x", "that copy"),
        Figure("resume from memory", ratio("resume", WARM), "x", WARM),
    ]
    if COLD in seen and reads:
        found += [
            Figure("plain read of the cold files, one thread", median(reads), "s"),
            Figure(
                "resume from cold disk", median(one["resume"] for one in seen[COLD]) / median(reads), "x", "that read"
            ),
        ]
        found += [
            Figure("resume from memory", ratio("resume", COLD), "x", COLD, 1 / 5),
            Figure("start of the processes to the first step, memory", ratio("first_step", COLD), "x", COLD),
        ]
    if SLOW in seen:
        found += [
            Figure("resume from memory", ratio("resume", SLOW), "x", f"{SLOW}, {slow:.0f} MB/s", 1 / 5),
            Figure("start of the processes to the first step, memory", ratio("first_step", SLOW), "x", SLOW),
        ]
    return found


if __name__ == "__main__":
    sys.exit(main())
