"""Processes that meet as the ranks of a process group, without a launcher."""

from __future__ import annotations

from pathlib import Path

from tests.support.launch import WORKERS, python


def run_ranks(script: str, tmp_path: Path, *options: str, ranks: int = 2) -> str:
    """Run a script once for each rank, with the rank, a file to meet at, and the options. All must succeed.

    Returns what they printed."""
    path = tmp_path / "script.py"
    path.write_text(script)
    done = python([WORKERS / "ranks.py", ranks, path, tmp_path / "meet", *options], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
