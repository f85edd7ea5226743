"""Runs the real command line: in a process of its own, or in this one where many runs are wanted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.app import run

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout, which must be one JSON value and nothing else."""
        return json.loads(self.out)


def environment(columns: int = 80) -> dict[str, str]:
    """The environment of a command: this checkout first, a given width."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": paths, "COLUMNS": str(columns)}


def driftpoint(*args: object, columns: int = 80) -> Answer:
    """``driftpoint ARGS`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *map(str, args)],
        capture_output=True,
        text=True,
        env=environment(columns),
        timeout=180,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


class Here:
    """``driftpoint ARGS`` in this process, for tests that run it often."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *args: object, columns: int = 80) -> Answer:
        self._monkeypatch.setenv("COLUMNS", str(columns))
        self._capsys.readouterr()
        code = run([str(arg) for arg in args])
        out, err = self._capsys.readouterr()
        return Answer(code, out, err)
