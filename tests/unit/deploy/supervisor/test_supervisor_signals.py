"""Signals to ``driftpoint run``: who gets which, what follows, and what is left afterwards. Real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from deploy.supervisor.processes import handles_signal, processes_handling
from tests.support.cli import environment
from tests.support.supervised import PYTHON, Supervised, alive, supervised, training

pytestmark = pytest.mark.slow

TALKER = """
import json, os, signal, subprocess, sys, time
def record(**facts):
    with open("results.jsonl", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), **facts}) + "\\n")
def heard(number, frame):
    record(kind="signal", number=number)
    if number in leaves:
        os._exit(leaves[number])
handles, leaves, ignores = eval(sys.argv[1]), eval(sys.argv[2]), eval(sys.argv[3])
for number in handles:
    signal.signal(number, heard)
for number in ignores:
    signal.signal(number, signal.SIG_IGN)
children = [subprocess.Popen([sys.executable, __file__, *json.loads(one)]) for one in sys.argv[4:]]
record(kind="ready", children=len(children), parent=os.getppid())
while True:
    time.sleep(0.05)
"""
"""Python of its own: handles, leaves with a code, ignores; starts children."""


def talker(
    folder: Path, handles: Sequence[int] = (), leaves: Mapping[int, int] | None = None, ignores: Sequence[int] = (),
    children: Sequence[str] = (),
) -> list[object]:  # fmt: skip
    """The command. children: each as :func:`child` makes it."""
    (folder / "talker.py").write_text(TALKER)
    return [sys.executable, folder / "talker.py", *_arguments(handles, leaves or {}, ignores), *children]


def child(
    handles: Sequence[int] = (), leaves: Mapping[int, int] | None = None, ignores: Sequence[int] = (),
    children: Sequence[str] = (),
) -> str:  # fmt: skip
    return json.dumps([*_arguments(handles, leaves or {}, ignores), *children])


def _arguments(handles: Sequence[int], leaves: Mapping[int, int], ignores: Sequence[int]) -> list[str]:
    return [repr([int(n) for n in handles]), repr({int(n): code for n, code in leaves.items()}), repr([*ignores])]


def ready(run: Supervised, count: int) -> list[int]:
    run.until(lambda: len(run.of("ready")) == count)
    return [one["pid"] for one in run.of("ready")]


def gone(pids: list[int]) -> bool:
    return not any(map(alive, pids))


def test_the_trainers_own_handler_is_asked_first_and_the_job_is_preempted(tmp_path: Path) -> None:
    """As a launcher makes of it: the trainer leaves with 75, its parent with 1."""
    command = ["sh", "-c", '"$@" & wait $! || exit 1', "sh", *talker(tmp_path, [signal.SIGUSR1], {signal.SIGUSR1: 75})]
    with supervised(tmp_path, command, "--grace", 60) as run:
        pids = ready(run, 1)
        run.send(signal.SIGTERM)
        assert run.ends() == 75, run.said
        assert [one["number"] for one in run.of("signal")] == [signal.SIGUSR1]
        assert "SIGTERM: SIGUSR1 to 1 process; SIGTERM in 60 s" in run.said and "preempted" in run.said
        assert gone(pids)


def test_sigusr1_goes_to_those_that_handle_it_and_to_nobody_else(tmp_path: Path) -> None:
    """The command itself would die of it. Below one that handles it nobody gets it: a data loader's worker inherits
    its trainer's handler, and a launcher that has one passes it on."""
    trainer = child([signal.SIGUSR1], {}, [], [child([signal.SIGUSR1])])
    with supervised(tmp_path, talker(tmp_path, children=[trainer, child()])) as run:
        pids = ready(run, 4)
        top = next(one["pid"] for one in run.of("ready") if one["parent"] == run.process.pid)
        handles = [
            one["pid"] for one in run.of("ready") if one["parent"] == top and handles_signal(one["pid"], signal.SIGUSR1)
        ]
        assert len(handles) == 1 and [one.pid for one in processes_handling(top, signal.SIGUSR1)] == handles
        run.send(signal.SIGUSR1)
        run.until(lambda: run.of("signal"))
        assert [one["pid"] for one in run.of("signal")] == handles
        assert alive(top), "it would have died of the signal"
        os.kill(top, signal.SIGKILL)
        assert run.ends() == 75, "it was told that the end is near, and then it ended"
        assert gone(pids)


