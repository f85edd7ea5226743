"""Slurm, as far as a batch script sees it: ``srun`` and ``scontrol`` as commands on PATH, nodes that are this machine.

What is made up is Slurm alone: whatever srun is given really runs, once for each node.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.cli import environment

_SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
while words and words[0].startswith("--"):
    words.pop(0)
nodes = [
    subprocess.Popen(words, env={{**os.environ, "SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}})
    for node in range(int(os.environ["SLURM_NNODES"]))
]
codes = [one.wait() for one in nodes]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""

_SCONTROL = """#!{python}
import pathlib, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost\\nlocalhost")
elif sys.argv[1] == "requeue":
    pathlib.Path({requeued!r}).open("a").write(sys.argv[2] + "\\n")
else:
    sys.exit("unknown: " + " ".join(sys.argv))
"""

_MODULE = """#!/bin/sh
exec {python} -m {module} "$@"
"""


@dataclass(frozen=True)
class Batch:
    """A batch script that runs, or has run."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text()


class Slurm:
    """A cluster of two nodes in ``folder``, which is the directory of submission, too."""

    def __init__(self, folder: Path, job: int) -> None:
        self.folder = folder
        self.job = job
        self._requeued = folder / "requeued.txt"
        bin_ = folder / "slurm-bin"
        bin_.mkdir()
        for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
            (bin_ / name).write_text(text.format(python=sys.executable, requeued=str(self._requeued)))
        for name, module in (("driftpoint", "deploy.cli"), ("torchrun", "torch.distributed.run")):
            (bin_ / name).write_text(_MODULE.format(python=sys.executable, module=module))
        for file in bin_.iterdir():
            file.chmod(0o755)
        self._path = os.pathsep.join([str(bin_), os.environ["PATH"]])

    @property
    def requeued(self) -> list[str]:
        """The jobs that were, in order."""
        return self._requeued.read_text().split() if self._requeued.exists() else []

    @contextmanager
    def sbatch(self, script: Path, *words: object) -> Iterator[Batch]:
        """Runs the script as Slurm does, as often requeued as it was; ends what is left of it."""
        output = self.folder / f"slurm-{self.job}.out"
        known = {**environment(), "PATH": self._path, "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": str(self.job)}
        known |= {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
        if self.requeued:
            known["SLURM_RESTART_COUNT"] = str(len(self.requeued))
        with output.open("ab") as file:
            process = subprocess.Popen(
                ["bash", str(script), *map(str, words)],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=known,
            )
        try:
            yield Batch(process, output)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
