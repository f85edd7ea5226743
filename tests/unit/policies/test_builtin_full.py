from __future__ import annotations

from policies.base import Budget, Choice, History, UnitStats
from policies.builtin import Full
from store.names import Unit


def test_saves_every_unit_whatever_its_state() -> None:
    still = UnitStats(Unit("head", "frozen"), 2, False, 10, 0.0, 7, moving=False)
    broken = UnitStats(Unit("block", "fp32"), 1, True, 10, None, None, finite=False)
    decision = Full().select([still, broken], Budget(bytes=0.0), History(step=10, commits=3))
    assert decision.saved == (still.unit, broken.unit)
    assert decision.choices[still.unit] == Choice("raw", "everything is saved every time")


def test_needs_no_drift() -> None:
    assert not Full().needs_drift
    assert Full().name == "full"
