"""Ending what a command left behind: also what forks while it is being ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.cli import ROOT

STORMS = 4


def test_what_forks_while_it_is_ended_leaves_nothing(tmp_path: Path) -> None:
    """Each shell shrugs off SIGTERM and starts a sleeper every few milliseconds: between being seen and being killed
    it starts one more."""
    script = f"""
import subprocess
from deploy.supervisor.processes import adopt_orphans, descendants, end_descendants
assert adopt_orphans()
storm = "trap '' TERM; echo; while :; do sleep 300 & sleep 0.005; done"
for shell in [subprocess.Popen(["sh", "-c", storm], stdout=subprocess.PIPE) for _ in range({STORMS})]:
    assert shell.stdout.readline() == b"\\n"
found, left = end_descendants(term_seconds=0.1, kill_seconds=60)
assert found >= {STORMS} and left == 0, (found, left)
assert descendants() == []
"""
    said = tmp_path / "said"
    with said.open("wb") as file:
        ended = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=file, start_new_session=True)
    try:
        code = ended.wait(300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ended.pid, signal.SIGKILL)
    assert code == 0, said.read_text()
