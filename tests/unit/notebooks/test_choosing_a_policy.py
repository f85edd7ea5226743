"""The notebook that chooses a policy: it draws what was recorded, replayed and measured, and what it chooses holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch

from monitor.config.load import load_config
from tests.support.notebooks import executed

RATES = (0.6, 0.3, 0.15, 0.075, 0.0375)

pytestmark = pytest.mark.slow

Names = dict[str, Any]
Curves = dict[tuple[int, str], Any]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Names]:
    """What the notebook leaves behind; ``figures`` are its pictures."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    state = torch.random.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("notebook")))
        patch.setattr(sys, "path", list(sys.path))
        plt.close("all")
        found = executed("choosing_a_policy")
        found["figures"] = [plt.figure(number) for number in plt.get_fignums()]
        yield found
        plt.close("all")
        torch.random.set_rng_state(state)


def lines(names: Names) -> list[dict[str, Any]]:
    return [json.loads(line) for line in names["TRACE"].read_text().splitlines() if line]


def close_to(values: Any) -> Any:
    return pytest.approx(np.asarray(values, dtype=float))


def test_drift_is_that_of_the_trace(names: Names) -> None:
    units = next(line["units"] for line in lines(names) if line["kind"] == "job" and line["units"])
    at = next(i for i, unit in enumerate(units) if (unit["layer"], unit["slot"]) == ("7", "fp32"))
    moved = {line["step"]: line["since"] for line in lines(names) if line["kind"] == "moved"}
    assert len(moved) == 40
    assert names["drift"]["7"] == {step: since[str(step - 10)][at] / 10 for step, since in moved.items()}
    drawn = {line.get_label(): line.get_ydata() for line in names["figures"][0].axes[0].get_lines()}
    assert {layer: list(values) for layer, values in drawn.items()} == {
        layer: list(values.values()) for layer, values in names["drift"].items()
    }
    assert min(names["pace"][layer] for layer in "567") > 2 * max(names["pace"][layer] for layer in "0234")


def test_the_replay_of_what_was_recorded_is_what_was_written(names: Names) -> None:
    written = [line["written"] for line in lines(names) if line["kind"] == "commit"]
    one = names["replayed"]["full, compact, packed, every 10"]
    assert one.replayed.as_recorded and len(written) == 41
    assert [save.written for save in one.replayed.committed] == written
    assert names["paid"](one) == sum(written[1:]) / names["numel"] / 400
    assert names["numel"] == sum(parameter.numel() for parameter in names["model"].parameters())


def test_replays_are_drawn_as_they_came_out(names: Names) -> None:
    replayed = names["replayed"]
    damage, lost = names["figures"][1].axes
    bytes_paid = [names["paid"](one) for one in replayed.values()]
    points = [(damage, [one.replayed.exposure.total.mean for one in replayed.values()])]
    points += [(lost, [one.replayed.exposure.rewound.mean for one in replayed.values()])]
    for axis, values in points:
        drawn = [tuple(dots.get_offsets()[0]) for dots in axis.collections]
        assert drawn == close_to(list(zip(bytes_paid, values, strict=True)))


def test_fewer_bytes_cost_more(names: Names) -> None:
    found = [names["replayed"][f"full, compact, packed, every {every}"] for every in (10, 20, 40)]
    damage, paid = [one.replayed.exposure.total.mean for one in found], [names["paid"](one) for one in found]
    assert damage == sorted(damage) and paid == sorted(paid, reverse=True)
    assert [one.replayed.exposure.rewound.mean for one in found] == pytest.approx([5, 10, 20], rel=0.1)
    for name in ("budget", "budget, compact, packed"):
        assert 0.5 * names["RATE"] < names["paid"](names["replayed"][name]) < 1.1 * names["RATE"]


def test_measured_rows_are_those_of_the_raw_results(names: Names) -> None:
    """Cost and bytes of every row that is drawn, worked out again from the lines."""
    records = [json.loads(line) for line in names["RESULTS"].read_text().splitlines()]
    drawn = {axis.get_title(): axis for axis in names["figures"][2].axes}
    assert set(drawn) == set(names["measured"]) >= {"pretraining", "layer-wise", "adapters", "minilm"}
    for setting, (results, rows) in names["measured"].items():
        own = [one for one in records if one.get("setting") == setting]
        runs: Names = {}  # a run is told by each part of the benchmark, by one with its parameters' number
        for one in own:
            if one["part"] == "trunk":
                runs[one["seed"]] = {**runs.get(one["seed"], {}), **one}
        curves = {(one["seed"], one["row"]): one for one in own if one["part"] == "curve"}
        worth = results.worth.value
        assert worth > 0
        seen = {row.row: row for row in rows if row.gap.count > 1 and not row.mark.startswith(" lag")}
        bars = drawn[setting].containers
        assert [bar.get_label() for bar in bars] == list(names["families"])
        for bar in bars:
            mine = [row for row in seen.values() if row.family == bar.get_label()]
            rates, costs = bar.lines[0].get_data()
            assert list(rates) == pytest.approx([rate(names, setting, runs, curves, row.row) for row in mine])
            assert list(costs) == pytest.approx([row.lost + fmean(gaps(runs, curves, row.row)) / worth for row in mine])
            heights = [part[1][1] - part[0][1] for part in bar.lines[2][0].get_segments()]
            assert heights == pytest.approx([2 * row.cost.around / worth for row in mine])