def test_a_signal_that_nobody_handles_is_not_passed_on(tmp_path: Path) -> None:
    with supervised(tmp_path, talker(tmp_path), "--max-restarts", 0) as run:
        (pid,) = ready(run, 1)
        run.send(signal.SIGUSR2)
        run.until(lambda: "SIGUSR2: no process of the command handles it" in run.said)
        assert alive(pid)
        os.kill(pid, signal.SIGKILL)
        assert run.ends() == 93, "so its death was a failure like any other"


def test_sigterm_goes_to_the_command_where_nobody_handles_sigusr1(tmp_path: Path) -> None:
    with supervised(tmp_path, talker(tmp_path, [signal.SIGTERM], {signal.SIGTERM: 0})) as run:
        ready(run, 1)
        run.send(signal.SIGTERM)
        assert run.ends() == 0, "it ended well, so nothing is left to be done"
    with supervised(tmp_path, talker(tmp_path)) as run:
        ready(run, 2)
        run.send(signal.SIGHUP)
        assert run.ends() == 75, run.said


def test_when_the_grace_is_over_it_is_terminated_and_what_ignores_that_is_killed(tmp_path: Path) -> None:
    command = talker(tmp_path, [signal.SIGUSR1], {}, [15], [child(ignores=[15])])
    with supervised(tmp_path, command, "--grace", 0.2) as run:
        pids = ready(run, 2)
        run.send(signal.SIGTERM)
        assert run.ends() == 75, run.said
        assert "the grace period of 0.2 s is over: SIGTERM to the command; SIGKILL in 10 s" in run.said
        assert "it did not end: SIGKILL to all processes of the command" in run.said
        assert gone(pids)


def test_a_second_signal_terminates_and_a_third_kills(tmp_path: Path) -> None:
    command = talker(tmp_path, [10, 15], children=[child(ignores=[15])])
    with supervised(tmp_path, command, "--grace", 3600) as run:
        pids = ready(run, 2)
        run.send(signal.SIGTERM)
        run.until(lambda: [one["number"] for one in run.of("signal")] == [10])
        run.send(signal.SIGTERM)
        run.until(lambda: [one["number"] for one in run.of("signal")] == [10, 15])
        run.send(signal.SIGTERM)
        assert run.ends() == 75, run.said
        assert "a second SIGTERM" in run.said and "a third SIGTERM" in run.said
        assert gone(pids)


def test_ctrl_c_is_passed_on_once_and_is_the_end(tmp_path: Path) -> None:
    with supervised(tmp_path, talker(tmp_path, [signal.SIGINT], {signal.SIGINT: 0})) as run:
        ready(run, 1)
        run.send(signal.SIGINT)
        assert run.ends() == 130, run.said
        assert [one["number"] for one in run.of("signal")] == [2]


def test_of_two_supervisors_around_a_job_the_inner_one_knows_that_it_is_told_to_go(tmp_path: Path) -> None:
    """Else it takes the trainer that leaves with 75 for one that somebody else preempted, and starts it again."""
    trainer = talker(tmp_path, [signal.SIGUSR1], {signal.SIGUSR1: 75})
    inner = [*PYTHON, "-m", "deploy.cli", "run", "--store", tmp_path / "store", "--", *trainer]
    with supervised(tmp_path, inner) as run:
        ready(run, 1)
        run.send(signal.SIGTERM)
        assert run.ends() == 75, run.said
        assert len(run.of("ready")) == 1 and "attempt 2" not in run.said


