"""Two machines as far as the network goes: network namespaces with a cable between them, and a job across both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ENVIRONMENT, WORKERS, Launched


@dataclass(frozen=True)
class Network:
    """One end. name: of the namespace."""

    name: str
    device: str
    address: str


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def two_networks() -> Iterator[Sequence[Network]]:
    """Skips, loudly, where there can be none."""
    ends = [Network(f"driftpoint-{os.getpid()}-{end}", f"dp{os.getpid()}{end}", f"10.77.0.{end}") for end in (1, 2)]
    with ExitStack() as stack:
        try:
            for end in ends:
                _ip("netns", "add", end.name)
                stack.callback(_ip, "netns", "del", end.name)
            one, other = ends
            _ip("link", "add", one.device, "netns", one.name, "type", "veth", "peer", "name", other.device,
                "netns", other.name)  # fmt: skip
            for end in ends:
                _ip("-n", end.name, "addr", "add", f"{end.address}/24", "dev", end.device)
                for device in (end.device, "lo"):
                    _ip("-n", end.name, "link", "set", device, "up")
        except OSError as error:
            pytest.skip(f"there can be no network namespaces here, so two networks are NOT tested: {error}")
        yield ends


def across(
    networks: Sequence[Network], worker: str, spec: Mapping[str, Any], directory: Path, *, timeout: float = 300
) -> Launched:
    """Run a worker on one rank in each network. The code is 0 where both ended well, -1 where time was up."""
    number = len(list(directory.glob("launch-*.json")))
    results, described = directory / f"results-{number}.jsonl", directory / f"launch-{number}.json"
    described.write_text(json.dumps({**spec, "results": str(results), "directory": str(directory)}))
    outputs = [directory / f"output-{number}-{rank}.txt" for rank in range(len(networks))]
    processes = [_started(networks, rank, worker, described, output) for rank, output in enumerate(outputs)]
    try:
        codes = [process.wait(timeout) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [-1]
    finally:
        for process in processes:
            _end(process)
    lines = results.read_text().splitlines() if results.exists() else []
    text = "\n".join(output.read_text() for output in outputs)
    return Launched(next((code for code in codes if code), 0), text, [json.loads(line) for line in lines])


def _started(
    networks: Sequence[Network], rank: int, worker: str, described: Path, output: Path
) -> subprocess.Popen[bytes]:
    here, first = networks[rank], networks[0]
    command = ["ip", "netns", "exec", here.name, sys.executable, "-m", "torch.distributed.run"]
    command += [f"--nnodes={len(networks)}", f"--node-rank={rank}", "--nproc_per_node=1", "--monitor-interval=0.1"]
    command += [f"--master-addr={first.address}", "--master-port=29500"]  # nobody else is in there
    with output.open("w") as file:
        return subprocess.Popen(
            [*command, str(WORKERS / worker), str(described)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": here.device},
            cwd=described.parent,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # torchrun ends its workers, which have sessions of their own
        try:
            process.wait(180)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
