"""``driftpoint top``: screens of exactly the terminal's size, the trace as it grows, and a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.screen import Screen

from deploy.health.facts import Facts
from deploy.health.trace_reader import Tail
from deploy.top.app import FactsPoller, FactsReader
from deploy.top.view import Dashboard, Freshness, layer_rows
from store.trace import DecisionLine
from tests.support.cli import Here, environment
from tests.support.processes import holding_lock
from tests.support.seen_runs import SeenRun
from tests.support.stores import FakeLayer, flip_byte


@pytest.fixture
def run(tmp_path: Path) -> SeenRun:
    return many_layers(tmp_path)


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> SeenRun:
    """One that no test changes."""
    return many_layers(tmp_path_factory.mktemp("still"))


def many_layers(folder: Path) -> SeenRun:
    made = SeenRun(folder / "store", layers=126)
    made.save(580)
    made.save(590, layers=("layers.3",))
    return made


def facts_of(run: SeenRun) -> Facts:
    return FactsReader(run.root, run.trace, run.root.parent).read()


def screen_lines(facts: Facts, width: int = 100, height: int = 30, freshness: Freshness | None = None) -> list[str]:
    """What a terminal of this size shows."""
    console = Console(width=width, height=height)
    screen = Screen(Dashboard(facts, freshness or Freshness()))
    return ["".join(segment.text for segment in line) for line in console.render_lines(screen)]


def screen_text(facts: Facts, freshness: Freshness | None = None) -> str:
    return "\n".join(screen_lines(facts, freshness=freshness))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (60, 16), (120, 12), (40, 8), (20, 5), (300, 200)])
def test_a_screen_is_as_large_as_the_terminal(still: SeenRun, width: int, height: int) -> None:
    lines = screen_lines(facts_of(still), width, height)
    assert len(lines) == height
    assert {cell_len(line) for line in lines} == {width}


def layers_in(lines: list[str]) -> list[str]:
    heading = next(i for i, line in enumerate(lines) if line.startswith("layer "))
    return [line.split()[0] for line in lines[heading + 1 : -1] if line.strip()]


def test_the_layers_that_moved_most_are_shown_where_not_all_fit(run: SeenRun) -> None:
    moved = {"layers.77": 0.9, "lm_head": 0.8, "layers.3": 0.7}
    run.lines.clear()
    run.tell(DecisionLine(step=610, seconds=610.0, commits=2, drift=[moved.get(one.layer, 0.01) for one in run.traced]))
    facts = facts_of(run)
    lines = screen_lines(facts, 80, 24)
    shown = layers_in(lines)
    assert shown[:3] == list(moved) and len(shown) < 24
    assert f"{len(shown)} of 129 layers, largest drift first" in lines[-1]
    assert any(line.startswith("layers.77") and "0.900" in line for line in lines)
    lines = screen_lines(facts, 80, 200)
    assert layers_in(lines)[:2] == ["embed_tokens", "layers.0"] and "129 of 129 layers ·" in "".join(lines)
    lines = screen_lines(facts, 80, 24, Freshness("gone", 20.0))
    assert layers_in(lines) == shown[: len(layers_in(lines))] and "Ctrl-C to quit" in lines[-1]


def test_once_prints_all_layers_and_leaves(here: Here, still: SeenRun) -> None:
    answer = here("top", still.root, "--once", "--memory", still.root.parent, columns=100)
    assert answer.code == 0
    assert answer.out.count("layers.") >= 126 and " SAFE " in answer.out
    assert max(map(len, answer.out.splitlines())) <= 100
    assert here("top", still.root).out.count("layers.") >= 126, "stdout is no terminal"


def test_json_has_ages_and_drift_of_every_layer(here: Here, still: SeenRun) -> None:
    answer = here("top", still.root, "--json").json
    found = {row["layer"]: row["slots"] for row in answer["layers"]}
    assert len(found) == 129
    assert found["layers.3"]["fp32"] == {"age": 0, "drift": 0.01, "state": "fresh"}
    assert found["layers.4"]["fp32"] == {"age": 10, "drift": 0.01, "state": "stale"}


def test_ages_grow_while_the_job_trains(still: SeenRun) -> None:
    with holding_lock(still.root):
        facts = facts_of(still)
    row = next(one for one in layer_rows(facts, ["fp32"]) if one.layer == "layers.4")
    assert row.slots["fp32"].age == 20, "up to the next decision, long ago"


def test_damage_is_told_and_its_code_returned(here: Here, run: SeenRun) -> None:
    flip_byte(run.store.manifest(run.save(600)), 50)
    answer = here("top", run.root, "--once")
    assert (answer.code, " NEEDS A LOOK " in answer.out) == (12, True)
    flip_byte(run.root / "STORE.json", 20)
    answer = here("top", run.root, "--once")
    assert (answer.code, " NOT SAFE " in answer.out) == (13, True)


def test_hostile_names_reach_no_terminal(here: Here, tmp_path: Path) -> None:
    run = SeenRun(tmp_path / "store", [FakeLayer("a\x1b[2Jb"), FakeLayer("[red]c"), FakeLayer("d\ne")])
    run.save(600)
    out = here("top", run.root, "--once").out
    assert "\x1b" not in out and "[red]c" in out
    assert r"a\x1b[2Jb" in out and r"d\ne" in out


def test_a_reader_sees_what_is_new_and_reads_nothing_twice(run: SeenRun) -> None:
    reader = FactsReader(run.root, run.trace, run.root.parent)
    first, again = reader.read(), reader.read()
    assert first.status is not None and again.status is not None
    assert again.status.resume is first.status.resume
    save = run.save(600)
    found = reader.read()
    assert found.newest is not None and found.newest.save == save
    assert found.job_status is not None and found.job_status.newest is not None and found.job_status.newest.step == 600


@pytest.mark.parametrize("end", [1 << 22, 20_000, 3000, 1])
def test_the_end_of_a_trace_tells_what_all_of_it_does(tmp_path: Path, end: int) -> None:
    run = SeenRun(tmp_path / "store")
    for step in range(10, 1000, 10):
        run.save(step) if step % 100 == 0 else run.decide(step)
    whole, part = Tail(run.trace).look(), Tail(run.trace, end).look()
    assert whole is not None and part is not None
    assert part.job == whole.job and part.full_bytes == whole.full_bytes
    if end > 1:
        assert part.newest == whole.newest
    assert len(part.decisions) == (64 if end > 20_000 else len(part.decisions))


def test_a_tail_reads_what_is_appended_torn_lines_and_a_new_file(tmp_path: Path) -> None:
    run = SeenRun(tmp_path / "store")
    run.save(10)
    tail = Tail(run.trace)
    first = tail.look()
    assert first is not None and first.newest is not None and first.newest.step == 10
    run.decide(20)
    whole = run.trace.read_bytes()
    run.trace.write_bytes(whole[:-30])
    assert last_step(tail) == 10, "the last line is being written"
    with run.trace.open("ab") as file:
        file.write(whole[-30:])
    assert last_step(tail) == 20
    run.trace.unlink()
    assert tail.look() is None and "No such file" in tail.trouble
    run.trace.write_bytes(whole)
    assert last_step(tail) == 20


def last_step(tail: Tail) -> int:
    found = tail.look()
    assert found is not None and found.newest is not None
    return found.newest.step


class Terminal:
    """A real one, with a program in it."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process, self._descriptor = process, descriptor
        self.screen = ""

    def wait_for(self, pattern: str, seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.screen):
            assert time.monotonic() < deadline, f"{pattern} never came: {self.screen[-3000:]}"
            if select.select([self._descriptor], [], [], 0.2)[0]:
                try:
                    self.screen += os.read(self._descriptor, 1 << 16).decode("utf-8", "replace")
                except OSError:  # the other side is closed
                    assert re.search(pattern, self.screen), self.screen[-3000:]

    def attributes(self) -> list[object]:
        return termios.tcgetattr(self._descriptor)


