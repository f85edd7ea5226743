"""The example for the Hugging Face Trainer runs, and goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import hf_trainer


@pytest.mark.slow
def test_it_runs_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in ("10", "20"):
        monkeypatch.setattr("sys.argv", ["hf_trainer", "--steps", steps, "--store", str(tmp_path / "store")])
        hf_trainer.main()
    assert {path.name for path in (tmp_path / "store" / "manifests").iterdir()} == {
        "00000010-000001.json",
        "00000020-000002.json",
    }