def test_a_back_off_longer_than_the_system_counts(tmp_path: Path) -> None:
    with supervised(tmp_path, ["false"], "--backoff", 1e12) as run:
        run.until(lambda: "attempt 1 ended" in run.said)
        run.send(signal.SIGTERM)
        assert run.ends() == 75, run.said


def test_a_signal_between_two_attempts_is_the_end(tmp_path: Path) -> None:
    for number, code in ((signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)):
        with supervised(tmp_path, ["sh", "-c", "exit 1"], "--backoff", 3600) as run:
            before = run.said.count("ended: exit code 1")
            run.until(lambda before=before, run=run: run.said.count("ended: exit code 1") > before)  # type: ignore[misc]
            run.send(number)
            assert run.ends() == code, run.said


@pytest.mark.parametrize(("code", "told"), [(0, 0), (1, 93)])
def test_a_signal_when_all_is_over_changes_nothing(tmp_path: Path, code: int, told: int) -> None:
    """While it ends what the command left behind: the job is done, or failed for good, and that is what is told."""
    left = "trap 'touch heard; until [ -e go ]; do sleep 0.02; done; exit' TERM; touch up; while :; do sleep 0.02; done"
    script = f'sh -c "{left}" & until [ -e up ]; do sleep 0.02; done; exit {code}'
    with supervised(tmp_path, ["sh", "-c", script], "--max-restarts", 0) as run:
        run.until((tmp_path / "heard").exists)
        run.send(signal.SIGTERM)
        (tmp_path / "go").touch()
        assert run.ends() == told, run.said


def test_two_signals_between_two_attempts_are_one_end(tmp_path: Path) -> None:
    with supervised(tmp_path, ["sh", "-c", "exit 1"], "--backoff", 3600) as run:
        run.until(lambda: "ended: exit code 1" in run.said)
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT):
            run.send(number)
        assert run.ends() == 75, run.said