@contextmanager
def terminal(*args: object) -> Iterator[Terminal]:
    """``driftpoint ARGS`` in a terminal of 80 columns and 24 lines."""
    outer, inner = pty.openpty()
    ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    variables = {key: value for key, value in environment().items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", *map(str, args)],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env={**variables, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    try:
        yield Terminal(process, outer)
    finally:
        process.kill()
        process.wait()
        os.close(outer)
        os.close(inner)


@pytest.mark.slow
def test_in_a_terminal(run: SeenRun) -> None:
    with terminal("top", run.root, "--interval", "0.2", "--memory", run.root.parent) as seen:
        before = seen.attributes()
        seen.wait_for(r"\d+ of 129 layers")
        run.save(600)
        seen.wait_for("step 600")
        seen.process.send_signal(signal.SIGINT)
        assert seen.process.wait(180) == 0
        assert seen.attributes() == before, "the terminal is given back as it was"


def test_a_store_that_goes_away_is_told_and_what_was_seen_stays(run: SeenRun) -> None:
    poller = FactsPoller(FactsReader(run.root, run.trace, run.root.parent), 0.05)
    try:
        until(lambda: poller.latest.facts is not None)
        away = run.root.rename(run.root.with_name("away"))
        until(lambda: bool(poller.latest.trouble))
        assert poller.latest.facts is not None
        told = screen_text(poller.latest.facts, Freshness(poller.latest.trouble, age=20.0))
        assert "As of 20 s ago:" in told
        assert " OUTDATED " in told and " SAFE " not in told
        away.rename(run.root)
        until(lambda: not poller.latest.trouble)
    finally:
        poller.stop()
    assert poller.error is None


def test_looks_that_are_far_apart_are_not_old(still: SeenRun) -> None:
    facts = facts_of(still)
    assert " SAFE " in screen_text(facts, Freshness(age=59.0, patience=90.0))
    assert "does not answer" in screen_text(facts, Freshness(age=91.0, patience=90.0))


def test_letters_that_take_two_columns(tmp_path: Path) -> None:
    run = SeenRun(tmp_path / "store", [FakeLayer("層" * 30), FakeLayer("plain")])
    run.save(600)
    wide, narrow = (line.rstrip() for line in screen_lines(facts_of(run), 80, 40) if line.startswith(("…層", "plain")))
    assert "層" in wide and cell_len(wide) == cell_len(narrow)


def test_a_trace_that_was_named_and_is_not_there(here: Here, still: SeenRun) -> None:
    answer = here("top", still.root, "--once", "--trace", still.root / "nothing")
    assert (answer.code, answer.out) == (2, "") and "there is no trace at" in answer.err


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
