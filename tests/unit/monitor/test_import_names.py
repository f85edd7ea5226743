"""``import driftpoint`` is another name for ``import monitor``; a user's module in the way of ours is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import monitor
from tests.support.launch import ENVIRONMENT

JOB = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
with {name}.attach((model, optimizer), {{"every": 1, "metrics": {{"enabled": False}}}}) as ckpt:
    for step in range(ckpt.resume(), 2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ckpt.step()
print("trained to", ckpt.certificate, step)
"""


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``python train.py`` as a user does: its folder comes before ours in ``sys.path``."""
    (folder / "train.py").write_text(code)
    words = [sys.executable, str(folder / "train.py")]
    return subprocess.run(words, cwd=folder, env={**ENVIRONMENT}, capture_output=True, text=True, check=False)


def test_a_job_by_the_other_name(tmp_path: Path) -> None:
    code = """
import sys
import driftpoint
assert "torch" not in sys.modules
import monitor
assert driftpoint.attach is monitor.attach and driftpoint.StepReport is monitor.StepReport
assert driftpoint.__all__ is monitor.__all__ and set(monitor.__all__) <= set(dir(driftpoint))
from driftpoint import attach
try:
    driftpoint.atach
except AttributeError as error:
    assert "atach" in str(error)
else:
    raise SystemExit(1)
"""
    done = run(tmp_path, code + JOB.format(name="driftpoint"))
    assert (done.returncode, done.stdout) == (0, "trained to None 1\n"), done.stderr


@pytest.mark.parametrize("kind", ["monitor.py", "store.py", "deploy/__init__.py", "policies/__init__.py"])
def test_a_module_beside_the_script_is_named_and_not_in_the_way(tmp_path: Path, kind: str) -> None:
    (tmp_path / kind).parent.mkdir(exist_ok=True)
    (tmp_path / kind).write_text("raise SystemExit('the wrong one')")
    done = run(tmp_path, "import driftpoint, monitor, store.errors, deploy, policies\nprint(monitor.__all__)")
    assert (done.returncode, done.stdout) == (0, f"{monitor.__all__}\n"), done.stderr
    assert f"{tmp_path / kind} has the name of a package of Driftpoint" in done.stderr


def test_a_module_that_was_imported_before_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "monitor.py").write_text("")
    done = run(tmp_path, "import monitor\nimport driftpoint")
    assert done.returncode == 1
    assert f"ImportError: {tmp_path / 'monitor.py'} was imported as `monitor`" in done.stderr


def test_import_monitor_names_a_store_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "store.py").write_text("errors = 1")
    done = run(tmp_path, "import monitor\nmonitor.attach")
    assert done.returncode == 1
    assert f"ImportError: {tmp_path / 'store.py'} was imported as `store`" in done.stderr.splitlines()[-1]


def test_a_folder_that_is_no_package_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "job.yaml").write_text("")
    done = run(tmp_path, "import driftpoint, monitor, deploy.exit_codes\nprint('found')")
    assert (done.stdout, done.stderr) == ("found\n", "")
