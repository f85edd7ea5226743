"""The script for Accelerate in docs/huggingface.md, copied as it stands: killed in the middle, started again, it says
the losses that it says when nobody kills it. (The others are in ``test_docs_scripts.py``.)
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from store.catalog import open_catalog
from store.errors import NoStoreError
from store.storage.local import LocalFiles
from tests.support.launch import ENVIRONMENT, ROOT

TEXT = (ROOT / "docs" / "huggingface.md").read_text()
SCRIPT = re.findall(r"```python\n(# accelerated\.py\n.*?)```", TEXT, re.S)[0]

pytestmark = pytest.mark.slow


def test_the_script_goes_on(tmp_path: Path) -> None:
    alone, killed = started(tmp_path / "alone"), started(tmp_path / "killed")
    deadline = time.monotonic() + 240
    while committed(tmp_path / "killed") is None:
        assert killed.poll() is None and time.monotonic() < deadline, killed.communicate()[0]
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    resumed = started(tmp_path / "killed")
    (whole, _), (rest, _) = alone.communicate(timeout=240), resumed.communicate(timeout=240)
    assert (alone.returncode, resumed.returncode) == (0, 0), whole + rest
    assert re.search(r"^driftpoint: resumed step \d+ from \./driftpoint-checkpoints \(exact: .*\)$", rest, re.M), rest
    wanted, found = (losses(text) for text in (whole, rest))
    assert wanted and found == wanted[len(wanted) - len(found) :]


def losses(text: str) -> list[str]:
    """The lines that say one."""
    return [line for line in text.splitlines() if line.startswith("epoch")]


def started(folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "accelerated.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, "accelerated.py"],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def committed(folder: Path) -> int | None:
    """The step of the newest commit."""
    try:
        saves = open_catalog(LocalFiles(folder / "driftpoint-checkpoints")).saves()
    except NoStoreError:
        return None
    return saves[0].step if saves else None
