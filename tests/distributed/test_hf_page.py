"""The scripts of docs/huggingface.md, copied as they stand: killed in the middle, started again, they say the losses
that they say when nobody kills them.
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
from store.files import LocalFiles
from tests.support.launch import ENVIRONMENT, ROOT

TEXT = (ROOT / "docs" / "huggingface.md").read_text()
SCRIPTS = {found[1]: found[0] for found in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", TEXT, re.S)}

pytestmark = pytest.mark.slow


def test_the_page_has_the_scripts_that_are_run_here() -> None:
    assert SCRIPTS.keys() == {"hf.py", "accelerated.py"}
    assert TEXT.count("```python") == 2


@pytest.mark.parametrize("script", ["hf.py", "accelerated.py"])
def test_a_script_goes_on(tmp_path: Path, script: str) -> None:
    alone, killed = started(script, tmp_path / "alone"), started(script, tmp_path / "killed")
    deadline = time.monotonic() + 240
    while committed(tmp_path / "killed") is None:
        assert killed.poll() is None and time.monotonic() < deadline, killed.communicate()[0]
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    resumed = started(script, tmp_path / "killed")
    (whole, _), (rest, _) = alone.communicate(timeout=240), resumed.communicate(timeout=240)
    assert (alone.returncode, resumed.returncode) == (0, 0), whole + rest
    assert re.search(r"^driftpoint: resumed step \d+ from \./driftpoint-checkpoints \(exact\)$", rest, re.M), rest
    wanted, found = (losses(text) for text in (whole, rest))
    assert wanted and found[1:] == wanted[len(wanted) - len(found) + 1 :]  # the first may be an average of fewer steps


def losses(text: str) -> list[str]:
    """The lines that say a loss and no speed."""
    return [line for line in text.splitlines() if "loss" in line and "runtime" not in line and "driftpoint" not in line]


def started(script: str, folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / script).write_text(SCRIPTS[script])
    return subprocess.Popen(
        [sys.executable, script],
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
