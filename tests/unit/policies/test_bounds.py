from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from policies.base import Budget, Choice, Decision, History, Policy, UnitStats
from policies.bounds import Bounded, Bounds, bound, incomplete
from policies.builtin import Full, Threshold
from policies.validation import PolicyError
from store.errors import ConfigError, UsageError
from store.names import Unit

NOW = History(step=120, commits=4)
LAYER = UnitStats(Unit("model.layers.3", "fp32"), 3, True, 10, 0.001, 10)
OTHER = UnitStats(Unit("model.layers.4", "fp32"), 4, True, 10, 0.001, 10)
NEVER = Threshold(1e6)
"""Saves nothing by itself: what is saved, the bounds demand."""


@dataclass(frozen=True)
class Fixed:
    """Gives the answer it is told to give; skips what it is told nothing about."""

    answers: Mapping[Unit, Choice]
    name: str = "fixed"
    needs_drift: bool = False

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        return Decision({one.unit: Choice(None, "inner skips") for one in stats} | dict(self.answers))


def choices(policy: Policy, *stats: UnitStats) -> list[Choice]:
    return list(policy.select(stats, Budget(), NOW).choices.values())


def bounded(policy: Policy = NEVER, **bounds: object) -> Bounded:
    return Bounded(policy, Bounds(**bounds))  # type: ignore[arg-type]


class TestGate:
    def test_a_broken_slot_holds_back_its_whole_layer_and_no_other(self) -> None:
        moment = replace(LAYER, unit=Unit("model.layers.3", "exp_avg"), finite=False, drift=math.nan)
        held = Choice(None, "health gate: exp_avg of model.layers.3 has NaN or Inf; the version of step 110 stays")
        assert choices(bounded(Full()), LAYER, moment, OTHER) == [
            held,
            held,
            Choice("raw", "everything is saved every time"),
        ]

    def test_all_broken_slots_are_named_in_order(self) -> None:
        first = replace(LAYER, unit=Unit("model.layers.3", "fp32"), finite=False)
        second = replace(LAYER, unit=Unit("model.layers.3", "exp_avg"), finite=False, staleness=None)
        reasons = [choice.reason for choice in choices(bounded(Full()), first, second)]
        assert reasons == [
            "health gate: exp_avg, fp32 of model.layers.3 have NaN or Inf; the version of step 110 stays",
            "health gate: exp_avg, fp32 of model.layers.3 have NaN or Inf; there is no version yet",
        ]

    @pytest.mark.parametrize(
        "state",
        [
            {"staleness": None, "drift": None},
            {"staleness": 10_000},
            {"drift": math.inf},
            {"changed_shape": True},
            {"moving": False, "drift": 0.5},
        ],
    )
    def test_it_wins_over_every_other_row(self, state: dict[str, object]) -> None:
        sick = replace(LAYER, finite=False, **state)  # type: ignore[arg-type]
        (choice,) = choices(bounded(Full(), max_staleness=50, max_drift=0.01, interval=10), sick)
        assert not choice.saved
        assert choice.reason.startswith("health gate: fp32 of model.layers.3 has NaN or Inf; ")

    def test_a_broken_layer_does_not_end_the_first_save_of_the_others(self) -> None:
        new = replace(LAYER, staleness=None, drift=None)
        sick = replace(OTHER, staleness=None, drift=None, finite=False)
        assert choices(bounded(), new, sick)[0] == Choice("raw", "first save is full")


class TestVersions:
    def test_the_first_save_is_full_with_what_does_not_move(self) -> None:
        new = replace(LAYER, staleness=None, drift=None)
        still = replace(OTHER, staleness=None, drift=None, moving=False)
        assert choices(bounded(), new, still) == [Choice("raw", "first save is full")] * 2

    def test_a_new_unit_is_saved_beside_the_inner_choice(self) -> None:
        new = replace(LAYER, staleness=None, drift=None)
        assert choices(bounded(Fixed({})), new, OTHER) == [Choice("raw", "no version yet"), Choice(None, "inner skips")]

    @pytest.mark.parametrize("moving", [True, False])
    def test_a_unit_with_other_parameters_is_saved(self, moving: bool) -> None:
        changed = replace(LAYER, changed_shape=True, moving=moving, drift=None)
        assert choices(bounded(), changed) == [Choice("raw", "its set of parameters changed")]


