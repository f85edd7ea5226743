"""The notebooks run from top to bottom, and say what they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.notebooks import NOTEBOOKS, cells, executed


def test_every_notebook_has_a_test() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {"reading_a_store", "choosing_a_policy"}


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_output_is_kept(path: Path) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(path))


def test_reading_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = executed("reading_a_store")
    assert names["certificate"].exact is False
    assert names["certificate"].max_staleness == 5
    assert len(names["tensors"]) == len(names["part"]["entries"]) + len(names["part"]["run_tensors"])
