"""Processes that meet as the ranks of a process group, without a launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.cli import environment


def run_ranks(script: str, tmp_path: Path, *options: str, ranks: int = 2) -> None:
    """Run a script once for each rank, with the rank, a file to meet at, and the options. All must succeed."""
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(rank), str(tmp_path / "meet"), *options], env=environment())
        for rank in range(ranks)
    ]
    try:
        assert [one.wait(240) for one in started] == [0] * ranks
    finally:
        for one in started:
            one.kill()
            one.wait(60)
