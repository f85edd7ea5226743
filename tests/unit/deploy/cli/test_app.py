"""What all commands share: codes, errors, JSON, interruption, and what they may import."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import store.errors
from deploy import store_status
from deploy.cli.app import app
from deploy.exit_codes import EPILOG, MEANINGS
from tests.support.cli import ROOT, Here, driftpoint, environment
from tests.support.stores import StoreBuilder

BESIDE = ("daemon run", "daemon status", "daemon stop", "memory", "memory clear")
"""What is about a node instead of a store."""

BEFORE = ("init", "schema", "doctor")
"""What comes before there is a store."""

OTHERS = ("run", "simulate", "estimate")

COMMANDS = {
    "status": (),
    "show": (),
    "verify": (),
    "rescue": (),
    "merge": ("--out", "/nowhere/out"),
    "export": ("me/model",),
    "import": ("--store", "/nowhere/store"),
    "prune": ("--dry-run",),
    "report": ("--out", "/nowhere/page.html"),
}
WITHOUT_TORCH = ("status", "show", "verify", "prune", "report")

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "deepspeed", "transformers", "monitor"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
sys.argv[0] = "driftpoint"
from deploy.cli.app import main
main()
"""


@pytest.fixture
def builder(tmp_path: Path) -> StoreBuilder:
    return StoreBuilder(tmp_path / "store")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A store whose ``show --json`` is far larger than a pipe holds."""
    builder = StoreBuilder(tmp_path / "large", layers=400, world_size=1)
    builder.save(10)
    return builder.root


@pytest.mark.parametrize("command", WITHOUT_TORCH)
def test_torch_is_not_imported(builder: StoreBuilder, command: str) -> None:
    builder.save(10)
    arguments = [sys.executable, "-c", BLOCKED, command, str(builder.root), "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment(), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "error" not in json.loads(done.stdout)


def test_the_blocker_blocks(builder: StoreBuilder, tmp_path: Path) -> None:
    builder.save(10)
    arguments = [sys.executable, "-c", BLOCKED, "merge", str(builder.root), "--out", str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1
    assert "torch is blocked" in done.stderr


def test_help_imports_neither_torch_nor_the_merger() -> None:
    code = "import sys, deploy.cli.app; print(sorted({n.partition('.')[0] for n in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert not {"torch", "merger", "monitor", "deepspeed"} & set(eval(done.stdout))


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_are_one_line_on_stderr(here: Here, tmp_path: Path, command: str) -> None:
    answer = here(command, tmp_path, *COMMANDS[command])
    assert (answer.code, answer.out) == (10, "")
    assert re.fullmatch(r"error: [^\n]* it has no STORE\.json[^\n]*\n", answer.err)


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_as_json(here: Here, tmp_path: Path, command: str) -> None:
    answer = here(command, tmp_path, *COMMANDS[command], "--json")
    assert (answer.code, answer.err) == (10, "")
    assert answer.json.keys() == {"error"}
    assert answer.json["error"]["type"] == "NoStoreError"
    assert str(tmp_path) in answer.json["error"]["message"]


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_usage(here: Here, tmp_path: Path, command: str) -> None:
    for args in ((command,), (command, tmp_path, "--nonsense"), (command, tmp_path, "1", "2", "3")):
        answer = here(*args)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith("error: ") and answer.err.endswith(f"see `driftpoint {command} --help`\n")
        found = here(*args, "--json")
        assert (found.code, found.json["error"]["type"]) == (2, "UsageError")


def test_an_unknown_command(here: Here) -> None:
    assert here("nonsense").code == 2
    assert "nonsense" in here("nonsense", "--json").json["error"]["message"]


def test_no_command_shows_the_help(here: Here) -> None:
    answer = here()
    assert answer.code == 2
    assert "status" in answer.out and "prune" in answer.out


def test_what_follows_two_dashes_is_no_option(here: Here) -> None:
    answer = here("status", "--", "--json")
    assert (answer.code, answer.out) == (10, "")
    assert "--json does not exist" in answer.err


def test_an_unexpected_exception(here: Here, builder: StoreBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(root: Path) -> None:
        raise ZeroDivisionError("twice\nover")

    monkeypatch.setattr(store_status, "open_store", broken)
    answer = here("status", builder.root)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == (
        "error: internal ZeroDivisionError: twice over (run it again with --debug to see the traceback)\n"
    )
    assert here("status", builder.root, "--json").json["error"]["type"] == "ZeroDivisionError"
    debug = here("status", builder.root, "--debug")
    assert debug.err.startswith("Traceback (most recent call last):\n")
    assert "in broken\n" in debug.err


def test_ctrl_c(here: Here, builder: StoreBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_status, "open_store", lambda root: signal.raise_signal(signal.SIGINT))
    answer = here("status", builder.root)
    assert (answer.code, answer.out, answer.err) == (130, "", "interrupted\n")


def test_ctrl_c_in_a_process_of_its_own(large: Path) -> None:
    with _writing(large) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=180) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b"interrupted\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_leaves(large: Path, monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with _writing(large) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=180) == 141
        assert process.stderr.read() == b""


def test_a_reader_who_leaves_before_an_error(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "deploy.cli", "status", str(tmp_path), "--json"]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=environment(), check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


@contextmanager
def _writing(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A ``show`` that is stuck in writing, because the pipe to us is full and nobody reads."""
    command = [sys.executable, "-m", "deploy.cli", "show", str(root), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        room = fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ)
        deadline = time.monotonic() + 180
        while _waiting(process.stdout.fileno()) < room:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        try:
            yield process
        finally:
            process.kill()


