"""The comparison with peers, and the growth of costs: the arithmetic, and a run of two that need no installation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import flip, flipped, places
from benchmarks.peers_environment import last_line, python_for
from benchmarks.peers_savers import SAVERS
from benchmarks.peers_table import figures, outcome_of_kill, outcome_of_load, page, reduced, wins_of_others
from benchmarks.scaling import commit_figures, rank_figures, tensor_figures

ROOT = Path(__file__).parents[3]
DIGESTS = {"5": "aa", "7": "bb"}


def told(**other: Any) -> dict[str, Any]:
    train = {
        "stall": [0.001, 0.003],
        "total": [1.3, 1.7],
        "steps": [4, 4],
        "slowest": [0.4, 0.5],
        "step": [0.3, 0.4],
        "durable": [1.0, 3.0],
        "floor": [1.0, 2.0],
        "version": "it 1",
        "bytes": 100,
        "tensors": 3,
    }
    seen = {"train": [train], "load": [0.5], "memory": [150], "flips": ["found", "found"], "kills": []}
    return {**seen, **other}


def row(**other: Any) -> dict[str, Any]:
    return {**reduced(told()), **other}


def test_a_save_is_compared_with_the_plain_steps_beside_it() -> None:
    found = reduced(told())
    assert found["stall"] == pytest.approx(2.0)
    assert found["lost"] == pytest.approx(((1.3 / 0.3 - 4) + (1.7 / 0.4 - 4)) / 2)
    assert found["slowest"] == pytest.approx((0.4 / 0.3 + 0.5 / 0.4) / 2)
    assert found["durable"] == pytest.approx(1.25)
    assert found["memory"] == pytest.approx(1.5)
    assert (found["flip"], found["kill"]) == ("2 × found", "not tried")


def test_outcomes_of_a_damaged_load() -> None:
    assert outcome_of_load({"refused": "CRC"}, DIGESTS) == "found"
    assert outcome_of_load({"step": 7, "digest": "bb"}, DIGESTS) == "harmless"
    assert outcome_of_load({"step": 7, "digest": "aa"}, DIGESTS) == "loaded silently"


@pytest.mark.parametrize(
    ("newer", "older", "outcome"),
    [
        ({"refused": "torn"}, {"step": 5, "digest": "aa"}, "older intact, newer refused"),
        ({"step": 5, "digest": "aa"}, {"step": 5, "digest": "aa"}, "older intact, newer refused"),
        ({"step": 7, "digest": "bb"}, {"step": 5, "digest": "aa"}, "older intact, newer complete"),
        ({"step": 7, "digest": "cc"}, {"step": 5, "digest": "aa"}, "torn state loaded"),
        ({"refused": "torn"}, {"refused": "gone"}, "older lost"),
    ],
)
def test_outcomes_of_a_kill(newer: dict[str, Any], older: dict[str, Any], outcome: str) -> None:
    assert outcome_of_kill([newer, older], DIGESTS) == outcome


def test_where_others_win_is_told_worst_first() -> None:
    rows = {
        "driftpoint": row(stall=4.0, load=0.2, memory=3.0),
        "a": row(stall=1.0, load=0.4, memory=2.0),
        "b": row(stall=2.0, load=0.3, memory=2.5),
    }
    found = [(column.key, best, times) for column, best, times in wins_of_others(rows)]
    assert found == [("stall", "a", 4.0), ("memory", "a", 1.5)]


def test_ours_has_the_goals() -> None:
    rows = {"driftpoint": row(stall=4.0, load=0.2, lost=0.5), "dcp": row(stall=1.0, load=0.4, lost=0.25)}
    goals = {figure.name: figure for figure in figures(rows) if figure.goal is not None}
    assert not goals["stall, driftpoint"].holds
    assert not goals["time lost"].holds
    assert goals["time lost"].value == pytest.approx(2.0)
    assert goals["load"].holds
    assert "stall, dcp" not in goals


def test_the_page_begins_with_what_others_do_better_and_says_why_a_row_is_missing() -> None:
    rows = {"driftpoint": row(stall=4.0), "a": row(stall=1.0)}
    text = page(
        rows, {"b": "not installed: no such thing"}, dict.fromkeys(("command", "machine", "rounds", "note"), "x")
    )
    assert text.index("## Where others win") < text.index("| stall | 4 ms | 1 ms, a | 4 × |") < text.index("## All")
    assert "| b | not installed: no such thing |" in text
    table = [line for line in text[text.index("## All") : text.index("## Goals")].splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1


def test_a_flipped_byte_is_one_byte_of_the_largest_file_and_is_undone_by_another_flip(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"abc")
    (tmp_path / "large").write_bytes(bytes(1000))
    found = flipped(tmp_path, places(3)[1])
    data = found.read_bytes()
    assert (found.name, sum(byte != 0 for byte in data), data[500] != 0) == ("large", 1, True)
    flip(found, places(3)[1])
    assert found.read_bytes() == bytes(1000)


def test_what_needs_nothing_runs_where_the_benchmark_does(tmp_path: Path) -> None:
    assert python_for((), tmp_path / "none") == Path(sys.executable)
    assert not (tmp_path / "none").exists()
    assert last_line("a\nERROR: no\n\n") == "ERROR: no"


def test_growth_is_held_against_the_fewest_commits() -> None:
    one = {"seconds": [0.01], "wall": [0.02], "calls": [40]}
    found = commit_figures({"10": one, "1000": {"seconds": [0.011], "wall": [0.02], "calls": [400]}})
    goals = {figure.against: figure for figure in found if figure.goal is not None}
    assert goals["processor time at 10"].holds
    assert not goals["calls at 10"].holds
    assert goals["calls at 10"].value == pytest.approx(10)


def test_goals_of_tensors_and_ranks() -> None:
    names = ("attach", "resume", "attach_wall", "resume_wall", "torch", "dcp")
    lists = {"decision": [0.002], "observed": [0.001], "passes": [0, 1], "passing": [0.0, 0.2]}
    found = tensor_figures(110, {**dict.fromkeys(names, 1.0), **lists})
    assert [figure.value for figure in found if "passes" in figure.name] == [0.5, 0.1]
    assert [(figure.value, figure.holds) for figure in found if figure.goal is not None] == [(0.002, False)]
    ranks = [{"collectives": [1, 1, 6], "seconds": [0.1], "inside": [0.1], "kinds": {"all_reduce": 1}}] * 2
    assert [figure.holds for figure in rank_figures(2, ranks) if figure.goal is not None] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["torch.save", "driftpoint"])
def test_a_tiny_run_of_those_that_need_no_installation(peer: str, tmp_path: Path) -> None:
    assert not SAVERS[peer].requirements
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--only", peer, "--megabytes", "2"]
    command += ["--seconds", "0.01", "--rounds", "1", "--saves", "1", "--tries", "1", "--dir", str(tmp_path)]
    command += ["--page", str(tmp_path / "page.md"), "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr  # 1: a goal is missed, as times may be here
    assert "NOT MEASURED" not in done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert {f"stall, {peer}", f"load, warm, {peer}", f"time to durable, synced, {peer}"} <= {
        one["name"] for one in rows
    }
    assert f"| {peer} (" in (tmp_path / "page.md").read_text()