class TestStandingStill:
    @pytest.mark.parametrize("drift", [0.0, None])
    def test_skipped_even_by_full_and_however_old(self, drift: float | None) -> None:
        still = replace(LAYER, moving=False, drift=drift, staleness=120)
        policy = bounded(Full(), max_staleness=20, max_drift=0.1, interval=10)
        assert choices(policy, still) == [Choice(None, "does not move; the version of step 0 holds")]

    @pytest.mark.parametrize(("drift", "shown"), [(0.25, "0.25"), (math.nan, "nan"), (1e-9, "1e-09")])
    def test_saved_when_someone_changed_it(self, drift: float, shown: str) -> None:
        still = replace(LAYER, moving=False, drift=drift)
        reason = f"does not move, yet its drift is {shown}: it was changed"
        assert choices(bounded(), still) == [Choice("raw", reason)]

    def test_a_moving_unit_without_drift_is_left_to_the_policy(self) -> None:
        assert choices(bounded(Full()), replace(LAYER, drift=0.0))[0].saved


class TestMaxDrift:
    @pytest.mark.parametrize(
        ("drift", "reason"),
        [
            (0.031, "drift 0.031 > max_drift 0.02"),
            (0.0200001, "drift 0.0200001 > max_drift 0.02"),
            (math.inf, "drift inf > max_drift 0.02"),
            (None, "drift is not known; max_drift 0.02 could not be kept"),
            (math.nan, "drift is not known; max_drift 0.02 could not be kept"),
        ],
    )
    def test_saved_beyond_it(self, drift: float | None, reason: str) -> None:
        assert choices(bounded(Fixed({}), max_drift=0.02), replace(LAYER, drift=drift)) == [Choice("raw", reason)]

    def test_left_to_the_policy_up_to_it(self) -> None:
        at_limit = replace(LAYER, drift=0.02)
        assert choices(bounded(Fixed({}), max_drift=0.02), at_limit) == [Choice(None, "inner skips")]

    def test_zero_saves_all_that_moved(self) -> None:
        moved, still = choices(bounded(max_drift=0.0), LAYER, replace(OTHER, drift=0.0))
        assert moved.saved and not still.saved

    def test_it_makes_any_policy_need_drift(self) -> None:
        assert not bounded(Full()).needs_drift
        assert bounded(Full(), max_drift=0.1).needs_drift
        assert bounded(Threshold(0.1)).needs_drift

    def test_raw_even_where_the_policy_would_lose_bits(self) -> None:
        lossy = Fixed({LAYER.unit: Choice("bf16", "small enough")})
        far = replace(LAYER, drift=0.5)
        reason = "drift 0.5 > max_drift 0.02"
        assert choices(bounded(lossy, max_drift=0.02, precision="any"), far) == [Choice("raw", reason)]


class TestMaxStaleness:
    @pytest.mark.parametrize(("staleness", "saved"), [(0, False), (40, False), (41, True), (50, True), (60, True)])
    def test_saved_when_it_would_be_too_old_by_the_next_decision(self, staleness: int, saved: bool) -> None:
        policy = bounded(max_staleness=50, interval=10)
        assert choices(policy, replace(LAYER, staleness=staleness))[0].saved is saved

    def test_the_reason_shows_the_sum(self) -> None:
        (choice,) = choices(bounded(max_staleness=45, interval=10), replace(LAYER, staleness=40))
        assert choice == Choice("raw", "staleness 40 + interval 10 > max_staleness 45")

    def test_at_the_interval_itself_everything_is_saved_every_time(self) -> None:
        assert choices(bounded(max_staleness=10, interval=10), replace(LAYER, staleness=1))[0].saved

    def test_the_policys_own_encoding_stands(self) -> None:
        lossy = Fixed({LAYER.unit: Choice("bf16", "small enough")})
        (choice,) = choices(
            bounded(lossy, max_staleness=45, interval=10, precision="any"), replace(LAYER, staleness=40)
        )
        assert choice == Choice("bf16", "staleness 40 + interval 10 > max_staleness 45")


class TestAnswer:
    def test_a_forgotten_unit_is_named(self) -> None:
        class Forgetful(Fixed):
            def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
                return super().select(stats[1:], budget, history)

        with pytest.raises(PolicyError, match=r"policy fixed: model.layers.3/fp32: shown but not decided on"):
            choices(bounded(Forgetful({})), LAYER, OTHER)

    def test_an_unknown_unit_is_named(self) -> None:
        stranger = Unit("model.layers.99", "fp32")
        with pytest.raises(PolicyError, match=r"policy fixed: model.layers.99/fp32: decided on but never shown"):
            choices(bounded(Fixed({stranger: Choice(None, "because")})), LAYER)

    def test_an_encoding_that_loses_bits_needs_precision_any(self) -> None:
        lossy = Fixed({LAYER.unit: Choice("bf16", "small enough")})
        with pytest.raises(PolicyError, match=r"'bf16' may lose bits and precision is 'exact'; use raw, or") as error:
            choices(bounded(lossy), LAYER)
        assert (error.value.policy, error.value.unit) == ("fixed", LAYER.unit)
        assert isinstance(error.value, UsageError)
        assert choices(bounded(lossy, precision="any"), LAYER) == [Choice("bf16", "small enough")]

    @pytest.mark.parametrize("precision", ["exact", "any"])
    def test_an_encoding_needs_a_name(self, precision: str) -> None:
        nameless = Fixed({LAYER.unit: Choice("", "small enough")})
        with pytest.raises(PolicyError, match="encoding ''"):
            choices(bounded(nameless, precision=precision), LAYER)

    def test_a_choice_needs_a_reason(self) -> None:
        with pytest.raises(PolicyError, match="its choice has no reason"):
            choices(bounded(Fixed({LAYER.unit: Choice("raw", "")})), LAYER)

    def test_it_is_checked_where_the_bounds_decide_too(self) -> None:
        new = replace(LAYER, staleness=None, drift=None)
        with pytest.raises(PolicyError):
            choices(bounded(Fixed({LAYER.unit: Choice("bf16", "small enough")})), new)

    def test_a_unit_shown_twice_is_refused(self) -> None:
        with pytest.raises(PolicyError, match=r"model.layers.3/fp32: shown twice in one decision"):
            choices(bounded(), LAYER, LAYER)


