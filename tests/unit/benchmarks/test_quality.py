"""The quality benchmark from end to end on a run of seconds, and the arithmetic of its results."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest

import benchmarks.quality_settings as settings
from benchmarks.learner import Course, Learner, Shape, reference
from benchmarks.quality_calibration import calibration, moments
from benchmarks.quality_curves import curves, marks
from benchmarks.quality_results import (
    Results,
    correlation,
    less_often,
    newest,
    over_seeds,
    row_results,
    size_at,
    slope_through_zero,
)
from benchmarks.quality_rows import Row, rows
from benchmarks.quality_settings import DEFAULTS, MAKERS, Setting, Tiny, setting_named
from benchmarks.quality_summary import by_case, figures, lags, ruled
from benchmarks.quality_trunk import Base, base, place, placed, state_of, take

pytestmark = pytest.mark.slow

RUN = {"full @10", "full, compact @10", "full, compact, packed @10", "budget, compact @10 0.3", "parity 2 @5"}


@pytest.fixture(scope="module")
def tiny() -> Setting:
    return Tiny().setting()


@pytest.fixture(scope="module")
def begun(tiny: Setting) -> Base:
    return base(tiny, 0)


@pytest.fixture(scope="module")
def curved(tiny: Setting, begun: Base, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("curves")
    made = list(curves(tiny, 0, begun, folder, lambda row: row.name in RUN))
    return Results("tiny", as_read(made))


@pytest.fixture(scope="module")
def calibrated(tiny: Setting, begun: Base, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results("tiny", as_read(list(calibration(tiny, 0, begun, tmp_path_factory.mktemp("calibration"), True))))


def as_read(records: list[dict[str, object]]) -> list[dict[str, object]]:
    """As they come back from a file of lines."""
    return [json.loads(json.dumps(one)) for one in records]


def test_exact_resumes_are_the_uninterrupted_run_to_the_last_bit(curved: Results) -> None:
    (full,) = (one for one in curved.curves if one["row"] == "full @10")
    for state in full["states"]:
        trunk = curved.trunks[0]["losses"]
        assert all(trunk[step] == loss for step, loss in state["losses"].items() if step in trunk)
        assert str(max(map(int, trunk))) in state["losses"]


def test_a_state_put_together_from_one_save_is_the_uninterrupted_run(calibrated: Results) -> None:
    exact = [one for one in calibrated.cases if one["case"]["name"] == "exact"]
    assert len(exact) == len(moments(Tiny().setting(), 2))
    assert all(calibrated.gap(one, one["losses"]) == 0.0 for one in exact)


def test_stale_slots_change_what_follows(calibrated: Results) -> None:
    for name, (case, gap) in by_case(calibrated, None).items():
        assert (gap.value == 0.0) == (case["name"] == "exact"), name
    assert set(lags(calibrated)) == {"exp_avg", "exp_avg_sq"}


def test_rows_take_the_bytes_that_they_say(curved: Results) -> None:
    span = Tiny().setting().span
    by_name = {row.row: row for row in row_results(curved, (span.start, span.first, span.last))}
    assert by_name.keys() == RUN
    assert 1.2 < by_name["full @10"].rate < 1.3  # 12 bytes, and the run state, which weighs in so small a model
    assert by_name["full, compact @10"].rate < 0.5
    assert by_name["full, compact, packed @10"].rate < by_name["full, compact @10"].rate
    assert by_name["parity 2 @5"].rate == pytest.approx(by_name["full @10"].rate, rel=0.2)
    assert by_name["budget, compact @10 0.3"].rate <= 0.31
    assert by_name["full @10"].gap.value == 0.0
    assert by_name["full @10"].lost == pytest.approx(4.5, abs=0.5)
    assert by_name["parity 2 @5"].drift > 0.0


def test_a_step_is_worth_what_shorter_runs_lack(curved: Results) -> None:
    assert curved.trunks[0]["shorter"].keys() == {"10", "20"}
    assert curved.worth.value > 0.0  # so early in a run each step still brings much


def test_rules_go_back_within_the_composite(curved: Results, tiny: Setting, begun: Base, tmp_path: Path) -> None:
    name = "parity 2 @20"
    made = list(curves(tiny, 0, begun, tmp_path, lambda row: row.name == name))
    results = Results("tiny", as_read(made))
    (row,) = results.curves
    for state in row["states"]:
        back = {rule: told["back"] for rule, told in state["rules"].items()}
        assert 0 <= back["mean"] <= back["oldest"] == state["certificate"]["oldest"]
        assert min(map(int, state["rules"]["oldest"]["losses"])) == state["step"] - back["oldest"]
    assert {rule for _, rule in ruled(results)} == {"newest", "mean", "paced", "oldest"}


def test_a_place_is_all_that_a_learner_has_besides_weights_and_moments(tiny: Setting) -> None:
    ahead = tiny.begin(0)
    for _ in range(12):
        ahead.step()
    state, where = state_of(ahead), placed(ahead)
    other = take(tiny.begin(0, stranger=True), state)
    for _ in range(3):
        next(other.batches)
        other.schedule.step()
    for one in other.optimizer.state.values():
        one["step"].fill_(99)
    place(other, where)
    ahead.step()
    other.step()
    assert other.loss() == ahead.loss()


def test_failures_are_spread_over_the_window_and_differ_between_seeds(tiny: Setting) -> None:
    for seed in range(3):
        chosen = marks(tiny, seed)
        assert all(tiny.span.first <= step < tiny.span.last for step in chosen)
    assert marks(tiny, 0) != marks(tiny, 1)


def test_rows_have_names_of_their_own() -> None:
    names = [row.name for row in rows({10: {"fp32": 0.1}, 20: {"fp32": 0.2}})]
    assert len(names) == len(set(names))


def test_the_size_of_a_save_goes_with_its_period() -> None:
    sizes = {5: 1.0, 20: 2.0}
    assert size_at(sizes, 1.0) == 1.0  # at each step, which was not measured
    assert size_at(sizes, 0.2) == pytest.approx(1.0)
    assert size_at(sizes, 0.15) == pytest.approx(1.5)  # every ten
    assert size_at(sizes, 0.1) == pytest.approx(2.0)
    assert size_at(sizes, 0.01) == 2.0


def test_what_saving_less_often_costs() -> None:
    assert less_often(12.0, 1.2, 0.01) == pytest.approx(0.01 * 4.5)
    assert less_often(12.0, 24.0, 0.01, gap=0.5) == 0.5
    assert newest({"10": 5, "20": 5}, 0, 19) == 10
    assert newest({}, 7, 19) == 7


def test_intervals_are_over_seeds_however_many_states_each_has() -> None:
    found = over_seeds([(0, 1.0), (0, 3.0), (1, 4.0), (2, 5.0), (2, 7.0), (2, 6.0)])
    assert (found.value, found.count) == (4.0, 3)
    assert found.around == pytest.approx(4.303 * 2.0 / 3**0.5)  # means 2, 4, 6
    one = over_seeds([(0, 1.0), (0, 3.0)])
    assert (one.value, one.count) == (2.0, 1) and isnan(one.around)


def test_states_of_one_seed_are_not_taken_for_independent_ones() -> None:
    window, records = (0, 10, 20), []
    for seed, gap in ((0, 0.1), (1, 0.3)):
        common = {"setting": "made up", "seed": seed}
        trunk = {"losses": {"30": 1.0 + seed}, "shorter": {"5": 1.5 + seed, "10": 2.0 + seed}, "numel": 1}
        states = [{"losses": {"30": 1.0 + seed + gap}, "certificate": {"mean": 0.0, "max": 0.0}}] * 2
        row = {"row": "a", "family": "a", "mark": "", "every": 10, "saved": {"10": 1}, "states": states}
        records += [{**common, "part": "trunk", **trunk}, {**common, "part": "curve", **row}]
    results = Results("made up", records)
    (row,) = row_results(results, window)
    assert (row.states, row.gap.count) == (4, 2)
    assert row.gap.value == pytest.approx(0.2)
    assert row.gap.around == pytest.approx(12.706 * 0.1)  # of two means 0.2 apart, not of four states
    assert (results.worth.value, results.worth.around, results.worth.count) == pytest.approx((0.1, 0.0, 2))


def test_lines_through_points() -> None:
    points = [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]
    assert slope_through_zero(points) == pytest.approx((2.0, 1.0))
    assert correlation([(x, y + 5) for x, y in points]) == pytest.approx(1.0)


def test_the_rate_holds_and_then_falls() -> None:
    course = Course(reference(), 1.0, 100, warm_up=10, floor=0.0, hold=60, spurt=30)
    assert [course.factor(step) for step in (4, 20, 30, 60, 80, 100)] == [0.5, 3.0, 1.0, 1.0, 0.5, 0.0]


def test_settings_can_be_told_apart() -> None:
    usual = {"pretraining", "adapters", "layer-wise", "minilm", "falling", "beta2-0.95"}
    assert set(MAKERS) == usual | {"pretraining-114m"}
    assert set(DEFAULTS) == usual  # the other one needs a GPU
    assert Row("a", 10, rate=0.5).name == "a @10 0.5"


def test_a_learner_is_made_where_its_shape_says() -> None:
    shape, course = Tiny().shape, Course(reference(), 1e-3, 10)
    assert Shape().device == "cpu"
    for device in ("cpu", "meta"):  # meta is on every machine, and on it are no values
        made = Learner(replace(shape, device=device), course, 0)
        assert {one.device.type for one in (*made.model.parameters(), *made.model.buffers())} == {device}
    usual, named = Learner(shape, course, 0), Learner(replace(shape, device="cpu"), course, 0)
    usual.step()
    named.step()
    assert usual.loss() == named.loss()


def test_the_large_setting_gives_figures_without_a_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(settings, "LARGE_SHAPE", Tiny().shape)
    setting = setting_named("pretraining-114m")
    assert (setting.span.start, setting.rows, setting.rules) == (200, "large", False)
    short = replace(setting, span=Tiny().setting().span, delays=(10,), marks=1)
    records = as_read(list(curves(short, 0, base(short, 0), tmp_path, lambda row: True)))
    costs = {one.name: one for one in figures(records) if one.name.endswith(": cost")}
    assert costs.keys() == {f"{setting.name}, {row}: cost" for row in settings.LARGE}
    assert all(not isnan(one.value) and " bytes; " in one.against for one in costs.values())


def test_on_a_device_what_is_encoded_is_encoded_there(tmp_path: Path) -> None:
    learner = Tiny().setting().begin(0)
    made = {row.name: row for row in rows({})}
    compact, full = made["full, compact @10"], made["full @10"]
    assert compact.config(tmp_path, learner).encode == "saving"
    learner.shape = replace(learner.shape, device="cuda")
    assert compact.config(tmp_path, learner).encode == "staging"
    assert full.config(tmp_path, learner).encode == "saving"
