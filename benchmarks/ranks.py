"""Starting the ranks of a benchmark: under torchrun for one result, or one by one so that they can be killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
}


def torchrun(worker: str, arguments: Sequence[str], out: Path, count: int = 2) -> Any:
    """``count`` ranks of ``worker``, to their end; what they wrote to ``out``, which is given to them as ``--out``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    command += [str(HERE / worker), *arguments, f"--out={out}"]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT})
    return json.loads(out.read_text())


class Ranks:
    """``count`` processes of a worker, each of which writes a JSON file and waits to be killed: at the end of the
    context at the latest."""

    def __init__(self, worker: str, arguments: Sequence[str], folder: Path, count: int = 2) -> None:
        self.outs = [folder / f"rank-{rank}.json" for rank in range(count)]
        for out in self.outs:
            out.unlink(missing_ok=True)
        common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
        common |= {**ENVIRONMENT, "MASTER_PORT": str(_free_port())}
        self.processes = []
        for rank, out in enumerate(self.outs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, str(HERE / worker), *arguments, f"--out={out}", f"--started={time.time()}"]
            self.processes.append(subprocess.Popen(command, env={**os.environ, **common, **own}))

    def results(self, timeout: float = 300) -> list[Any]:
        """What each rank wrote, once all have. RuntimeError where one of them ends first, or takes too long."""
        until = time.monotonic() + timeout
        while not all(out.exists() for out in self.outs):
            ended = [process.returncode for process in self.processes if process.poll() is not None]
            if ended or time.monotonic() > until:
                raise RuntimeError(f"no result of all ranks after {timeout:.0f} s; ended with {ended or 'nothing'}")
            time.sleep(0.05)
        return [json.loads(out.read_text()) for out in self.outs]

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def hand_in(out: Path, result: Any) -> None:
    """A worker's result, whole or not there."""
    temporary = out.with_suffix(".new")
    temporary.write_text(json.dumps(result))
    temporary.rename(out)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
