"""The daemon of a node beside real trainers: who dies, who does not, and what the store holds then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from store.daemon_protocol import socket_path
from store.memory.layout import home
from store.verify import verify
from tests.support.cli import driftpoint, environment
from tests.support.daemons import (
    Trainer,
    alone,
    catalog_of,
    daemon,
    daemon_command,
    known,
    report,
    rescues,
    resumed,
    same,
    settings_of,
    steps,
    trainer,
    until,
)
from tests.support.launch import ENVIRONMENT, WORKERS

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def is_child(trainer: Trainer) -> int:
    return int((trainer.folder / "child").read_text())


@pytest.mark.core
def test_a_killed_trainers_newest_state_is_written(store: Path, base: Path, tmp_path: Path) -> None:
    with daemon(base) as beside, trainer(store, base, 7) as job:
        known(base)
        assert steps(store) == [4]
        job.kill()
        assert beside.rescued() == "written"
        assert steps(store) == [7, 4]
        assert verify(catalog_of(store)).ok
        alone(base)
        assert same(resumed(store, tmp_path), job.state())


def test_a_trainer_that_dies_at_the_moment_that_the_daemon_is_told_to_end(store: Path, base: Path) -> None:
    """As where a session or an allocation ends: all of its processes get the same signal. One that was forked keeps
    the connection open."""
    with daemon(base) as beside, trainer(store, base, 7) as job:
        known(base)
        job.told("fork")
        beside.process.send_signal(signal.SIGSTOP)
        job.kill()
        beside.process.terminate()
        beside.process.send_signal(signal.SIGCONT)
        try:
            assert beside.process.wait(60) == 0
        finally:
            os.kill(is_child(job), signal.SIGKILL)
        assert steps(store) == [7, 4], beside.said()


def test_a_trainer_that_closes_leaves_nothing_to_do(store: Path, base: Path) -> None:
    with daemon(base) as beside, trainer(store, base, 7) as job:
        known(base)
        job.told("close")
        job.kill()
        alone(base)
        assert rescues(base) == []
        assert steps(store) == [7, 4]
        assert "died" not in beside.said()


def test_a_trainer_that_fails_is_rescued(store: Path, base: Path) -> None:
    with daemon(base) as beside, trainer(store, base, 7) as job:
        known(base)
        job.told("fail")
        assert job.process.wait(180) == 1
        assert beside.rescued() == "written"
        assert steps(store)[0] == 7


def test_a_stopped_trainer_lives(store: Path, base: Path) -> None:
    with daemon(base) as beside, trainer(store, base, 7) as job:
        known(base)
        job.stop()
        until(lambda: Path(f"/proc/{job.process.pid}/stat").read_text().split()[2] == "T", "a stop")
        found = report(base)
        assert found is not None and found.jobs[0].state == "training" and not found.rescues
        job.kill()
        assert beside.rescued() == "written"


def test_a_forked_child_that_keeps_the_connection_does_not_keep_the_rescue(store: Path, base: Path) -> None:
    with daemon(base) as beside, trainer(store, base, 7) as job:
        known(base)
        job.told("fork")
        try:
            job.kill()
            assert beside.rescued() == "written"
            os.kill(is_child(job), 0)
        finally:
            os.kill(is_child(job), signal.SIGKILL)


def test_a_new_job_goes_on_without_waiting(store: Path, base: Path) -> None:
    with daemon(base), trainer(store, base, 7) as job:
        known(base)
        job.kill()
        with trainer(store, base, 9) as second:
            known(base)
            assert second.state()["step"] == 9
            assert verify(catalog_of(store)).ok
            second.kill()
            until(lambda: steps(store)[0] == 9, "the second rescue")
            alone(base)
        assert verify(catalog_of(store)).ok


def test_a_daemon_that_is_killed_is_missed_once_and_another_one_found(store: Path, base: Path) -> None:
    with daemon(base) as first, trainer(store, base, 7) as job:
        known(base)
        first.kill()
        until(lambda: "node daemon is gone" in job.said(), "a warning")
        for _ in range(2):
            job.told("step")
        with daemon(base) as second:
            known(base)
            assert job.said().count("node daemon is gone") == 1, job.said()
            job.kill()
            assert second.rescued() == "written"
        assert steps(store)[:2] == [9, 8]


def test_a_trainer_starts_a_daemon_and_another_when_that_is_killed(store: Path, base: Path) -> None:
    wanted = {"enabled": True, "start": True, "port": 0, "exit_idle_seconds": 3.0}
    with trainer(store, base, 7, daemon=wanted) as job:
        known(base)
        first = report(base)
        assert first is not None and first.pid != job.process.pid
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: (found := report(base)) and found.pid != first.pid, "another daemon")
        known(base)
        job.kill()
        until(lambda: steps(store)[0] == 7, "the rescue")
    until(lambda: not (home(base) / "daemon.sock").exists(), "the end of a daemon that nobody needs")


def test_what_died_together_with_its_daemon_is_found_by_the_next_one(store: Path, base: Path) -> None:
    with daemon(base) as first, trainer(store, base, 7) as job:
        known(base)
        first.kill()
        job.kill()
    with daemon(base):
        until(lambda: steps(store)[0] == 7, "the rescue")
        assert verify(catalog_of(store)).ok


def torchrun(store: Path, base: Path, folder: Path, ranks: int = 2) -> subprocess.Popen[bytes]:
    spec = {"store": str(store), "folder": str(folder), "steps": 7, "settings": settings_of(base, {})}
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["--monitor-interval=0.1", str(WORKERS / "daemon_train.py"), str(folder / "spec.json")]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT})


@pytest.mark.distributed
def test_one_rank_of_two_is_killed(store: Path, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    with daemon(base) as beside:
        launched = torchrun(store, base, folder)
        try:
            until(lambda: all((folder / f"ready-{rank}").exists() for rank in (0, 1)), (folder / "output").read_text())
            known(base, 2)
            os.kill(int((folder / "ready-1").read_text()), signal.SIGKILL)
            assert beside.rescued() == "written"
        finally:
            launched.terminate()
            launched.wait(180)
    catalog = catalog_of(store)
    manifest = catalog.manifest(catalog.saves()[0])
    assert (manifest.step, manifest.world_size) == (7, 2)
    assert verify(catalog).ok
    kept = torch.load(folder / "state.pt")
    found = resumed(store, tmp_path)
    assert all(torch.equal(found[name], kept[name]) for name in kept if "/" in name)


def test_survivors_are_named_and_nothing_is_written_while_they_live(store: Path, base: Path, tmp_path: Path) -> None:
    """One rank killed, the other and its launcher stopped."""
    folder = tmp_path / "job"
    folder.mkdir()
    with daemon(base) as beside:
        launched = torchrun(store, base, folder)
        try:
            until(lambda: all((folder / f"ready-{rank}").exists() for rank in (0, 1)), "two ranks")
            known(base, 2)
            pids = [int((folder / f"ready-{rank}").read_text()) for rank in (0, 1)]
            launched.send_signal(signal.SIGSTOP)
            os.kill(pids[0], signal.SIGSTOP)
            os.kill(pids[1], signal.SIGKILL)
            until(lambda: f"rank 0 (process {pids[0]}) live" in beside.said(), "the survivor's name")
            found = report(base)
            assert found is not None and found.jobs[0].state == "dying" and not found.rescues
            os.kill(pids[0], signal.SIGKILL)
            assert beside.rescued() == "written"
        finally:
            launched.send_signal(signal.SIGCONT)
            launched.terminate()
            launched.wait(180)
    assert steps(store)[0] == 7


_SUPERVISED = """
import subprocess, sys, time
from pathlib import Path
from deploy.supervisor.processes import adopt_orphans, end_descendants
adopt_orphans()
subprocess.run([sys.executable, "-c", "import subprocess, sys; subprocess.Popen(sys.argv[1:], "
    "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)", *sys.argv[2:]])
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
print(end_descendants(5.0, 5.0))
"""


def test_a_supervisor_that_ends_what_a_job_left_leaves_the_daemon_alone(base: Path) -> None:
    """It may be in the middle of writing what that job left in memory."""
    words = [sys.executable, "-c", _SUPERVISED, str(socket_path(base)), *daemon_command(base)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment(), timeout=300, check=True)
    try:
        assert done.stdout == "(0, 0)\n"
        assert report(base) is not None
    finally:
        assert driftpoint("daemon", "stop", "--memory", base).code == 0
    until(lambda: not socket_path(base).exists(), "its end")


def test_run_starts_the_daemon_that_the_configuration_wants(base: Path) -> None:
    """Before the command, and it outlives it."""
    config = base.parent / "driftpoint.yaml"
    section = f"{{enabled: true, port: 0}}\nmemory: {{enabled: true, path: {base}}}"
    config.write_text(f"store: {base.parent / 'store'}\ndaemon: {section}\n")
    words = [sys.executable, "-m", "deploy.cli", "run", "-c", str(config), "--", sys.executable, "-c", "pass"]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, env=environment(), timeout=300, check=True)
    assert "started the node's daemon" in done.stderr
    try:
        until(lambda: report(base), "the daemon")
        again = subprocess.run(words, stderr=subprocess.PIPE, text=True, env=environment(), timeout=300, check=True)
        assert "daemon" not in again.stderr
    finally:
        assert driftpoint("daemon", "stop", "--memory", base).code == 0
    until(lambda: not socket_path(base).exists(), "its end")
