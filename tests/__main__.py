"""Run the suite in stages, each over as many processes as there are cores or a few more, and sum up at the end.

Without options: the fast tests and the core of the slow ones, in one stage, as ``make test`` does. All other arguments
go to pytest. Every stage runs, even if an earlier one fails. The exit code is 1 if any stage fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

FAST = "not slow and not distributed"
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
"""The tests of a file share their launches."""

ROOT = Path(__file__).parents[1]
COUNTED = ("passed", "failed", "skipped")
PASSED, NO_TESTS = 0, 5
EXTENSION = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load(verbose=False)"


@dataclass(frozen=True)
class Stage:
    """A run of pytest over the tests that a marker expression selects.

    Args:
        launches: Whether there are tests that launch jobs, so that those of a file have to come to one process.
        more: Processes beyond one a core, where many tests wait: for other processes, for a server, for a time-out.
    """

    name: str
    selection: str
    launches: bool = True
    more: int = 0


@dataclass(frozen=True)
class Outcome:
    """The result of a stage."""

    stage: str
    code: int
    seconds: float
    counts: dict[str, int]

    @property
    def failed(self) -> bool:
        return self.code not in (PASSED, NO_TESTS)

    def line(self) -> str:
        """Return a row of the table, in the words of pytest's own summary."""
        found = ", ".join(f"{self.counts[kind]} {kind}" for kind in COUNTED if self.counts.get(kind)) or "no tests"
        trouble = f"  (pytest ended with {self.code})" if self.failed else ""
        return f"{self.stage:12} {found} in {self.seconds:.0f}s{trouble}"


def stages(everything: bool, skip_core: bool) -> list[Stage]:
    """Return the stages of ``make test``, or of ``make test-all``."""
    if not everything:
        return [Stage("core", f"({FAST}) or core")]
    slow = Stage("slow", "(slow or distributed) and not core" if skip_core else "slow or distributed", more=1)
    return [slow] if skip_core else [Stage("fast", FAST, launches=False), slow]


def run(stage: Stage, options: Sequence[str], environment: dict[str, str]) -> Outcome:
    """Run one stage to its end."""
    with tempfile.TemporaryDirectory() as folder:
        report, began = Path(folder) / "report.xml", time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "--durations=5", f"--junitxml={report}"]
        command += ["-m", stage.selection, "-n", str(processes() + stage.more)]
        command += [*(BY_FILE if stage.launches else ()), *options]
        code = subprocess.call(command, env=environment)
        outcome = Outcome(stage.name, code, time.monotonic() - began, counts(report))
    print(f"stage {outcome.line()}", flush=True)
    return outcome


def processes() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def counts(report: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, from pytest's report; empty where there is none."""
    if not report.exists():
        return {}
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).iter("testsuite"):
        total = {key: value + int(suite.get(key, 0)) for key, value in total.items()}
    failed = total["failures"] + total["errors"]
    return {"passed": total["tests"] - failed - total["skipped"], "failed": failed, "skipped": total["skipped"]}


def prepare(environment: dict[str, str]) -> None:
    """Compile what processes would compile each for itself.

    DeepSpeed's extension, which the ranks of the first launch would compile side by side, against its time limit; and
    the bytecode of our sources, of which nothing is kept where PYTHONDONTWRITEBYTECODE is set.
    """
    bytecode = ["-m", "compileall", "-q", "-j", str(processes()), "-x", r"/\.", str(ROOT)]
    for words in (["-c", EXTENSION], bytecode):
        subprocess.call([sys.executable, *words], env=environment)


def extensions() -> Path:
    """Return where torch keeps what DeepSpeed compiles: a folder of the suite's own, without locks of earlier runs.

    A process that is killed while it loads such a module leaves a lock behind on which every later one waits forever.
    """
    folder = Path(sys.prefix) / "torch_extensions"
    for lock in folder.rglob("lock"):
        lock.unlink()
    return folder


def main() -> int:
    """Run the stages and print a table of them."""
    parser = argparse.ArgumentParser("python -m tests", description=__doc__, allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help="run every test, not only the fast ones and the core")
    parser.add_argument("--skip-core", action="store_true", help="with --all: leave out what a run without it runs")
    parser.add_argument("--prepare", action="store_true", help="compile what the tests need, and run none")
    chosen, options = parser.parse_known_args()
    # Started in the background of a script, or by nohup, a process ignores Ctrl-C or SIGHUP, and so would the commands
    # under test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # One thread each, since there is a test process for every core.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(extensions())}
    prepare(environment)
    if chosen.prepare:
        return 0
    outcomes = [run(stage, options, environment) for stage in stages(chosen.all, chosen.skip_core)]
    total = {kind: sum(one.counts.get(kind, 0) for one in outcomes) for kind in COUNTED}
    print(f"\n{'stage':12} result on {processes()} cores")
    for outcome in [*outcomes, Outcome("total", PASSED, sum(one.seconds for one in outcomes), total)]:
        print(outcome.line())
    return int(any(one.failed for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