def test_what_a_dead_command_leaves_behind_is_ended_before_the_next_attempt(tmp_path: Path) -> None:
    """Also what went into a session of its own, as torchrun's workers do, and what does not mind SIGTERM."""
    script = """
import json, os, subprocess, sys, time
with open("results.jsonl", "a") as file:
    def left(*command):
        pid = subprocess.Popen(command, start_new_session=True).pid
        file.write(json.dumps({"kind": "left", "pid": pid}) + "\\n")
    left("sleep", "3600")
    left("sh", "-c", "trap '' TERM; while :; do sleep 1; done")
    left("sh", "-c", "sleep 3600 & sleep 3600")
alive = [one for one in map(json.loads, open("results.jsonl")) if os.path.exists(f"/proc/{one['pid']}")]
sys.exit(40 + len(alive))
"""
    (tmp_path / "leaver.py").write_text(script)
    with supervised(tmp_path, [sys.executable, tmp_path / "leaver.py"], "--max-restarts", 1) as run:
        assert run.ends() == 93, run.said
        assert run.said.count("exit code 43") >= 2 and "exit code 46" not in run.said
        assert "processes that the command left behind" in run.said
        assert gone([one["pid"] for one in run.of("left")])
        sleepers = [p for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cwd"] == str(tmp_path)]
        assert sleepers == []


def test_what_the_script_around_it_started_stays(tmp_path: Path) -> None:
    """A container's script starts a helper and becomes the supervisor by `exec`: the helper is its child then."""
    run = f"{sys.executable} -m deploy.cli run --store store --backoff 0 --max-restarts 1 --grace 0"
    parts = ["sleep 3600 & echo $! > helper", f"exec {run} -- sh -c 'sleep 3600 & echo $! >> left; exit 1'"]
    with (tmp_path / "said").open("wb") as said:
        script = ["bash", "-c", "; ".join(parts)]
        done = subprocess.run(script, cwd=tmp_path, env=environment(), timeout=60, check=False, stderr=said)
    helper = psutil.Process(int((tmp_path / "helper").read_text()))
    try:
        text = (tmp_path / "said").read_text()
        assert done.returncode == 93 and text.count("ended 1 processes") == 2, text
        assert helper.is_running() and helper.status() != psutil.STATUS_ZOMBIE
        assert gone([int(pid) for pid in (tmp_path / "left").read_text().split()])
    finally:
        helper.kill()


def test_no_zombies_pile_up_while_the_command_runs(tmp_path: Path) -> None:
    """What the command's dead children leave becomes the supervisor's, and ends there."""
    script = """
import os, subprocess, time
subprocess.run(["sh", "-c", "(sleep 0.2; echo $$ > orphan) &"])
time.sleep(3600)
"""
    (tmp_path / "parent.py").write_text(script)
    with supervised(tmp_path, [sys.executable, tmp_path / "parent.py"]) as run:
        run.until((tmp_path / "orphan").exists)
        supervisor = psutil.Process(run.process.pid)
        run.until(lambda: len(supervisor.children()) == 1)
        run.send(signal.SIGTERM)
        assert run.ends() == 75


def test_a_killed_supervisor_leaves_training_alone_and_the_next_one_sees_it(tmp_path: Path) -> None:
    with supervised(tmp_path, PYTHON + training(tmp_path, dies=[[1, 3, "hang"]])) as run:
        run.until(lambda: run.of("dies"))
        pid = run.of("dies")[0]["pid"]
        run.process.kill()
        assert run.ends() == -signal.SIGKILL
        assert alive(pid)
        with supervised(tmp_path, ["touch", tmp_path / "ran"]) as second:
            assert second.ends() == 11
            assert f"in use by process {pid}" in second.said and not (tmp_path / "ran").exists()
        os.kill(pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(pid)] if alive(pid) else [], timeout=30)
        with supervised(tmp_path, PYTHON + training(tmp_path, total=4)) as third:
            assert third.ends() == 0, third.said
            assert third.starts[-1] == 2


def test_the_command_gets_signals_as_the_supervisor_found_them_and_stdin_and_stdout(tmp_path: Path) -> None:
    code = "import signal,sys; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), input(), file=sys.stdout)"
    command = [sys.executable, "-m", "deploy.cli", "run", "--store", "store", "--", sys.executable, "-c", code]
    done = subprocess.run(
        command,
        input="line\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "set() line\n")
    assert "driftpoint run: attempt 1" in done.stderr


def test_nobody_reading_what_it_says_is_no_reason_to_stop(tmp_path: Path) -> None:
    counted = tmp_path / "count"
    script = f"echo x >> {counted}; test $(wc -l < {counted}) -ge 3"
    command = [
        sys.executable,
        "-m",
        "deploy.cli",
        "run",
        "--store",
        "store",
        "--backoff",
        "0.01",
        "--events",
        "/dev/full",
    ]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*command, "--", "sh", "-c", script], stderr=writer, cwd=tmp_path, env=environment(), timeout=60, check=False
    )
    os.close(writer)
    assert done.returncode == 0
    assert counted.read_text() == "x\n" * 3


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_reason_not_to_run(tmp_path: Path, closed: str) -> None:
    """Neither the command nor the store gets 0, 1 or 2 for a file of its own: what others print would go into it."""
    code = "import os; print(os.open('of_its_own', os.O_CREAT), file=open('number', 'w'))"
    run = f"{sys.executable} -m deploy.cli run --store store -- {sys.executable} -c"
    done = subprocess.run(
        ["bash", "-c", f'{run} "$1" {closed}', "bash", code], cwd=tmp_path, env=environment(), timeout=60, check=False
    )
    assert done.returncode == 0
    assert int((tmp_path / "number").read_text()) > 2
