"""An external judge, ckpt-chaos, kills training scripts at every file event and judges what a second start makes of it.

Its command line gets the scripts and all failing verdicts, as a user gives them. Three things are ours. None of them
lets more pass:

- Its processes are forked from one that has imported torch already (``judge_server.py``).
- It takes the last number in a checkpoint's name for the step. In a manifest's name that is the epoch, so here it is
  the first. A commit counts as complete from the moment that its manifest has a name (``--ckpt-ignore-size``).
- Its option ``--crash-rank 1`` kills no process (0.1.8): what it hands to its own injector lacks the rank.

    pytest -s tests/crash/test_ckpt_chaos.py            # prints the judge's tables
"""

from __future__ import annotations

import json
import os
import re
import socket as socket_
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

try:
    from ckpt_chaos import byo, cli, runner, scoreboard
except ImportError:
    pytest.skip(
        "ckpt-chaos is missing: what it finds after a kill at each file event is NOT tested: pip install ckpt-chaos",
        allow_module_level=True,
    )

from tests.support.launch import ENVIRONMENT
from tests.support.mounts import shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

HERE = Path(__file__).parent
FAILING = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"
EVERY_EVENT = "1000"  # crash points at most: far more than there are
SAVED = [2, 4, 6]
TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{12}-")


