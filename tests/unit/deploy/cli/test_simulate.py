from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.simulate.simulation import read_trace
from store.names import WEIGHTS, Unit
from store.trace import Trace
from tests.support.cli import Here
from tests.support.traces import Mover, power, trace_of, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four layers, of which one moves ten times as fast as the others; a decision every 10 s."""
    movers = [
        Mover(Unit(f"layers.{i}", slot), 1 << 20, power(1e-2 if i == 0 else 1e-3, 0.75), i)
        for i in range(4)
        for slot in (WEIGHTS, "exp_avg")
    ]
    return write_trace(trace_of(movers, range(10, 2001, 10), every=10), tmp_path / "store.trace.jsonl")


def by_name(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in answer["configurations"]}


def test_a_row_for_each_configuration_in_three_tables(here: Here, trace: Path) -> None:
    answer = here("simulate", trace, "--policy", "{name: parity, k: 4}", "-p", "{policy: full, every: 40}")
    assert answer.code == 0
    for name in ("full, raw", "parity k=4", "full every=40"):
        assert sum(line.startswith(name) for line in answer.out.splitlines()) == 3
    assert "200 decisions, steps 10 to 2000" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


def test_json_says_what_the_tables_do(here: Here, trace: Path) -> None:
    shown = here("simulate", trace, "-p", "{name: parity, k: 4}", "-p", "{policy: full, every: 40}", "--json").json
    assert shown["assumed"] is None
    rows = by_name(shown)
    full, parity, seldom = rows["full, raw"], rows["parity k=4"], rows["full every=40"]
    assert (full["saves"], full["bytes"], full["bytes_of_full"]) == (200, 200 * 8 << 20, 1.0)
    assert (seldom["saves"], parity["saves"]) == (50, 200)
    assert parity["bytes"] == (8 << 20) + 199 * (2 << 20)
    assert parity["bytes_saved"] == full["bytes"] - parity["bytes"]
    # All are looked at from the first commit of the one that comes latest, to the last decision.
    assert shown["compared"] == {"from_step": 40, "to_step": 2000}
    assert [one["unprotected_steps"] for one in (full, parity, seldom)] == [10, 10, 40]
    assert full["lost_steps"]["mean"] == pytest.approx(5) and seldom["lost_steps"]["mean"] == pytest.approx(20)
    assert parity["staleness"]["worst"] == 40
    assert [one["mtbf_hours"] for one in full["goodput"]] == [3, 12, 48]
    assert full["goodput"][0]["price"] is None
    assert (shown["decisions"], shown["world_size"], shown["step_seconds"]) == (200, 1, pytest.approx(1.0))


def test_what_is_compared_over_few_steps_or_hardly_saves_is_told(here: Here, trace: Path) -> None:
    answer = here("simulate", trace, "-p", "{policy: full, every: 1500}")
    told = " ".join(answer.out.split())
    assert "over steps 1500 to 2000, from where all have a commit" in told
    assert "full every=1500: commits once in this run" in told
    assert "compared over 500 of 2000 steps only: full every=1500 has its first commit at step 1500" in told
    answer = here("simulate", trace, "-p", "{policy: full, every: 3000}")
    assert answer.code == 0 and "full every=3000: commits never" in " ".join(answer.out.split())
    assert "no commit" in answer.out
    row = by_name(here("simulate", trace, "-p", "{policy: full, every: 3000}", "--json").json)["full every=3000"]
    assert row["damage"]["mean"] is None and row["unprotected_steps"] == 2000
    assert all(one["share"] == 0 for one in row["goodput"])


def test_where_the_newest_is_resumed_steps_are_lost_since_that(here: Here, trace: Path) -> None:
    parity = "policy: {name: parity, k: 4}"
    shown = here("simulate", trace, "-p", f"{{{parity}}}", "-p", f"{{{parity}, resume: {{at: newest}}}}", "--json").json
    _, back, on = shown["configurations"]
    assert on["lost_steps"] == back["lost_steps"] and on["damage"] == back["damage"]
    assert on["rewound_steps"] == on["lost_steps"] and back["rewound_steps"]["mean"] > back["lost_steps"]["mean"]
    assert on["goodput"][0]["share"] > back["goodput"][0]["share"]


def test_a_yaml_file_is_a_whole_configuration(here: Here, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "thrifty.yaml"
    path.write_text("every: 20\npolicy: budget\nencoding: compact\nbudget: {bytes_per_hour: 1.0e+9}\n")
    row = by_name(here("simulate", trace, "-p", path, "--json").json)["thrifty"]
    assert row["saves"] > 1 and row["bytes"] < 1.2e9 * 2000 / 3600 + (8 << 20)


def test_money(here: Here, trace: Path) -> None:
    answer = here(
        "simulate", trace, "--price-per-gpu-hour", 2, "--price-per-tb-written", 100, "--mtbf", 6, "--json"
    ).json
    (found,) = answer["configurations"][0]["goodput"]
    row = answer["configurations"][0]
    wasted = (1 - found["share"]) * answer["hours"] * 2
    assert found["price"] == pytest.approx(wasted + row["bytes"] / 1e12 * 100)
    assert "price" in here("simulate", trace, "--price-per-gpu-hour", 2).out


def test_how_fast_storage_is_can_be_given(here: Here, trace: Path) -> None:
    slow = here("simulate", trace, "--storage-gbps", 0.001, "--json").json
    quick = here("simulate", trace, "--storage-gbps", 10, "--json").json
    assert by_name(slow)["full, raw"]["lost_steps"]["mean"] > by_name(quick)["full, raw"]["lost_steps"]["mean"] + 5
    told = "save durations are unknown"
    assert told not in " ".join(quick["notes"]) and told in " ".join(here("simulate", trace, "--json").json["notes"])
    waits = by_name(here("simulate", trace, "--copy-gbps", 0.01, "--json").json)["full, raw"]
    assert waits["stall_seconds"] == pytest.approx(200 * (8 << 20) / 1e7)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--recommend",), "No such option: --recommend"),
        (("-p", "fulll"), "did you mean 'full'"),
        (("-p", "budget"), "policy budget has no limit"),
        (("-p", "{name: parity"), "is not YAML"),
        (("-p", "[1]"), "unknown policy"),
        (("--gpus", 8), "No such option: --gpus"),
        (("--model", "llama-8b"), "No such option: --model"),
        (("--storage-gbps", 0), "above 0"),
        (("--mtbf", 0), "above 0"),
    ],
)
def test_what_cannot_be_done_is_one_line(here: Here, trace: Path, options: tuple[object, ...], told: str) -> None:
    answer = here("simulate", trace, *options)
    assert (answer.code, answer.out) == (2, "")
    assert told in answer.err and len(answer.err.splitlines()) == 1


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    "option", ["--restart-seconds", "--price-per-gpu-hour", "--price-per-tb-written", "--storage-gbps", "--copy-gbps"]
)
def test_so_are_those_that_go_with_a_trace(here: Here, trace: Path, option: str, value: str) -> None:
    answer = here("simulate", trace, option, value)
    assert (answer.code, answer.out) == (2, "")
    assert option in answer.err and len(answer.err.splitlines()) == 1


def test_files_that_are_no_traces(here: Here, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello\n")
    assert "is not a drift trace" in here("simulate", text).err
    assert "cannot read the trace" in here("simulate", tmp_path / "nowhere").err
    assert "Missing argument 'TRACE'" in here("simulate").err
    empty = write_trace(Trace(trace_of([], [1, 2], ()).lines[:1], 0), tmp_path / "empty")
    assert "holds no decision yet" in here("simulate", empty).err


def test_torn_lines_are_told(here: Here, trace: Path) -> None:
    with trace.open("ab") as file:
        file.write(b'{"kind": "decis')
    assert "1 lines of the trace are torn" in " ".join(here("simulate", trace, "--json").json["notes"])


def test_a_trace_that_is_too_coarse_is_told(here: Here, trace: Path) -> None:
    notes = " ".join(here("simulate", trace, "-p", "{policy: full, every: 3}", "--json").json["notes"])
    assert "every 3 is replayed as 10" in notes
    notes = " ".join(here("simulate", trace, "-p", "{policy: full, every: 25}", "--json").json["notes"])
    assert "not a multiple of the 10 steps" in notes


def test_the_same_again(here: Here, trace: Path) -> None:
    one, other = (here("simulate", trace, "-p", "{name: parity, k: 4}", "--json").out for _ in range(2))
    assert one == other and json.loads(one)


def test_a_trace_runs_no_code(here: Here, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    movers = [Mover(Unit("layers.0", WEIGHTS), 1 << 20, power(1e-3, 1.0))]
    for policy in (f"{own}:Mine", {"name": f"{own}:Mine"}, {"name": "observe", "inner": f"{own}:Mine"}):
        trace = write_trace(trace_of(movers, range(10, 101, 10), every=10, policy=policy), tmp_path / "trace")
        answer = here("simulate", trace, "-p", "{every: 20}", "--json")
        assert answer.code == 0 and "must not run code" in " ".join(answer.json["notes"])
    assert not (tmp_path / "ran").exists()


def test_a_policy_of_ones_own_is_replayed_where_it_is_named(here: Here, trace: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from dataclasses import dataclass\n"
        "from policies.base import Choice, Decision\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Mine:\n"
        "    @property\n    def name(self):\n        return 'mine'\n\n"
        "    @property\n    def needs_drift(self):\n        return False\n\n"
        "    def select(self, stats, budget, history):\n"
        "        save = 'raw' if history.step % 50 == 0 else None\n"
        "        return Decision({one.unit: Choice(save, 'every fifth time') for one in stats})\n"
    )
    shown = here("simulate", trace, "-p", f"{own}:Mine", "--json").json
    assert shown["configurations"][1]["saves"] == 1 + 2000 // 50


@pytest.mark.parametrize("fails", ["raise ValueError('x')", "import sys; sys.exit(0)", "return None"])
def test_where_a_policy_fails_everything_is_saved_as_live(here: Here, trace: Path, tmp_path: Path, fails: str) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from policies.base import Choice, Decision\n\n\n"
        "class Mine:\n"
        "    name = 'mine'\n    needs_drift = False\n\n"
        "    def select(self, stats, budget, history):\n"
        f"        if history.step % 100 == 0:\n            {fails}\n"
        "        return Decision({one.unit: Choice(None, 'never') for one in stats})\n"
    )
    answer = here("simulate", trace, "-p", f"{own}:Mine")
    told = " ".join(answer.out.split())
    assert answer.code == 0 and "the policy failed at 20 of 200 decisions" in told and "as in a job" in told
    row = here("simulate", trace, "-p", f"{own}:Mine", "--json").json["configurations"][1]
    # The first save, which every policy has to make, and one at each failure.
    assert (row["policy_failures"], row["saves"], row["bytes"]) == (20, 21, 21 * 8 << 20)


def test_a_policy_that_is_not_run_is_not_called_as_recorded(here: Here, tmp_path: Path) -> None:
    movers = [Mover(Unit("layers.0", WEIGHTS), 1 << 20, power(1e-3, 1.0))]
    trace = write_trace(trace_of(movers, range(10, 101, 10), every=10, policy="own.py:Mine"), tmp_path / "trace")
    answer = here("simulate", trace)
    assert answer.code == 0 and "as recorded" not in answer.out
    assert "full, for the recorded policy" in answer.out and "replay differs from the recording" not in answer.out


def test_what_an_observed_run_tells_of_stall_is_said(here: Here, trace: Path, tmp_path: Path) -> None:
    lines = read_trace(trace).lines
    job = lines[0].model_copy(update={"observing": True})
    seen = write_trace(Trace((job, *lines[1:]), 0), tmp_path / "observed")
    told = "stall is that of measuring alone"
    assert told in " ".join(here("simulate", seen, "--json").json["notes"])
    assert told not in " ".join(here("simulate", trace, "--json").json["notes"])


def test_an_interval_that_varied_is_replayed_as_it_was(here: Here, tmp_path: Path) -> None:
    movers = [Mover(Unit(f"layers.{i}", WEIGHTS), 1 << 20, power(1e-3, 0.75), i) for i in range(4)]
    steps = [*range(10, 100, 10), *range(100, 501, 40)]
    auto = {"every": "auto", "auto": {"max_loss_minutes": 5}}
    trace = write_trace(trace_of(movers, steps, **auto), tmp_path / "trace")
    shown = here("simulate", trace, "-p", "full", "-p", "{every: 40}", "--json").json
    assert [one["saves"] for one in shown["configurations"]] == [len(steps), len(steps), 12]


def test_layer_slots_without_movement_are_named(here: Here, trace: Path) -> None:
    def cut(line: str) -> str:
        content = json.loads(line)
        if content["kind"] == "moved":
            content["since"] = {at: [None, *values[1:]] for at, values in content["since"].items()}
        return json.dumps(content) + "\n"

    assert "left out" not in here("simulate", trace, "--policy", "full").out
    trace.write_text("".join(map(cut, trace.read_text().splitlines())))
    answer = here("simulate", trace, "--policy", "full")
    text = " ".join(answer.out.split())
    assert f"full, raw: {Unit('layers.0', WEIGHTS)}: the trace of a job has no distance from an earlier version" in text
