"""torchrun's elastic agent with a changing number of ranks: one agent is killed, another one joins, and the job goes on
from the newest commit each time, exactly, as many ranks as there are."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.launch import ENVIRONMENT, WORKERS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 4000
"""More than the test waits for; the records end it."""

RENDEZVOUS = "timeout=120,last_call_timeout=1,join_timeout=120,close_timeout=10,read_timeout=20"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def kill(agent: subprocess.Popen[bytes]) -> None:
    """The agent and its worker at once, as when their machine is lost."""
    with suppress(psutil.NoSuchProcess):
        own = psutil.Process(agent.pid)
        for one in [own, *own.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    agent.wait()


@contextmanager
def agent(directory: Path, port: int, name: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=9"),
        *("--monitor-interval=0.2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=elastic"),
        *(f"--rdzv-conf={RENDEZVOUS}", str(WORKERS / "elastic_train.py")),
        *(str(directory / "store"), str(directory / "records"), str(STEPS)),
    ]
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT}, start_new_session=True
        )
    try:
        yield process
    finally:
        kill(process)


def wait_for(directory: Path, what: Callable[[list[dict[str, Any]]], bool], timeout: float = 180) -> None:
    until, records = time.monotonic() + timeout, directory / "records"
    while not (records.exists() and what([json.loads(line) for line in records.read_text().splitlines()])):
        if time.monotonic() > until:
            logs = "\n".join(one.read_text()[-3000:] for one in sorted(directory.glob("*.log")))
            pytest.fail(f"{records.read_text() if records.exists() else 'no records'}\n{logs}")
        time.sleep(0.1)


def wait_to_listen(port: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("localhost", port), 1):
            return
        time.sleep(0.1)
    pytest.fail(f"nobody listens on port {port}")


def starts(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in records if "start" in one]


def trained(records: list[dict[str, Any]], ranks: int, steps: int) -> bool:
    """Whether the newest start has so many ranks, and has made so many steps."""
    newest = max((index for index, one in enumerate(records) if "start" in one), default=-1)
    return newest >= 0 and records[newest]["ranks"] == ranks and len(records) - newest > steps


def test_ranks_come_and_go(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(agent(tmp_path, port, "first"))
        wait_to_listen(port)  # the first agent is to keep the rendezvous
        second = stack.enter_context(agent(tmp_path, port, "second"))
        wait_for(tmp_path, lambda found: trained(found, 2, 20))
        kill(second)
        wait_for(tmp_path, lambda found: trained(found, 1, 20))
        stack.enter_context(agent(tmp_path, port, "third"))
        wait_for(tmp_path, lambda found: trained(found, 2, 20) and len(starts(found)) >= 3)
    found = starts([json.loads(line) for line in (tmp_path / "records").read_text().splitlines()])
    resumed = [one for one in found if one["start"] > 0]
    assert len(resumed) >= 2
    assert all(one["exact"] for one in resumed)
    assert [one["start"] for one in found] == sorted(one["start"] for one in found)
