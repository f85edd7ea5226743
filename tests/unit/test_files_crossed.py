"""A save, a resume and a merge stay short ways through the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_no_way_through_the_code_crosses_more_files_than_its_goal(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "files_crossed.py"), "--list"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
