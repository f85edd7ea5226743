from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from examples.commits import Commit
from examples.journal import Journal, Reader
from examples.picture import draw, drawn, teeth
from examples.story import Story, mean_gap, tell
from examples.table import certificate_table, footnotes, result_table
from store.names import Unit

LAYERS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
SLOTS = ("fp32", "exp_avg", "exp_avg_sq")
STEPS, KILLED, RESUMED = 60, 38, 35


def certificate(composite: bool) -> dict[str, Any]:
    return {
        "exact": not composite,
        "max_staleness": 10 * composite,
        "units": [
            {
                "layer": layer,
                "slot": slot,
                "step": 25 if composite and slot == "exp_avg" else 35,
                "staleness": 10 if composite and slot == "exp_avg" else 0,
                "drift": 0.5 if composite and slot == "exp_avg" else 0.0,
            }
            for layer in LAYERS
            for slot in SLOTS
        ],
    }


def start(step: int, found: dict[str, Any] | None) -> dict[str, Any]:
    return {"event": "start", "step": step, "certificate": found, "layers": LAYERS, "metrics_port": 1, "parameters": 1}


def decision(step: int, first: bool) -> dict[str, Any]:
    units = [
        {"layer": layer, "slot": slot, "nbytes": 1000, "drift": None if first else 0.01 * (1 + index), "saved": True}
        for index, layer in enumerate(LAYERS)
        for slot in SLOTS
    ]
    return {"event": "decision", "step": step, "skipped": None, "stall_seconds": 0.01, "units": units}


def life(first: int, last: int, loss: float, found: dict[str, Any] | None) -> list[dict[str, Any]]:
    events = [start(first, found)]
    for step in range(first + 1, last + 1):
        if step % 5 == 0:
            events.append(decision(step, step == 5))
        events.append({"event": "step", "step": step, "loss": loss + 3 / step, "seconds": 0.1})
    return events


def commits(selective: bool) -> list[Commit]:
    made = []
    for step in range(5, STEPS + 1, 5):
        slots = ("fp32",) if selective and step > 5 else SLOTS
        units = frozenset(Unit(layer, slot) for layer in LAYERS for slot in slots)
        made.append(Commit(step, 1 if step <= RESUMED else 2, units, 1000 * len(units), 15000 - 1000 * len(units)))
    return made


def interrupted(*, composite: bool = True, selective: bool = True) -> Story:
    events = [*life(0, KILLED, 2.0, None), *life(RESUMED, STEPS, 2.25, certificate(composite))]
    events += [
        {"event": "deepspeed_save", "seconds": [0.3, 0.1, 0.2], "nbytes": 20000},
        {"event": "end", "step": STEPS},
    ]
    return tell(events, commits(selective))


def undisturbed() -> Story:
    return tell([*life(0, STEPS, 2.0, None), {"event": "end", "step": STEPS}])


def printed(*parts: Any) -> str:
    console = Console(file=StringIO(), width=200)
    for part in parts:
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_story_knows_its_lives_and_what_was_lost() -> None:
    story = interrupted()
    assert [(one.first, one.last) for one in story.lives] == [(0, KILLED), (RESUMED, STEPS)]
    assert story.steps_lost == KILLED - RESUMED
    assert story.resumed is story.lives[1]
    assert story.killed is story.lives[0]
    assert story.finished_at == STEPS
    assert story.resumed_steps == [25, 35]


def test_what_was_done_again_replaces_what_was_lost() -> None:
    losses = interrupted().losses
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses[RESUMED] == pytest.approx(2.0 + 3 / RESUMED)
    assert losses[RESUMED + 1] == pytest.approx(2.25 + 3 / (RESUMED + 1))


def test_a_job_that_started_over_has_not_resumed() -> None:
    story = tell([*life(0, 8, 2.0, None), *life(0, 20, 2.0, None)])
    assert story.resumed is None
    assert story.certificate is None
    assert not story.is_composite


def test_bytes_are_those_of_the_commits() -> None:
    story = interrupted()
    assert (story.written, story.full) == (15000 + 11 * 5000, 12 * 15000)
    assert story.saved_at(0, "lm_head", "exp_avg") == {5}
    assert story.saved_at(1, "lm_head", "fp32") == {40, 45, 50, 55, 60}
    assert story.times_saved("lm_head", "fp32") == 12