def rate(names: Names, setting: str, runs: Names, curves: Curves, row: str) -> float:
    """Bytes a parameter and step, between the first save and the last failure; mean over seeds."""
    span = names["setting_named"](setting).span
    found = [one for (_, name), one in curves.items() if name == row]
    numel = next(run["numel"] for run in runs.values() if "numel" in run)
    return fmean(sum(one["saved"].values()) for one in found) / (span.last - span.start) / numel


def gaps(runs: Names, curves: Curves, row: str) -> list[float]:
    """Of every state of a row: loss at the end above that of the run that failed nowhere."""
    found = []
    for (seed, name), one in curves.items():
        for state in one["states"] if name == row else ():
            end = max(state["losses"], key=int)
            found.append(state["losses"][end] - runs[seed]["losses"][end])
    return found


@pytest.mark.parametrize(
    ("offers", "kind"),
    [
        ({"full": (10, 0), "budget": (8, 1)}, "budget"),
        ({"full": (10, 0), "budget": (8, 3)}, "full"),
        ({"full": (10, 0), "full, compact, packed": (6, 0), "budget": (4.5, 1), "parity 2": (7, 1)}, "budget"),
        ({"full": (10, 0), "full, compact, packed": (6, 1), "budget": (4.5, 1)}, "full, compact, packed"),
        ({"full": (10, 0), "budget": (2, 3), "budget, compact": (3, 1)}, "budget, compact"),
        ({"full": (10, 0), "full, packed": (9, 0)}, "full, packed"),
    ],
)
def test_another_kind_is_taken_only_where_its_whole_interval_is_better(
    names: Names, monkeypatch: pytest.MonkeyPatch, offers: dict[str, tuple[float, float]], kind: str
) -> None:
    monkeypatch.setitem(names, "offers", lambda setting, rate: offers)
    assert names["choose"]("pretraining", 0.1) == kind


def test_what_is_offered_was_measured_at_no_more_bytes(names: Names) -> None:
    for setting, (results, rows) in names["measured"].items():
        for most in RATES:
            for kind, (cost, around) in names["offers"](setting, most).items():
                assert np.isfinite([cost, around]).all()
                if not kind.startswith("full"):
                    own = [row for row in rows if row.family == kind and not row.mark and row.gap.count > 1]
                    fit = [row for row in own if row.rate <= 1.02 * most]
                    nearest = max(fit, key=lambda row: row.rate)
                    assert cost == pytest.approx(nearest.cost.value / results.worth.value)
                    assert around == pytest.approx(nearest.cost.around / results.worth.value)


def test_where_only_what_is_exact_is_wanted_nothing_else_is_offered(names: Names, monkeypatch: Any) -> None:
    monkeypatch.setitem(names, "EXACT", True)
    kinds = {names["choose"](setting, rate) for setting in names["measured"] for rate in RATES}
    assert kinds <= {"full", "full, packed"}
    for kind in kinds:
        config = load_config(names["settings_for"](kind, 0.3))
        assert (config.policy, config.encoding) == ("full", "raw")


def test_the_settings_nearest_in_spread_is_taken(names: Names) -> None:
    spread = names["spread"](names["pace"].values())
    nearest = min(names["spreads"], key=lambda name: abs(np.log(names["spreads"][name] / spread)))
    assert names["SETTING"] == nearest
    assert names["kind"] == names["choose"](nearest, names["RATE"])


def test_every_kind_ends_in_a_configuration_that_keeps_the_rate(names: Names) -> None:
    """At a rate for which no kind needs barely more than one interval, where two of them would pay for half of it."""
    path = names["FOLDER"] / "kind.yaml"
    for kind in names["KINDS"]:
        path.write_text(names["yaml"].safe_dump(names["settings_for"](kind, 0.2)))
        load_config(path)
        found = names["simulated"](names["trace"], [str(path)], names["Terms"](), speeds=names["SPEEDS"])
        assert 0.5 * 0.2 < names["paid"](found.summaries[1]) < 1.1 * 0.2, kind


def test_the_yaml_is_the_choice(names: Names) -> None:
    config = load_config(names["chosen"])
    assert config == names["config"] == load_config(names["settings_for"](names["kind"], names["RATE"]))
    assert names["paid"](names["mine"]) < 1.1 * names["RATE"]
