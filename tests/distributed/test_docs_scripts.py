"""The scripts that begin the pages of each framework, copied as they stand: killed in the middle, started again, they
go on. The first start is that of a user, so a script imports what it uses; the second one is quicker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from store.catalog import open_catalog
from store.errors import NoStoreError
from store.storage.local import LocalFiles
from tests.support.launch import ENVIRONMENT, ROOT, python

TEXT = "".join((ROOT / "docs" / page).read_text() for page in ("start.md", "fsdp2.md", "huggingface.md"))
SCRIPTS = {found[1]: found[0] for found in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", TEXT, re.S)}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def _started(script: str, folder: Path, *launcher: str) -> subprocess.Popen[str]:
    (folder / script).write_text(SCRIPTS[script])
    return subprocess.Popen(
        [sys.executable, *launcher, script],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _committed(folder: Path) -> int | None:
    """The step of the newest commit."""
    try:
        saves = open_catalog(LocalFiles(folder / "driftpoint-checkpoints")).saves()
    except NoStoreError:
        return None
    return saves[0].step if saves else None


def _killed_once_committed(process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 240
    while _committed(folder) is None:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    found = subprocess.run(["ps", "-o", "pid=", "-g", str(process.pid)], capture_output=True, text=True, check=True)
    # torchrun's workers are in sessions of their own.
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    for pid in {int(word) for word in (found.stdout + children.stdout).split()}:
        with suppress(ProcessLookupError):  # torchrun may have ended it meanwhile
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=180)


def test_the_page_has_the_scripts_that_are_run_here() -> None:
    others = {"accelerated.py"}  # test_docs_accelerate.py
    assert SCRIPTS.keys() == {"plain.py", "ddp.py", "zero.py", "sharded.py", "trainer.py"} | others


@pytest.mark.parametrize("script", ["plain.py", "ddp.py", "zero.py", "sharded.py", "trainer.py"])
def test_a_script_goes_on(tmp_path: Path, script: str) -> None:
    launcher = [] if script in ("plain.py", "trainer.py") else TORCHRUN
    _killed_once_committed(_started(script, tmp_path, *launcher), tmp_path)
    killed_at = _committed(tmp_path)
    again = python([*launcher, script], tmp_path)
    output = again.stdout + again.stderr
    assert again.returncode == 0, output
    resumed = re.findall(r"^driftpoint: resumed step (\d+) from \./driftpoint-checkpoints \(exact: .*\)$", output, re.M)
    assert resumed == [str(killed_at)], output
    model = {"sharded.py": "4 layers (16.6 k", "trainer.py": "7 layers (205 k"}.get(script, "2 layers (66.1 k")
    saved = rf"{re.escape(model)} parameters, exact\), random generators and \d+ objects? in state="
    banner = rf"^driftpoint: saving all of {saved} to \./driftpoint-checkpoints[ ,]"
    assert len(re.findall(banner, output, re.M)) == 1, output
    last = int(re.search(r"(?:range\(ckpt\.resume\(\), |max_steps=)(\d+)", SCRIPTS[script])[1])  # type: ignore[index]
    assert _committed(tmp_path) == last
