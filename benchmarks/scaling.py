"""How costs grow: with the tensors of a model, the commits in a store, and the ranks of a job.

    python benchmarks/scaling.py [--tensors 10 110 1000] [--commits 10 100 1700] [--ranks 1 2 4] [--json FILE]

Tensors: processor time of a decision, of attach and of resume, beside ``torch.load`` and DCP's load of the same state.
Commits: processor time of a save and its calls to the storage while the store fills. Ranks: collectives of a decision,
counted, and their time. Everything is measured through ``monitor.attach`` and the checkpointer's methods.

Exits 1 when a goal is missed. A part that takes longer than ``--patience`` is left out, loudly.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.figures import Figure, report
from benchmarks.ranks import Ranks

DECISION = {110: 1e-3, 1000: 5e-3, 20000: 0.1}
ATTACH, RESUME = {20000: 3.0}, {20000: 5.0}
FLAT = 1.5
"""A save with many commits against one with the fewest: more than this is not flat."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tensors", type=int, nargs="*", default=[10, 110, 1000, 20000])
    parser.add_argument("--commits", type=int, nargs="*", default=[10, 100, 1700, 5000])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5, help="decisions, and saves at each number of commits")
    parser.add_argument("--patience", type=float, default=1200, help="seconds for each process")
    parser.add_argument("--dir", type=Path, default=None, help="where to write; needs about 1 GB")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    found: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir=options.dir) as folder:
        bench = Bench(Path(folder), options.repeats, options.patience)
        for count in options.tensors:
            if told := bench.told("tensors", count):
                found += tensor_figures(count, told[0])
        if options.commits and (told := bench.told("commits", *options.commits)):
            found += commit_figures(told[0])
        for count in options.ranks:
            if told := bench.told("ranks", count, ranks=count):
                found += rank_figures(count, told)
    return report("how costs grow", found, options.json)


class Bench:
    def __init__(self, folder: Path, repeats: int, patience: float) -> None:
        self.folder, self.repeats, self.patience = folder, repeats, patience

    def told(self, part: str, *counts: int, ranks: int = 1) -> list[dict[str, Any]] | None:
        """What each rank told; None where they did not end in time, which is said."""
        folder = self.folder / f"{part}-{'-'.join(map(str, counts))}"
        folder.mkdir()
        arguments = [f"--part={part}", f"--folder={folder}", f"--repeats={self.repeats}"]
        arguments += ["--counts", *map(str, counts)]
        try:
            with Ranks("scaling_worker.py", arguments, folder, ranks) as started:
                return started.results(self.patience)
        except RuntimeError as error:
            partly = folder / "partly.json"
            print(f"NOT MEASURED: {part} {counts}: {error}", file=sys.stderr)
            return [json.loads(partly.read_text())] if partly.exists() else None


def tensor_figures(count: int, told: dict[str, Any]) -> list[Figure]:
    """told: processor seconds by name, ``decision`` a list."""

    def figure(name: str, value: float, against: str = "processor time", goal: float | None = None) -> Figure:
        return Figure(f"{count} tensors: {name}", value, "s", against, goal)

    return [
        figure("decision", median(told["decision"]), goal=DECISION.get(count)),
        figure("decision that saves nothing", median(told["observed"])),
        Figure(f"{count} tensors: the garbage collector's full passes, a save", mean(told["passes"]), "", "mean"),
        figure("those passes, a save", mean(told["passing"]), "wall time, mean"),
        figure("attach", told["attach"], goal=ATTACH.get(count)),
        figure("resume", told["resume"], goal=RESUME.get(count)),
        figure("attach and resume", told["attach_wall"] + told["resume_wall"], "wall time"),
        figure("torch.load and load_state_dict", told["torch"]),
        figure("DCP's load", told["dcp"]),
    ]


def commit_figures(told: dict[str, Any]) -> list[Figure]:
    """told: by number of commits, ``seconds`` and ``calls`` of each of some saves. Goals: flat against the fewest."""
    counts = sorted(map(int, told))
    found = []

    def middle(count: int, name: str) -> float:
        return median(told[str(count)][name])

    for count in counts:
        found.append(Figure(f"{count} commits: a save", middle(count, "seconds"), "s", "processor time, all threads"))
        found.append(Figure(f"{count} commits: a save", middle(count, "wall"), "s", "wall time, until committed"))
        found.append(
            Figure(f"{count} commits: a save", middle(count, "calls"), "calls", "opens, lists, renames, removals")
        )
    for count in counts[1:]:
        for name, unit in (("seconds", "processor time"), ("calls", "calls")):
            grown = middle(count, name) / middle(counts[0], name)
            found.append(Figure(f"{count} commits: a save", grown, "x", f"{unit} at {counts[0]}", FLAT))
    return found


def rank_figures(count: int, told: Sequence[dict[str, Any]]) -> list[Figure]:
    """told: by rank, ``collectives`` and ``seconds`` of each decision, and ``inside``: the seconds in collectives."""
    most = max(median(one["collectives"]) for one in told)
    goal = 1.0 if count > 1 else None
    kinds = ", ".join(f"{number:g} {name}" for name, number in sorted(told[0]["kinds"].items())) or "none"
    return [
        Figure(f"{count} ranks: collectives of a decision", most, "", kinds, goal),
        Figure(f"{count} ranks: a decision", max(median(one["seconds"]) for one in told), "s", "slowest rank"),
        Figure(f"{count} ranks: in collectives", max(median(one["inside"]) for one in told), "s", "slowest rank"),
    ]


if __name__ == "__main__":
    sys.exit(main())
