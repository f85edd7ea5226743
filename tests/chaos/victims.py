"""What a round of random kills does to a job: each way is a function of the processes there are, by name."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tests.support.launch import Started


@dataclass(frozen=True)
class Target:
    """A job that runs. launcher: the process that was started, a supervisor, torchrun or the trainer itself. daemon:
    the node's, where there is one."""

    launcher: int
    ranks: Mapping[int, int]
    """rank -> process id."""
    daemon: int | None = None


def kill(pid: int) -> None:
    """SIGKILL, where it still lives."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def one_rank(target: Target, chance: random.Random) -> None:
    """Its launcher ends the others."""
    kill(target.ranks[chance.choice(sorted(target.ranks))])


def all_ranks(target: Target, chance: random.Random) -> None:
    """One after the other, with or without a moment between."""
    for rank in chance.sample(sorted(target.ranks), len(target.ranks)):
        kill(target.ranks[rank])
        time.sleep(chance.choice([0, 0, 0.005]))


def everything(target: Target, chance: random.Random) -> None:
    """The launcher first, so that nobody ends the ranks in good order."""
    kill(target.launcher)
    all_ranks(target, chance)


def stopped(target: Target, chance: random.Random) -> None:
    """One rank sleeps, the others wait for it; it wakes up, and dies a moment later."""
    pid = target.ranks[chance.choice(sorted(target.ranks))]
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(chance.uniform(0.01, 0.3))
        os.kill(pid, signal.SIGCONT)
        time.sleep(chance.uniform(0, 0.05))
    kill(pid)


def daemon_first(target: Target, chance: random.Random) -> None:
    """Nobody is there to write what the ranks leave, unless they had the time to start another one."""
    assert target.daemon is not None
    kill(target.daemon)
    time.sleep(chance.choice([0, 0.05, 1.0]))
    everything(target, chance)


def daemon_last(target: Target, chance: random.Random) -> None:
    """It may be in the middle of writing what the ranks left."""
    assert target.daemon is not None
    everything(target, chance)
    time.sleep(chance.uniform(0, 0.4))
    kill(target.daemon)


def daemon_lives(target: Target, chance: random.Random) -> None:
    """It has a moment, long enough or not, until the job comes back."""
    everything(target, chance)
    time.sleep(chance.uniform(0, 1.0))


DAEMON_VICTIMS: dict[str, Callable[[Target, random.Random], None]] = {
    "daemon first": daemon_first,
    "daemon last": daemon_last,
    "daemon lives": daemon_lives,
}
"""Where there is one."""

VICTIMS: dict[str, Callable[[Target, random.Random], None]] = {
    "one rank": one_rank,
    "all ranks": all_ranks,
    "everything": everything,
    "stopped": stopped,
}
"""By name; more of them may be added, and named on the command line."""


def end_job(process: Started | subprocess.Popen[bytes], pids: Iterable[int]) -> None:
    """Give a launcher a moment to end what it started, and its ranks one to be gone; then kill what is left.

    Processes are looked up first: a minute later, on a busy machine, their ids may be those of others."""
    found = []
    for pid in sorted({*pids} - {process.pid}):
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    try:
        process.wait(45)
    except subprocess.TimeoutExpired:
        found += [one for one in psutil.Process(process.pid).children(recursive=True) if one not in found]
        process.kill()
        process.wait(30)
    _, left = psutil.wait_procs(found, timeout=30)
    for one in left:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(left, timeout=10)
