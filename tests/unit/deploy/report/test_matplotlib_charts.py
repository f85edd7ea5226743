"""The charts of a report draw what the trace says: colours, bars, marks and labels are read back from the SVG."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.image import imread

from deploy.report.history import Bins, history_of, read_history
from deploy.report.matplotlib_charts import cost_chart, css_colours, maps_of, scale_for
from store.trace import CommitLine, DecisionLine, JobLine, Line, ResumedLine, TracedUnit, iter_lines
from tests.support.cli import ROOT
from tests.support.stores import transformer

UNKNOWN, NONFINITE = "#e8ebef", "#000000"
LOSSLESS, ROUNDED, FULL = ("#c5d9f2", "#79a9e0", "#2a68b8"), ("#ecd0e6", "#cf86c0", "#a33a90"), "#d5dae1"
GOLDEN = next((ROOT / "tests" / "golden" / "trace-1").glob("*.jsonl"))


def colours(chart: str) -> list[list[list[str]]]:
    """The colours of each panel, by layer and column."""
    found = ElementTree.fromstring(chart).iter("image")
    pictures = [base64.b64decode((one.get("href") or "").partition("base64,")[2]) for one in found]
    return [[[to_hex(pixel) for pixel in row] for row in imread(BytesIO(picture))] for picture in pictures]


def same(one: list[list[str]], other: list[list[str]]) -> bool:
    """Whether the colours are equal but for rounding."""
    shades = [np.array([[to_rgb(cell) for cell in row] for row in table]) for table in (one, other)]
    return shades[0].shape == shades[1].shape and bool(np.allclose(*shades, rtol=0, atol=1.01 / 255))


def texts(chart: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(chart).iter("text")]


def boxes(chart: str, colour: str) -> list[tuple[float, float, float, float]]:
    """Left, top, width and height of the bars of a colour."""
    found = []
    for path in ElementTree.fromstring(chart).iter("path"):
        if f"fill: {colour}" in path.get("style", "") and path.get("clip-path"):
            x, y = np.array(re.findall(r"[-\d.]+", path.get("d", "")), float).reshape(-1, 2).T
            found.append((x.min(), y.min(), np.ptp(x), np.ptp(y)))
    return found


def marks(chart: str) -> list[list[float]]:
    """Place, lower and upper end of the dashed lines."""
    found = [one for one in ElementTree.fromstring(chart).iter("path") if "dasharray" in one.get("style", "")]
    ends = [[float(number) for number in re.findall(r"[-\d.]+", one.get("d", ""))] for one in found]
    return [[x, low, high] for x, low, _, high in ends]


UNITS = (("embed", "fp32", False), ("blocks.0", "fp32", True), ("embed", "exp_avg", False), ("head", "fp32", False))
"""Layer, slot, and whether it is a block: only the first layer has a moment."""


def a_job(epoch: int = 1) -> JobLine:
    places = ["embed", "blocks.0", "head"]
    units = tuple(
        TracedUnit(
            layer=layer, slot=slot, position=places.index(layer), block=block, nbytes=600, numel=150, moving=True
        )
        for layer, slot, block in UNITS
    )
    return JobLine(started=1e3 * epoch, epoch=epoch, framework="t", world_size=1, policy="p", settings={}, units=units)


def a_decision(step: int, drift: tuple[float | None, ...], stall: float = 0.5, **more: object) -> DecisionLine:
    return DecisionLine(step=step, seconds=float(step), commits=0, drift=drift, stall=stall, **more)  # type: ignore[arg-type]


def a_save(step: int, encodings: dict[int, str], stall: float = 0.5) -> list[Line | None]:
    sizes = {place: (600, encoding, 0.0, None) for place, encoding in encodings.items()}
    return [
        a_decision(step, (), stall, saved=encodings),
        CommitLine(step=step, seconds=step + 0.5, took=0.1, written=600 * len(sizes), sizes=sizes),
    ]


def test_each_cell_has_the_colour_of_its_drift() -> None:
    drifts = [(0.001, 0.02, 3.0, 0.3), (0.004, None, 5.0, 0.3), (0.0, 0.07, 80.0, float("inf"))]
    lines = [a_job(), *(a_decision(10 * i, drift) for i, drift in enumerate(drifts)), a_decision(30, (), sick=(1,))]
    chart = maps_of(history_of(lines))["drift"][0]
    weights, moments = colours(chart)
    known = [0.001, 0.02, 0.3, 0.004, 0.3, 0.0, 0.07]
    colour, other = css_colours(known), css_colours([3.0, 5.0, 80.0])
    expected = [
        [colour(0.001), colour(0.004), colour(0.0), UNKNOWN],
        [colour(0.02), UNKNOWN, colour(0.07), NONFINITE],
        [colour(0.3), colour(0.3), UNKNOWN, UNKNOWN],
    ]
    assert same(weights, expected)
    assert same(moments, [[other(3.0), other(5.0), other(80.0), UNKNOWN], [UNKNOWN] * 4, [UNKNOWN] * 4])
    brightness = [sum(to_rgb(colour(value))) for value in (0.0, 0.004, 0.02, 0.07, 0.3)]
    assert brightness == sorted(set(brightness), reverse=True), "the more drift, the darker"
    found = texts(chart)
    assert {"fp32 (weights)", "exp_avg", "embed", "blocks.0", "head", "optimizer step", "drift"} <= {*found}
    assert {"unknown: no decision measured it", "NaN or Inf", "0", "10", "20", "30", "0.5", "100"} <= {*found}
    root = ElementTree.fromstring(chart)
    assert (root.get("role"), root.get("aria-label")) == ("img", "Drift of each layer over time")
    assert [one.text for one in root.iter("title")] == [
        "embed · fp32 (weights): last 0, most 0.00400 · exp_avg: last 80.0, most 80.0",
        "blocks.0 · fp32 (weights): last 0.0700, most 0.0700 · exp_avg: ?",
        "head · fp32 (weights): last 0.300, most 0.300 · exp_avg: ?",
    ]


def test_each_cell_has_the_colour_of_its_saves() -> None:
    lines = [a_job(), *a_save(1, {0: "raw", 1: "bf16", 2: "raw"}), *a_save(2, {1: "raw"})]
    chart = maps_of(history_of(lines))["saved"][0]
    weights, moments = colours(chart)
    assert weights == [[LOSSLESS[2], UNKNOWN], [ROUNDED[2], LOSSLESS[2]], [UNKNOWN, UNKNOWN]]
    assert moments == [[LOSSLESS[2], UNKNOWN], [UNKNOWN] * 2, [UNKNOWN] * 2]
    assert {"saved losslessly", "saved rounded", "not saved: an older version is used"} <= {*texts(chart)}
    assert next(ElementTree.fromstring(chart).iter("title")).text == (
        "embed · fp32 (weights): in 1 of 2 saves · exp_avg: in 1 of 2 saves"
    )


def test_a_merged_column_has_the_shade_of_its_share() -> None:
    """Columns of four decisions: unit 0 is saved at each, 1 at two, 2 at one; the last column has one decision."""
    lines = [a_job()]
    for i in range(9):
        lines += a_save(i, {0: "raw", **({1: "bf16"} if i % 4 < 2 else {}), **({2: "raw"} if i % 4 == 0 else {})})
    history = history_of(lines, most=4)
    assert history.bins.width == 4
    chart = maps_of(history)["saved"][0]
    weights, moments = colours(chart)
    assert weights[:2] == [[LOSSLESS[2]] * 3, [ROUNDED[1], ROUNDED[1], ROUNDED[2]]]
    assert moments[0] == [LOSSLESS[0], LOSSLESS[0], LOSSLESS[2]]
    shares = ("at a third", "at two thirds", "at all of the decisions")
    assert {f"saved {kind}, {share}" for kind in ("losslessly", "rounded") for share in shares} <= {*texts(chart)}


def test_bars_are_as_high_as_the_bytes_and_the_stalls() -> None:
    lines = [a_job(), *a_save(1, {0: "raw", 1: "raw"}, 0.2), a_decision(2, (), 0.001), *a_save(3, {2: "raw"}, 0.4)]
    chart = cost_chart(history_of(lines))
    full, blue = boxes(chart, FULL), boxes(chart, LOSSLESS[2])
    written, stalls = blue[:2], blue[2:]
    assert [one[3] for one in full] == pytest.approx([full[0][3]] * 2), "2400 bytes at each of the saves"
    assert [one[3] / full[0][3] for one in written] == pytest.approx([0.5, 0.25], rel=1e-3)
    assert [one[3] / stalls[0][3] for one in stalls] == pytest.approx([1.0, 0.005, 2.0], rel=1e-3)
    assert [one[0] for one in full] == [one[0] for one in written] == pytest.approx([stalls[0][0], stalls[2][0]])
    found = texts(chart)
    assert {"Bytes written", "Longest stall of training at a decision", "0 B", "2.00 KiB", "500 ms"} <= {*found}
    heights = {one.text: float(one.get("y") or 0) for one in ElementTree.fromstring(chart).iter("text")}
    assert full[0][3] == pytest.approx(2400 / 2048 * (heights["0 B"] - heights["2.00 KiB"]), rel=1e-3)
    assert stalls[2][3] == pytest.approx(0.4 / 0.5 * (heights["0 s"] - heights["500 ms"]), rel=1e-3)
    assert {"by these saves", "by full saves at the same moments"} <= {*found}
    assert found.count("optimizer step") == 2 and {"1", "2", "3"} <= {*found}


def test_a_run_without_stall_and_one_that_only_observes_have_a_chart() -> None:
    lines = [a_job().model_copy(update={"observing": True}), *a_save(1, {0: "raw"}, 0.0)]
    assert "Bytes that would have been written" in texts(cost_chart(history_of(lines)))


def test_restarts_are_marked_where_they_were() -> None:
    lines = [a_job(), *(line for step in range(1, 4) for line in a_save(step, {0: "raw"})), a_job(2)]
    lines += [ResumedLine(step=2, newest=3, seconds=2.0), *a_save(2, {0: "raw"})]
    history = history_of(lines)
    assert history.restarts == (3,)
    for chart in (maps_of(history)["saved"][0], maps_of(history)["drift"][0]):
        frames = [
            [float(number) for number in re.findall(r"[-\d.]+", one.get("transform", ""))]
            for one in ElementTree.fromstring(chart).iter("image")
        ]
        expected = [[x + 3 * width, y + 3 * height, y] for width, _, _, height, x, y in frames]
        assert np.allclose(marks(chart), expected, atol=0.01), "over all three rows, and no further"
    cost = cost_chart(history)
    bars = boxes(cost, LOSSLESS[2])
    between = (bars[2][0] + bars[2][2] + bars[3][0]) / 2
    assert [place for place, *_ in marks(cost)] == pytest.approx([between, between], abs=0.01)


def test_equal_histories_give_equal_bytes() -> None:
    history = read_history(GOLDEN)
    one = maps_of(history), cost_chart(history)
    with mpl.rc_context({"font.size": 30.0, "svg.hashsalt": "x", "text.usetex": True, "axes.grid": True}):
        assert (maps_of(history), cost_chart(history)) == one
    assert not re.search(r"20\d\d-|xmlns|<!DOCTYPE|metadata", str(one))


@pytest.mark.filterwarnings("error")
def test_names_are_text_whatever_they_are() -> None:
    names = ("$x_{$", "日本語", "<b>&amp;", "a\u202eb\x1b\x00", "x" * 300)
    units = tuple(
        TracedUnit(layer=name, slot=slot, position=i, block=True, nbytes=8, numel=2, moving=True)
        for i, name in enumerate(names)
        for slot in ("fp32", "$\\frac{$")
    )
    lines = [a_job().model_copy(update={"units": units}), *a_save(1, {0: "raw"})]
    found = texts(maps_of(history_of(lines))["saved"][0])
    assert {"$x_{$", "日本語", "<b>&amp;", r"a\u202eb\x1b\x00", "…" + "x" * 21, "$\\frac{$"} <= {*found}


def long_run(layers: int, decisions: int) -> list[Line | None]:
    """A trace of so many decisions, each saving one layer in four."""
    names = [layer.name for layer in transformer(layers)]
    units = [(name, slot) for name in names for slot in ("fp32", "exp_avg", "exp_avg_sq")]
    traced = tuple(
        TracedUnit(
            layer=name, slot=slot, position=names.index(name), block=name.startswith("layers"),
            nbytes=1000, numel=250, moving=True,
        )
        for name, slot in units
    )  # fmt: skip
    lines: list[Line | None] = [
        JobLine(started=0.0, epoch=1, framework="t", world_size=1, policy="p", settings={}, units=traced)
    ]
    for i in range(decisions):
        drift = tuple(0.001 * (1 + (i * 7 + j * 13) % 97) for j in range(len(units)))
        saved = {j: "raw" for j in range(len(units)) if j % 4 == i % 4}
        lines.append(DecisionLine(step=i, seconds=float(i), commits=i, drift=drift, saved=saved, stall=0.25))
        sizes = {j: (1000, "raw", 0.0, drift[j]) for j in saved}
        lines.append(CommitLine(step=i, seconds=i + 0.5, took=0.1, written=1000 * len(saved), sizes=sizes))
    return lines


def test_a_long_run_of_many_layers_stays_small_and_loses_nothing() -> None:
    decisions = 1000
    history = history_of(long_run(126, decisions))
    totals, bins = history.totals, history.bins
    assert len(bins.columns) <= bins.most and bins.width == 16
    assert sum(one.decisions for one in bins.columns) == totals.decisions == decisions
    assert sum(one.written for one in bins.columns) == totals.written
    assert bins.saved.sum() == sum(len(range(i % 4, 387, 4)) for i in range(decisions))
    assert totals.full == 387 * 1000 * decisions
    assert float(bins.drift.max()) == 0.097

    found = maps_of(history)
    assert sum(map(len, (*found["drift"], *found["saved"]))) < 500_000


@pytest.mark.parametrize(
    "values", [[], [0.0], [0.5], [1e-9, 1.0], [1e-4 * 1.1**i for i in range(60)], [float("inf"), 2.0]]
)
def test_scales_rise_and_have_a_colour_for_everything(values: list[float]) -> None:
    edges = scale_for(values).boundaries.tolist()
    assert len(edges) >= 2 and edges == sorted(set(edges))
    assert len({f"{edge:g}" for edge in edges}) == len(edges)
    finite = [value for value in values if 0 < value < float("inf")]
    assert all(value < edges[-1] for value in finite)
    assert sum(value >= edges[0] for value in finite) >= 0.94 * len(finite)
    colour = css_colours(values)
    assert all(colour(value) not in (UNKNOWN, NONFINITE) for value in values)


@pytest.mark.parametrize("layers", [1, 2, 12, 40, 126, 1000])
def test_labels_of_layers_never_touch(layers: int) -> None:
    chart = maps_of(history_of(long_run(layers, 2)))["drift"][0]
    names = {layer.name for layer in transformer(layers)}
    found = [one for one in ElementTree.fromstring(chart).iter("text") if one.text in names]
    places = [float(one.get("y") or 0) for one in found]
    assert all(later - earlier >= 10 for earlier, later in pairwise(places)), "names are 9 pixels high"
    assert len(found) >= min(layers, 12)
    assert {"embed_tokens", "lm_head"} <= {one.text for one in found}


def test_units_that_come_later_get_rows_of_their_own() -> None:
    lines = long_run(2, 4)
    more = long_run(3, 4)
    history = history_of([*lines, *more])
    assert len(history.units) == 18
    assert history.totals.decisions == 8 and history.units[0].layer == "embed_tokens"


def test_bins_keep_the_largest_drift_and_all_counts() -> None:
    bins = Bins(most=8)
    bins.grow(2)
    for i in range(100):
        column = bins.add(i) // bins.width
        bins.drift[0, column] = max(i, bins.drift[0, column]) if bins.drift[0, column] >= 0 else i
        bins.saved[1, column] += 1
    assert bins.width == 16 and len(bins.columns) == 7
    assert [(one.first_step, one.last_step) for one in bins.columns][:2] == [(0, 15), (16, 31)]
    assert bins.drift[0, :7].tolist() == [15, 31, 47, 63, 79, 95, 99]
    assert bins.saved[1].tolist() == [16] * 6 + [4, 0]


def test_the_trace_of_a_real_run_adds_up() -> None:
    lines = [line for line in iter_lines(GOLDEN.read_bytes().splitlines()) if line is not None]
    decisions = [line for line in lines if isinstance(line, DecisionLine)]
    commits = [line for line in lines if isinstance(line, CommitLine)]
    history = read_history(GOLDEN)
    totals = history.totals
    assert decisions and commits
    assert (totals.decisions, totals.saves, history.skipped) == (len(decisions), len(commits), 1)
    assert totals.written == sum(line.written for line in commits)
    assert totals.stall == pytest.approx(sum(line.stall + line.copy_wait for line in decisions))
    assert history.bins.saved.sum() == sum(len(line.sizes) for line in commits)
    assert history.job_status is not None and history.job_status.newest is not None
    assert history.job_status.newest.step == decisions[-1].step
