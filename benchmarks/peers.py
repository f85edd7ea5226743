"""Driftpoint beside others that save training state: on the same state, in turns, in one run.

    python benchmarks/peers.py [--megabytes 300] [--rounds 3] [--only driftpoint dcp] [--page FILE] [--json FILE]

Each peer runs in an environment of its own, made at the first run below ``--environments`` from the package registry,
without another torch. A peer that cannot be installed or run is a row that says why. See ``peers_table.py`` for what
is measured and ``peers_savers.py`` for how each peer is used. ``--page docs/benchmarks/peers.md`` writes the page.

Exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.figures import report
from benchmarks.peers_environment import PeerError, last_line, python_for
from benchmarks.peers_savers import SAVERS
from benchmarks.peers_table import figures, outcome_of_kill, outcome_of_load, page, reduced
from benchmarks.ranks import ENVIRONMENT, HERE

STEADY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Memory that training frees stays with the process. Else page faults of its temporary tensors take up to 100 ms of
three steps, at random, which hides what a save takes."""


def places(tries: int) -> list[float]:
    """Shares of the largest file where a byte is flipped, and of the time to durable when the process is killed."""
    return [(one + 1) / (tries + 1) for one in range(tries)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--megabytes", type=float, default=300, help="of state")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="of a peer in a round")
    parser.add_argument("--tries", type=int, default=3, help="flipped bytes, and kills in mid-save")
    parser.add_argument("--threads", type=int, default=1, help="of training")
    parser.add_argument("--only", nargs="+", choices=SAVERS, default=list(SAVERS))
    parser.add_argument("--patience", type=float, default=600, help="seconds for one process of a peer")
    parser.add_argument("--environments", type=Path, default=HERE.parent / ".venv-peers")
    parser.add_argument("--dir", type=Path, default=None, help="where to write; needs about 10 times the state")
    parser.add_argument("--note", default="", help="a line for the page, such as what ran beside")
    parser.add_argument("--page", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no process of a peer behind
    with tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir=options.dir) as folder:
        bench = Bench(options, Path(folder))
        bench.run()
    rows = {name: reduced(seen) for name, seen in bench.seen.items() if name not in bench.reasons}
    for name, reason in bench.reasons.items():
        print(f"NOT MEASURED: {name}: {reason}", file=sys.stderr)
    if options.page is not None:
        options.page.write_text(page(rows, bench.reasons, told(options)))
    return report("Driftpoint beside others", figures(rows), options.json)


def told(options: argparse.Namespace) -> dict[str, str]:
    """What the page says about the run."""
    shown = [one for one in sys.argv[1:] if not one.startswith(("--page", "--dir", "--environments"))]
    for one in (options.page, options.dir, options.environments):
        if one is not None and str(one) in shown:
            shown.remove(str(one))
    memory = psutil.virtual_memory().total / 1e9
    return {
        "command": " ".join(["python benchmarks/peers.py", *_without(shown, "--note")]),
        "machine": f"{os.cpu_count()} CPU cores, {memory:.0f} GB, no GPU used, Python {platform.python_version()}",
        "rounds": f"{options.rounds} rounds of {options.saves} saves, {options.threads} thread(s)",
        "note": options.note or "Nothing else was running.",
    }


def _without(arguments: Sequence[str], name: str) -> list[str]:
    if name not in arguments:
        return [*arguments]
    at = arguments.index(name)
    return [*arguments[:at], *arguments[at + 2 :]]


class Bench:
    """seen: by peer, see ``peers_table.reduced``. reasons: by peer that failed, why."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.seen: dict[str, dict[str, Any]] = {}
        self.reasons: dict[str, str] = {}
        self.pythons: dict[str, Path] = {}
        self.rows = 0

    def run(self) -> None:
        for name in self.options.only:
            self.tried(name, lambda name=name: self.install(name))
        for number in range(self.options.rounds):
            turn = self.options.only[number:] + self.options.only[:number]
            for name in turn:
                self.tried(name, lambda name=name: self.round(name))
        for name in self.options.only:
            self.tried(name, lambda name=name: self.kills(name))

    def tried(self, name: str, action: Any) -> None:
        if name not in self.reasons:
            try:
                action()
            except PeerError as error:
                self.reasons[name] = str(error).replace("|", "/")

    def install(self, name: str) -> None:
        self.pythons[name] = python_for(SAVERS[name].requirements, self.options.environments / name)

    def round(self, name: str) -> None:
        """A training, then a load of its last step; in the first round also loads of damaged copies."""
        folder = self.fresh(name)
        with Worker(self, name, "train", folder, [f"--saves={self.options.saves}"]) as worker:
            trained = worker.result()
        self.rows = self.rows or trained["rows"]  # all train on the same batch
        seen = self.seen.setdefault(name, {"train": [], "load": [], "memory": [], "flips": [], "kills": []})
        loaded = self.load(name, folder, [trained["kept"]])[0]
        if outcome_of_load(loaded, trained["digests"]) != "harmless":
            raise PeerError(f"what was loaded is not what was saved: {loaded.get('refused', 'other values')}")
        seen["train"].append(trained)
        seen["memory"].append(worker.extra_memory())
        seen["load"].append(loaded["seconds"])
        if not seen["flips"]:
            for place in places(self.options.tries):
                damaged = flipped(folder / "store", place)
                came = self.load(name, folder, [trained["kept"]])[0]
                seen["flips"].append(outcome_of_load(came, trained["digests"]))
                flip(damaged, place)  # back
        shutil.rmtree(folder)

    def kills(self, name: str) -> None:
        """Kill in mid-save, and load what is left."""
        durable = median(value for one in self.seen[name]["train"] for value in one["durable"])
        for place in places(self.options.tries):
            folder = self.fresh(name)
            with Worker(self, name, "kill", folder, []) as worker:
                worker.until("saving")
                time.sleep(place * durable)
            digests = json.loads(worker.out.read_text())["digests"]
            came = self.load(name, folder, sorted(map(int, digests), reverse=True))
            self.seen[name]["kills"].append(outcome_of_kill(came, digests))
            shutil.rmtree(folder)

    def load(self, name: str, folder: Path, steps: Sequence[int]) -> list[dict[str, Any]]:
        with Worker(self, name, "load", folder, ["--steps", *map(str, steps)]) as worker:
            found: list[dict[str, Any]] = worker.result()
            return found

    def fresh(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder


class Worker:
    """One process of a peer. Its memory is looked at while it runs; it is gone, with its children, at the end."""

    def __init__(self, bench: Bench, name: str, mode: str, folder: Path, more: Sequence[str]) -> None:
        options = bench.options
        self.out, self.log = folder / f"{mode}.json", folder / f"{mode}.log"
        self.phase = self.out.with_suffix(".phase")
        for path in (self.out, self.phase):
            path.unlink(missing_ok=True)
        command = [str(bench.pythons[name]), str(HERE / "peers_worker.py"), mode, f"--peer={name}"]
        command += [f"--folder={folder / 'store'}", f"--out={self.out}", f"--megabytes={options.megabytes}"]
        command += [f"--rows={bench.rows}", f"--seconds={options.seconds}", f"--threads={options.threads}", *more]
        environment = {**os.environ, **ENVIRONMENT, **STEADY, "OMP_NUM_THREADS": str(options.threads)}
        with self.log.open("wb") as log:
            self.process = psutil.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.until_time = time.monotonic() + options.patience
        self.before, self.most = 0, 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        for process in (self.process, *_children(self.process)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        with suppress(ProcessLookupError):  # children of children that are left
            os.killpg(self.process.pid, signal.SIGKILL)

    def result(self) -> Any:
        """What it handed in, once it has ended."""
        while self.process.poll() is None:
            self._look()
            self._require_time()
            time.sleep(0.05)
        if self.process.returncode or not self.out.exists():
            raise PeerError(f"failed: {last_line(self.log.read_text(errors='replace'))}")
        return json.loads(self.out.read_text())

    def until(self, phase: str) -> None:
        while not (self.phase.exists() and self.phase.read_text() == phase):
            if self.process.poll() is not None:
                raise PeerError(f"failed: {last_line(self.log.read_text(errors='replace'))}")
            self._require_time()
            time.sleep(0.005)

    def extra_memory(self) -> int:
        """Bytes, between the peak during a save and what there was before the first."""
        return max(self.most - self.before, 0)

    def _look(self) -> None:
        phase = self.phase.read_text() if self.phase.exists() else ""
        if phase == "baseline" and not self.before:
            self.before = _memory(self.process)
        elif phase == "saving":
            self.most = max(self.most, _memory(self.process))

    def _require_time(self) -> None:
        if time.monotonic() > self.until_time:
            raise PeerError("not finished in the time that a process of a peer has")


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = process.children(recursive=True)
        return found
    except psutil.NoSuchProcess:
        return []


def _memory(process: psutil.Process) -> int:
    """Proportional set size of a process and its children."""
    total = 0
    for one in (process, *_children(process)):
        with suppress(psutil.Error):
            total += one.memory_full_info().pss
    return total


def flipped(store: Path, place: float) -> Path:
    """Flip a byte of the newest of the largest files below a folder: others are of older saves. Which file that is."""
    sizes = {path: path.stat().st_size for path in store.rglob("*") if path.is_file()}
    largest = [path for path, size in sizes.items() if size > 0.9 * max(sizes.values())]
    newest = max(largest, key=lambda path: path.stat().st_mtime_ns)
    flip(newest, place)
    return newest


def flip(path: Path, place: float) -> None:
    """Flip the lowest bits of the byte at a share of a file."""
    with path.open("r+b") as file:
        file.seek(int(place * path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x5A]))


if __name__ == "__main__":
    sys.exit(main())