@pytest.mark.parametrize("composite", [True, False])
@pytest.mark.parametrize("selective", [True, False])
def test_claims_that_do_not_hold_are_not_made(composite: bool, selective: bool) -> None:
    story = interrupted(composite=composite, selective=selective)
    assert (story.is_composite, story.is_selective) == (composite, selective)
    text = printed(certificate_table(story), footnotes(story, None))
    assert ("NOT SHOWN BY THIS RUN: that a composite" in text) is not composite
    assert ("a composite of steps 25, 35" in text) is composite
    assert ("NOT SHOWN BY THIS RUN: that saves are selective" in text) is not selective


def test_the_gap_is_between_the_same_steps_of_two_runs() -> None:
    assert mean_gap(interrupted(), undisturbed(), range(40, 51)) == pytest.approx(0.25)
    assert mean_gap(interrupted(), undisturbed(), range(1, 31)) == 0


def test_the_table_has_the_figures() -> None:
    text = printed(result_table(interrupted(), undisturbed()))
    for figure in ("killed after step 38, resumed at 35", "+0.2500", "x0.39", "x0.29", "200 ms median, 300 ms most"):
        assert figure in text
    assert "equal to the last bit, all 38" in printed(footnotes(interrupted(), undisturbed()))


def test_runs_that_differ_before_the_kill_are_told_apart() -> None:
    other = tell([*life(0, STEPS, 2.5, None)])
    assert "at 0 of 38 steps only" in printed(footnotes(interrupted(), other))


def test_a_journal_is_read_as_it_grows_and_only_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    reader, journal = Reader(path), Journal(path)
    assert list(reader.new()) == []
    journal.write("step", step=1)
    assert list(reader.new()) == [{"event": "step", "step": 1}]
    with path.open("a") as file:
        file.write('{"event": "st')
    assert list(reader.new()) == []
    with path.open("a") as file:
        file.write('ep", "step": 2}\n')
    assert list(reader.new()) == [{"event": "step", "step": 2}]


def test_a_journal_without_a_path_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Journal(None).write("step", step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_journal_that_does_not_begin_with_a_start_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with 'step'"):
        tell([{"event": "step", "step": 1, "loss": 1.0, "seconds": 1.0}])


def test_teeth_rise_and_drop_where_a_layer_was_saved() -> None:
    decisions = [decision(5, True), decision(10, False), decision(15, False)]
    assert teeth(decisions, 0, "model.layers.0", {5, 15}) == [(5, 0.0), (10, 0.02), (15, 0.02), (15, 0.0)]
    assert teeth(decisions[1:], 8, "model.layers.0", set()) == [(8, 0.0), (10, 0.02), (15, 0.02)]


def test_the_picture_is_a_png_of_two_thousand_points_across(tmp_path: Path) -> None:
    path = draw(interrupted(), undisturbed(), tmp_path / "drift.png", threshold=0.02)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == 2000


@pytest.mark.parametrize("control", [True, False])
def test_no_words_of_the_picture_overlap_or_leave_it(control: bool) -> None:
    figure = drawn(interrupted(), undisturbed() if control else None, threshold=0.02)
    boxes = words(figure)
    assert len(boxes) > 20
    width, height = figure.bbox.size
    for text, box in boxes.items():
        assert 0 <= box.x0 < box.x1 <= width, text
        assert 0 <= box.y0 < box.y1 <= height, text
    pairs = [(a, b) for a in boxes for b in boxes if a < b and boxes[a].overlaps(boxes[b])]
    assert pairs == []


def words(figure: Figure) -> dict[tuple[str, int], Any]:
    """Where every text is that is drawn: ticks outside the limits have labels, too, but are not drawn."""
    figure.draw_without_rendering()
    hidden = {label for axes in figure.axes for label in undrawn(axes.xaxis) | undrawn(axes.yaxis)}
    found = [one for one in figure.findobj(Text) if one.get_text() and one.get_visible() and one not in hidden]
    return {(one.get_text(), index): one.get_window_extent() for index, one in enumerate(found)}


def undrawn(axis: Axis) -> set[Text]:
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
    return {label for tick in ticks for label in (tick.label1, tick.label2)}