@dataclass(frozen=True)
class Judge:
    """Runs ckpt-chaos on a script. socket: of the process that its own are forked from."""

    socket: Path
    work: Path

    def command(self, script: str, *flags: str) -> list[str]:
        """Return the words that run a script, with {out} for where it writes."""
        client = (sys.executable, "-I", "-S", str(HERE / "judge_client.py"), str(self.socket))
        return [*client, str(HERE / script), "{out}", *flags]

    def run(self, script: str, *options: str, flags: Sequence[str] = ()) -> tuple[int, list[runner.Row]]:
        """Return the exit code of its command line, and a row for each crash point, the control first."""
        words = [
            *("run", "--work", str(self.work), "--max-points", EVERY_EVENT, "--timeout", "300", "--fail-on", FAILING),
            *("--checkpoint-glob", "{out}/store/manifests/*.json", "--ckpt-ignore-size"),
            *("--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/final.safetensors", *options),
            *("--", *self.command(script, *flags)),
        ]
        code = cli.main(words)
        print(scoreboard.markdown([scoreboard.summarize(self.work, script)]))
        return code, runner.rejudge(self.work)

    def events(self, folder: str, rank: int) -> list[tuple[str, str, bool]]:
        """Return the file events of a run, in order: kind, name, and whether the judge can tear the file."""
        seen = byo._events(self.work / folder / f"events.log.rank{rank}")
        return [(kind, TEMPORARY.sub(".tmp-", name), torn) for _, kind, name, torn in seen]

    def killed_at(self, rank: int) -> Counter[tuple[str, str, str]]:
        """Count the crash points: the last event that each killed run began, and how it ended it."""
        points = {path.parent.name: json.loads(path.read_text()) for path in self.work.glob("pt_[0-9]*/result.json")}
        return Counter((*self.events(name, rank)[-1][:2], result["point"][1]) for name, result in points.items())


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "socket"
        environment = {**os.environ, **ENVIRONMENT}
        environment["PYTHONPATH"] = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(byo.PKG_PARENT)])
        server = subprocess.Popen(
            [sys.executable, str(HERE / "judge_server.py"), str(address)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == b"listening\n"
        yield address
        server.stdin.close()
        assert server.wait(60) == 0


PORTS = count(20_000 + os.getpid() % 600 * 20)


def port() -> int:
    """Return a free port below those that connections get by themselves: none takes it before a job listens there."""
    for number in PORTS:
        with suppress(OSError), socket_.socket() as one:
            one.bind(("127.0.0.1", number))
            return number
    raise AssertionError


@pytest.fixture
def judge(socket: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(byo, "_free_port", port)

    def commits(_: str, out: Path) -> byo.Snapshot:
        found = (out / "store" / "manifests").glob("0*.json")
        return {path.name: (int(path.name.split("-")[0]), byo._signature(path)) for path in found}

    monkeypatch.setattr(byo, "_snapshot", commits)
    with shared_memory("driftpoint-judge-") as folder:  # syncing means nothing where no power is lost
        yield Judge(socket, folder / "judged")


@pytest.mark.parametrize(
    ("script", "ranks", "killed"),
    [
        pytest.param("judged_loop.py", 1, 0, id="plain"),
        pytest.param("judged_loop.py", 2, 0, id="two-ranks-first-killed"),
        pytest.param("judged_loop.py", 2, 1, id="two-ranks-second-killed"),
        pytest.param("judged_trainer.py", 1, 0, id="trainer"),
        pytest.param("judged_trainer.py", 2, 0, id="trainer-two-ranks-first-killed"),
        pytest.param("judged_trainer.py", 2, 1, id="trainer-two-ranks-second-killed"),
    ],
)
def test_a_job_killed_at_any_file_event_continues_from_its_newest_commit(
    judge: Judge, script: str, ranks: int, killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_CHAOS_CRASH_RANK", str(killed))
    options = ["--ranks", str(ranks), "--crash-rank", str(killed), "--jobs", str(2 * ranks)]
    check(judge, killed, *judge.run(script, *options))


def test_a_resumed_job_killed_at_any_file_event_continues_from_its_newest_commit(judge: Judge, tmp_path: Path) -> None:
    """Nor does a job that dies right after a resume cost the commit that it came from."""
    first = [word.replace("{out}", str(tmp_path)) for word in judge.command("judged_loop.py", "--steps", "2")]
    subprocess.run(first, check=True)
    ran = judge.run("judged_loop.py", "--jobs", "2", flags=["--after", str(tmp_path)])
    check(judge, 0, *ran)


def check(judge: Judge, killed: int, code: int, judged: Sequence[runner.Row]) -> None:
    """Assert that each file event ended one run, and that no run lost anything."""
    control, *rows = judged
    for path in sorted(judge.work.rglob("rank*.log")):
        if "Traceback" in (text := path.read_text(errors="replace")):
            print(f"{path.relative_to(judge.work)}: {text[-3000:]}")
    assert [(row.label, row.verdict) for row in judged if row.verdict != "PASS"] == []
    assert code == 0
    assert not control.crashed
    assert all(row.crashed for row in rows)

    events = judge.events("reference", killed)
    planned = Counter((kind, name, "before") for kind, name, _ in events)
    planned += Counter((kind, name, "torn") for kind, name, torn in events if torn)
    assert judge.killed_at(killed) == planned, "each event ended one run"
    assert json.loads((judge.work / "meta.json").read_text())["reference_steps"] == SAVED
    complete = {row.outcome.newest_complete_step for row in rows}
    assert complete | {SAVED[-1]} == {0, *SAVED}
    assert complete == {0, *SAVED} or killed, "rank 0 may commit after the last event of another rank"


def test_the_judge_finds_a_resume_that_passes_over_the_newest_commit(judge: Judge, tmp_path: Path) -> None:
    """And a forked process goes through the events that a process of its own goes through."""
    forgetful = " ".join(judge.command("judged_loop.py", "--forget"))
    code, (_, *rows) = judge.run("judged_loop.py", "--resume-cmd", forgetful, "--max-points", "8", "--modes", "before")
    assert code == 1
    assert {row.outcome.newest_complete_step for row in rows} > {0}
    for row in rows:
        assert row.verdict == ("LOST_WORK" if row.outcome.newest_complete_step else "PASS"), row

    armed = {"WATCH": f"{tmp_path}/out", "LOG": f"{judge.work}/fresh/events.log", "TORN_PYTHON": "1"}
    environment = byo._env({f"CKPT_CHAOS_{name}": value for name, value in armed.items()})
    (judge.work / "fresh").mkdir()
    words = [sys.executable, str(HERE / "judged_loop.py"), f"{tmp_path}/out"]
    subprocess.run(words, env=environment, check=True)
    assert judge.events("fresh", 0) == judge.events("reference", 0)
