"""Every notebook has a test that runs it from top to bottom; none keeps output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.notebooks import NOTEBOOKS, cells


def test_every_notebook_has_a_test() -> None:
    tested = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == tested - {"notebooks"}


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_output_is_kept(path: Path) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(path))
