"""The demo itself, in a small setting: it must do what it says, and say so when it did not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.commits import Watcher
from examples.journal import Reader
from examples.story import Story, tell
from store.catalog import open_catalog
from store.storage.local import LocalFiles

ROOT = Path(__file__).parents[2]
SMALL = ("--hidden", "128", "--blocks", "2", "--batch", "1")

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def demo(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.demo", "--out", str(out), *SMALL, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=out.parent, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def story_of(out: Path, name: str) -> Story:
    return tell(Reader(out / f"{name}.jsonl").new(), Watcher(out / "store").new())


def test_the_demo_loses_a_rank_resumes_a_composite_and_finishes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = demo(out, "--steps", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    story, control = story_of(out, "interrupted"), story_of(out, "undisturbed")

    assert len(story.lives) == 2
    assert story.lives[0].last >= 38, "the kill comes after step 38"
    assert 0 < story.lives[1].first <= story.lives[0].last
    assert story.finished_at == control.finished_at == 60
    assert sorted(story.losses) == list(range(1, 61))

    before_the_kill = story.lives[0].losses
    assert before_the_kill == {step: control.losses[step] for step in before_the_kill}
    assert story.is_composite
    assert story.certificate is not None
    assert story.certificate["max_staleness"] <= 60
    assert story.lives[1].first in story.resumed_steps
    assert story.lives[1].first <= story.certificate["step"]
    assert "NOT SHOWN" not in done.stdout
    assert "step    1   loss" in done.stdout, "the first loss is shown at once"
    assert "killed rank 1" in done.stdout
    assert f"resumed step {story.lives[1].first}" in done.stdout

    assert (out / "drift.png").stat().st_size > 50_000
    catalog = open_catalog(LocalFiles(out / "store"))
    newest = catalog.saves()[0]
    assert (newest.epoch, newest.step > story.lives[1].first) == (2, True), "saving went on after the resume"
    assert [save.step for save in catalog.proven()] == [story.certificate["step"]]
    assert not (out / "never-made").exists(), "the run to compare with saves nothing"
    assert not (out / "deepspeed").exists(), "DeepSpeed's own saves are timed and removed"


def test_the_demo_fails_when_nothing_was_killed(tmp_path: Path) -> None:
    done = demo(tmp_path / "out", "--steps", "6", "--kill-after", "100", "--no-control")
    assert done.returncode == 1
    assert "no rank was killed" in " ".join(done.stdout.split())


def test_a_directory_that_the_demo_did_not_make_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    done = demo(tmp_path / "out")
    assert done.returncode == 1
    assert "was not made by the demo" in done.stderr
    assert (tmp_path / "out" / "thesis.tex").read_text() == "precious"
