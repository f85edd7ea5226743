"""Encodings by slot, around bounds and policies."""

from __future__ import annotations

import pytest

from policies.base import Budget, History, UnitStats
from policies.bounds import Bounds, bound
from policies.builtin import Full, Observe, Threshold
from policies.registry import with_fixed_encoding
from store.errors import ConfigError
from store.names import FROZEN, Unit

ENCODINGS = {"fp32": "bf16", "exp_avg": "int8-block"}
ANY = Bounds(precision="any")


def stats(slot: str, moving: bool = True, drift: float | None = 0.5, staleness: int | None = 10) -> UnitStats:
    return UnitStats(Unit("block", slot), 0, True, 100, drift, staleness, moving=moving)


def chosen(policy: object, *shown: UnitStats) -> list[str | None]:
    decision = policy.select(shown, Budget(), History(10, 1))  # type: ignore[attr-defined]
    return [decision.choices[one.unit].encoding for one in shown]


def test_raw_becomes_the_encoding_of_the_slot() -> None:
    policy = with_fixed_encoding(bound(Full(), ANY), ENCODINGS, ANY)
    assert chosen(policy, stats("fp32"), stats("exp_avg"), stats("other")) == ["bf16", "int8-block", "raw"]


def test_the_first_save_and_what_bounds_demand_are_encoded_too() -> None:
    bounds = Bounds(max_drift=0.1, precision="any")
    policy = with_fixed_encoding(bound(Threshold(1e9), bounds), ENCODINGS, bounds)
    assert chosen(policy, stats("fp32", drift=None, staleness=None)) == ["bf16"]
    assert chosen(policy, stats("fp32", drift=0.2), stats("exp_avg", drift=0.05)) == ["bf16", None]


def test_what_does_not_move_stays_raw() -> None:
    shown = stats(FROZEN, moving=False, drift=None, staleness=None)
    assert chosen(with_fixed_encoding(bound(Full(), ANY), {FROZEN: "bf16"}, ANY), shown) == ["raw"]


def test_observe_stays_outermost() -> None:
    policy = with_fixed_encoding(bound(Observe(Full()), ANY), ENCODINGS, ANY)
    assert isinstance(policy, Observe)
    assert chosen(policy, stats("fp32")) == [None]


@pytest.mark.parametrize(("slot", "name", "limit"), [("fp32", "bf16", 0.003), ("exp_avg_sq", "int8-log2", 0.1)])
def test_a_bound_that_an_encoding_breaks_by_itself_is_refused(slot: str, name: str, limit: float) -> None:
    with pytest.raises(ConfigError, match=f"max_drift {limit} cannot hold: {slot} stored as {name}"):
        with_fixed_encoding(Full(), {slot: name}, Bounds(max_drift=limit, precision="any"))
    with_fixed_encoding(Full(), {slot: name}, Bounds(max_drift=2 * limit, precision="any"))


def test_exact_forbids_what_loses_bits() -> None:
    with pytest.raises(ConfigError, match="bf16, int8-block loses bits"):
        with_fixed_encoding(Full(), ENCODINGS, Bounds(precision="exact"))
    assert with_fixed_encoding(Full(), {"fp32": "raw"}, Bounds(precision="exact")) is not None
