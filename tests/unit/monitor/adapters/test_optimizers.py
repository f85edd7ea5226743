"""Each optimizer of the table in docs/optimizers.md: killed and resumed bit for bit, or refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.optimizer_runs import outcomes
from tests.support.optimizers import CASES, Case
from tests.support.optimizers_page import PAGE, row

pytestmark = [pytest.mark.slow, pytest.mark.core]


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], dict[str, Any]]:
    return outcomes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.source} {case.name}")
def test_carried_bit_for_bit_or_refused(found: tuple[dict[str, Any], dict[str, Any]], case: Case) -> None:
    if not case.installed:
        pytest.skip(f"{case.source} is not installed")
    saved, resumed = found[0][case.key], found[1].get(case.key)
    if case.refused is not None:
        assert saved["refused"] is not None and re.search(case.refused, saved["refused"]), saved
    else:
        assert saved["refused"] is None, saved["refused"]
        assert resumed is not None and resumed["exact"]
        assert resumed["saved"] == saved["saved"]
        assert resumed["losses"] == saved["losses"]
        assert resumed["end"] == saved["end"]
    assert row(case, saved) in PAGE.read_text().splitlines()
