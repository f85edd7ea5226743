"""What a failure costs, by what was saved of the state and in how many bytes: real training, saves and resumes.

    python benchmarks/quality.py [--parts calibration curves] [--settings pretraining ...] [--seeds 0 1 2]
                                 [--rows FAMILY ...] [--tier few] [--rates CEILING]
                                 [--results FILE.jsonl] [--summary] [--json FILE]

Every seed of a part that is done is a few lines of ``--results``; what is there already is not run again, so a run
that was cut off goes on where it stood, and parts may be run one by one. The figures are made from that file, by
``--summary`` alone without running anything. docs/benchmarks/quality.md says what is measured and how. One thread.

``pretraining-114m`` needs a GPU and is only run where it is named. Its seeds may run at the same time, each with
``--results`` of its own; the files put together give the figures of all. Stores are in the temporary folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.figures import report  # noqa: E402
from benchmarks.quality_calibration import calibration  # noqa: E402
from benchmarks.quality_curves import Record, curves  # noqa: E402
from benchmarks.quality_results import load  # noqa: E402
from benchmarks.quality_rows import Row  # noqa: E402
from benchmarks.quality_settings import DEFAULTS, MAKERS, TIERS, Setting, setting_named  # noqa: E402
from benchmarks.quality_summary import figures  # noqa: E402
from benchmarks.quality_trunk import Base, base  # noqa: E402

CALIBRATED = {"pretraining": False, "beta2-0.95": True, "minilm": True}
"""Settings of the calibration; True where only some cases are run."""

RESULTS = HERE.parent / "docs" / "benchmarks" / "quality" / "results.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--parts", nargs="+", default=["calibration", "curves"], choices=["calibration", "curves"])
    parser.add_argument("--settings", nargs="+", default=list(DEFAULTS), choices=list(MAKERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="which ones")
    parser.add_argument("--rows", nargs="+", default=None, metavar="FAMILY", help="families of rows; all by default")
    parser.add_argument("--tier", choices=TIERS, default=None, help="which rows, whatever the setting says")
    parser.add_argument("--rates", type=float, default=None, help="budgets of at most so many bytes a parameter, step")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.summary:
        for part, name, seed in _planned(options):
            setting = setting_named(name)
            setting = replace(setting, rows=options.tier) if options.tier else setting
            _append(options.results, _run(part, setting, seed, _chooser(options)))
    return report("damage after a failure, against bytes", figures(load(options.results)), options.json)


def _planned(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """What is asked for and not there yet. All settings of a seed before the next seed."""
    there = {(one["of"], one["setting"], one["seed"]) for one in load(options.results) if one["part"] == "done"}
    for part in options.parts:
        for seed in options.seeds:
            for name in options.settings:
                if (part == "curves" and name != "beta2-0.95") or (part == "calibration" and name in CALIBRATED):
                    key = _key(part, options)
                    if (key, name, seed) not in there:
                        yield part, name, seed


def _key(part: str, options: argparse.Namespace) -> str:
    if part != "curves":
        return part
    chosen = ",".join(sorted(options.rows)) if options.rows else "all"
    return f"{part}:{chosen}:{options.rates or ''}:{options.tier or ''}"


def _chooser(options: argparse.Namespace) -> tuple[str, Callable[[Row], bool]]:
    def chosen(row: Row) -> bool:
        named = options.rows is None or row.family in options.rows
        return named and (row.rate is None or options.rates is None or row.rate <= options.rates)

    return _key("curves", options), chosen


@cache
def _base(name: str, seed: int) -> Base:
    return base(setting_named(name), seed)


def _run(part: str, setting: Setting, seed: int, chooser: tuple[str, Callable[[Row], bool]]) -> Iterator[Record]:
    key, chosen = chooser
    began = time.perf_counter()
    begun = _base(setting.name, seed)
    with tempfile.TemporaryDirectory(prefix="driftpoint-bench-") as folder:
        if part == "calibration":
            yield from calibration(setting, seed, begun, Path(folder), CALIBRATED[setting.name])
        else:
            yield from curves(setting, seed, begun, Path(folder), chosen)
    seconds = time.perf_counter() - began
    done = part if part == "calibration" else key
    print(f"{done}, {setting.name}, seed {seed}: {seconds:.0f} s", flush=True)
    yield {"part": "done", "of": done, "setting": setting.name, "seed": seed, "seconds": round(seconds)}


def _append(path: Path, records: Iterator[Record]) -> None:
    """A line each, as they come; those of a seed that was cut off are run again and stand there twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for record in records:
        with path.open("a") as file:
            file.write(json.dumps(_short(record), separators=(",", ":")) + "\n")


def _short(value: object) -> object:
    """Losses to a millionth."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    sys.exit(main())
