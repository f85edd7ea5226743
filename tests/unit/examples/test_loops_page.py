"""The loop of docs/loops.md fetches batches ahead: killed and resumed, its losses are bitwise those of a run that was
not disturbed, and without LoopState they are not. Finished and started again, it ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launch import ROOT, python

_KILL = """    import os, signal, time
    if step == {}:
        ckpt.flush()
        time.sleep(1)  # until the trace is written
        os.kill(os.getpid(), signal.SIGKILL)
"""
_END = "ckpt.close()\n"  # after the loop's last line


def page_script() -> str:
    (found,) = re.findall(r"```python\n# loop\.py\n(.*?)```", (ROOT / "docs" / "loops.md").read_text(), re.S)
    found = found.replace("    ckpt.step()\n", "    ckpt.step()\n    ckpt.flush()\n")  # so that no save is skipped
    return str(found).replace('{"every": 10}', '{"every": 10, "metrics": {"enabled": False}}')


NOTICE = "it does not go on as that run did"


def losses(text: str, folder: Path, code: int, noticed: bool = False) -> dict[int, str]:
    """Run a script and return what it printed for each step."""
    folder.mkdir(exist_ok=True)
    (folder / "loop.py").write_text(text)
    done = python(["loop.py"], folder)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(NOTICE) == noticed
    return {int(step): rest for step, rest in re.findall(r"^step (\d+): (.*)$", done.stdout, re.M)}


def killed_and_resumed(text: str, folder: Path, noticed: bool) -> dict[int, str]:
    before = losses(text.replace(_END, _KILL.format(33) + _END), folder, -9)
    after = losses(text, folder, 0, noticed)
    assert max(before) == 33 and min(after) == 31
    return before | after


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path) -> None:
    text = page_script()
    assert text.count(_END) == 1
    undisturbed = losses(text, tmp_path / "undisturbed", 0)
    assert len(undisturbed) == 60
    assert losses(text, tmp_path / "undisturbed", 0) == {}  # finished, and started again: nothing is left to train
    assert killed_and_resumed(text, tmp_path / "with", noticed=False) == undisturbed
    (fetch,) = re.findall(
        r"^loop = .*\n", text, re.M
    )  # as nanoGPT has it: nothing handed over, fetched before the loop
    without = text.replace(fetch, "").replace("while step < 60:", f"{fetch}while step < 60:")
    without = without.replace('state={"loop": loop}', "state={}")
    assert losses(without, tmp_path / "seeded", 0) == undisturbed
    found = killed_and_resumed(without, tmp_path / "without", noticed=True)
    assert [step for step, text in undisturbed.items() if found[step] != text] == list(range(31, 61))