def _waiting(descriptor: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0])


def test_text_that_the_terminal_has_no_characters_for(builder: StoreBuilder) -> None:
    builder.save(10)
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "show", str(builder.root)],
        capture_output=True,
        env={**environment(), "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_version() -> None:
    answer = driftpoint("--version")
    assert answer.code == 0
    assert re.fullmatch(r"driftpoint \S.*\n", answer.out)


def test_exit_codes_are_those_of_the_errors() -> None:
    kinds = [kind for kind in vars(store.errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {kind.exit_code for kind in kinds if hasattr(kind, "exit_code")} <= MEANINGS.keys()
    assert list(MEANINGS) == [0, 1, 2, 10, 11, 12, 13, 75, 93, 130]


@pytest.mark.parametrize(
    "command",
    [
        (),
        *((command,) for command in (*COMMANDS, *BEFORE, "run")),
        *(tuple(words.split()) for words in BESIDE),
        ("simulate",),
        ("estimate",),
        ("daemon",),
    ],
)
def test_help_ends_with_the_exit_codes(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert EPILOG in " ".join(result.stdout.split())


def _commands(group: Any, words: str = "") -> dict[str, Any]:
    """Every command below a group, by the words that call it."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        below = hasattr(command, "commands")
        found |= _commands(command, f"{words}{name} ") if below else {}
        if not below or command.invoke_without_command:
            found[f"{words}{name}"] = command
    return found


def test_every_command_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    sections = {
        found[1]: found[2] for found in re.finditer(r"^## `([a-z ]+[a-z]).*?`\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    }
    commands = _commands(typer.main.get_command(app))
    assert sections.keys() == commands.keys() == {*COMMANDS, *BEFORE, *OTHERS, *BESIDE}
    for name, command in commands.items():
        for parameter in command.params:
            for option in [*parameter.opts, *parameter.secondary_opts]:
                word = f"`{option}" if option.startswith("-") else f"`{parameter.metavar or option.upper()}"
                assert word.replace("[", "").replace("]", "") in sections[name] + _common(text), (name, option)
    for code, meaning in MEANINGS.items():
        assert f"| {code} | {meaning}" in text


def _common(text: str) -> str:
    """What is said once for all commands, before the first one."""
    return text.partition("\n## ")[0]


def test_the_module_runs_as_the_command_does(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "driftpoint", "verify", str(tmp_path / "nowhere")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 10
    assert "does not exist" in done.stderr
