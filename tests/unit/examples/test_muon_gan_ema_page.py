"""The scripts of docs/muon-gan-ema.md, copied as they stand: killed and resumed, they print what an undisturbed run
prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launch import ROOT, python

PAGE = (ROOT / "docs" / "muon-gan-ema.md").read_text()
SCRIPTS = {found[1]: found[0] for found in re.findall(r"```python\n(# (\w+)\.py\n.*?)```", PAGE, re.S)}
EXACT = re.compile(r"^driftpoint: resumed step 30 from \./driftpoint-checkpoints \(exact: .*\)$", re.M)
_KILL = """        if step + 1 == 33:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
"""


def printed(text: str, folder: Path, code: int) -> tuple[dict[int, str], str]:
    """What a script printed at each step, and its log."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(text)
    done = python(["script.py"], folder)
    assert done.returncode == code, done.stderr
    return {int(step): rest for step, rest in re.findall(r"^step (\d+): (.*)$", done.stdout, re.M)}, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "gan", "ema"])
def test_killed_and_resumed(tmp_path: Path, name: str) -> None:
    text = SCRIPTS[name]
    assert text.count("        ckpt.step() ") == text.count('{"every": 10}') == 1
    text = text.replace("        ckpt.step() ", "        ckpt.step(); ckpt.flush() ")  # so that no save is skipped
    text = text.replace('{"every": 10}', '{"every": 10, "metrics": {"enabled": False}}')
    undisturbed, _ = printed(text, tmp_path / "undisturbed", 0)
    before, _ = printed(text + _KILL, tmp_path / "killed", -9)
    after, log = printed(text, tmp_path / "killed", 0)
    assert EXACT.search(log)
    assert max(before) == 33 and min(after) == 31 and len(undisturbed) == 60
    assert before | after == undisturbed


def test_every_script_of_the_page_is_run() -> None:
    assert SCRIPTS.keys() == {"muon", "gan", "ema"}
    assert PAGE.count("```python") == len(SCRIPTS)