class TestIncomplete:
    def test_units_that_would_have_no_version_at_all(self) -> None:
        held = replace(LAYER, staleness=None, drift=None, finite=False)
        moment = replace(held, unit=Unit("model.layers.3", "exp_avg"), finite=True)
        decision = bounded(Full()).select([held, OTHER, moment], Budget(), NOW)
        assert incomplete([held, OTHER, moment], decision) == (held.unit, moment.unit)

    def test_a_version_with_other_parameters_covers_nothing(self) -> None:
        held = replace(LAYER, changed_shape=True, finite=False)
        assert incomplete([held], bounded(Full()).select([held], Budget(), NOW)) == (held.unit,)

    def test_an_older_version_completes_the_commit(self) -> None:
        held = replace(LAYER, finite=False)
        assert incomplete([held, OTHER], bounded(Full()).select([held, OTHER], Budget(), NOW)) == ()


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"max_staleness": 0, "interval": 1}, r"max_staleness must be an integer >= 1, not 0"),
            ({"max_staleness": True, "interval": 1}, r"max_staleness must be an integer >= 1, not True"),
            ({"max_staleness": 9.5, "interval": 1}, r"max_staleness must be an integer >= 1, not 9.5"),
            ({"max_staleness": 50}, r"max_staleness needs interval, the most steps between two decisions"),
            (
                {"max_staleness": 9, "interval": 10},
                r"max_staleness 9 cannot hold with interval 10: .* set max_staleness >= 10, or decide more often",
            ),
            ({"interval": 0}, r"interval must be an integer >= 1, not 0"),
            ({"max_drift": -0.1}, r"max_drift must be a finite number >= 0, not -0.1"),
            ({"max_drift": math.nan}, r"max_drift must be a finite number >= 0, not nan"),
            ({"max_drift": "1e-2"}, r"max_drift must be .* not the text '1e-2' \(YAML takes 1e-3 for text"),
            ({"precision": "bf16"}, r"precision must be 'exact' or 'any', not 'bf16'"),
        ],
    )
    def test_senseless_ones_are_refused(self, settings: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match="bounds: " + message):
            Bounds(**settings)  # type: ignore[arg-type]

    def test_the_least_staleness_is_the_interval(self) -> None:
        assert Bounds(max_staleness=10, interval=10).max_staleness == 10

    def test_no_bounds_leave_the_policy_alone(self) -> None:
        policy = bound(Fixed({OTHER.unit: Choice("raw", "inner saves")}), Bounds())
        assert choices(policy, replace(LAYER, staleness=10**6, drift=1e9), OTHER) == [
            Choice(None, "inner skips"),
            Choice("raw", "inner saves"),
        ]

    def test_the_name_is_the_inner_policys(self) -> None:
        assert bounded(Full()).name == "full"

    def test_a_model_without_units_is_an_empty_decision(self) -> None:
        assert choices(bounded(Full())) == []


class TestAnIntervalThatVaries:
    POLICY = Bounded(NEVER, Bounds(max_staleness=100, interval=100))

    @pytest.mark.parametrize(("staleness", "interval", "saved"), [(60, 40, False), (60, 41, True), (0, 100, False)])
    def test_what_counts_is_the_next_decision(self, staleness: int, interval: int, saved: bool) -> None:
        stats = [replace(LAYER, staleness=staleness)]
        choice = self.POLICY.select(stats, Budget(), History(120, 4, interval)).choices[LAYER.unit]
        assert choice.saved is saved
        if saved:
            assert choice.reason == f"staleness {staleness} + interval {interval} > max_staleness 100"

    def test_where_nobody_says_when_it_is_the_most_counts(self) -> None:
        assert choices(self.POLICY, replace(LAYER, staleness=1))[0].saved
