from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from store.catalog import open_or_create
from store.storage.local import LocalFiles
from tests.support.cli import Here, environment
from tests.support.processes import holding_lock
from tests.support.stores import StoreBuilder, flip_byte


@pytest.fixture
def builder(tmp_path: Path) -> StoreBuilder:
    return StoreBuilder(tmp_path / "store")


def test_all_as_written(here: Here, builder: StoreBuilder) -> None:
    saves = [builder.save(step) for step in (10, 20, 30)]
    builder.prove(saves[1])
    answer = here("verify", builder.root, "--json")
    assert answer.code == 0
    assert answer.json["ok"]
    assert answer.json["resumable"] == saves[2].name
    assert answer.json["bytes_read"] == 3 * 12 * 456
    assert [(c["save"], c["state"], c["proven"]) for c in answer.json["commits"]] == [
        (saves[2].name, "ok", False),
        (saves[1].name, "ok", True),
        (saves[0].name, "ok", False),
    ]
    text = here("verify", builder.root)
    assert text.code == 0
    assert "3 commits, all intact. 16.0 KiB read." in text.out
    assert re.search(rf"^{saves[2].name} +30 +ok +possible <- next$", text.out, re.MULTILINE)
    assert text.err == ""


def test_a_flipped_byte_is_found_and_a_resume_still_works(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    new = builder.save(20)
    flip_byte(builder.payload(new))
    answer = here("verify", builder.root, "--json")
    assert (answer.code, answer.json["ok"], answer.json["resumable"]) == (12, False, new.name)
    assert [commit["state"] for commit in answer.json["commits"]] == ["fallback", "ok"]
    assert "do not match their hash" in answer.json["problems"][0]
    text = here("verify", builder.root)
    assert text.code == 12
    assert "Damaged, but a resume works from step 20." in text.out
    assert "with older versions <- next" in text.out


def test_a_commit_that_cannot_be_resumed(here: Here, builder: StoreBuilder) -> None:
    old, new = builder.save(10), builder.save(20)
    builder.payload(new, 0).unlink()
    answer = here("verify", builder.root, "--json")
    assert (answer.code, answer.json["resumable"]) == (12, old.name)
    assert [commit["state"] for commit in answer.json["commits"]] == ["damaged", "ok"]
    builder.payload(old, 0).unlink()
    answer = here("verify", builder.root, "--json")
    assert (answer.code, answer.json["resumable"]) == (13, None)
    assert "Nothing to resume: no commit can be resumed." in here("verify", builder.root).out


def test_every_file_of_a_commit_matters(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    new = builder.save(20)
    files = [path for path in builder.root.rglob(f"*{new.name}*") if path.is_file()]
    files.extend((builder.root / "segments" / new.name).iterdir())
    assert len(files) == 5
    for path in files:
        flip_byte(path, 64)
        assert here("verify", builder.root).code == 12, path
        flip_byte(path, 64)
    assert here("verify", builder.root).code == 0


def test_an_empty_store(here: Here, tmp_path: Path) -> None:
    open_or_create(LocalFiles(tmp_path / "store"))
    answer = here("verify", tmp_path / "store")
    assert answer.code == 13
    assert answer.out == "Nothing to resume: the store holds no commit yet. 0 B read.\n"


def test_long_lists_of_problems_are_cut(here: Here, tmp_path: Path) -> None:
    builder = StoreBuilder(tmp_path / "store", layers=30)
    builder.save(10)
    new = builder.save(20)
    payload = builder.payload(new)
    payload.write_bytes(payload.read_bytes()[:4096] + bytes(payload.stat().st_size - 4096))
    everything = here("verify", builder.root, "--json").json["problems"]
    text = here("verify", builder.root).out
    assert len(everything) > 20
    assert text.count("\n - ") == 20
    assert f"… and {len(everything) - 20} more; --json lists all" in text


def test_a_store_in_use_is_verified(here: Here, builder: StoreBuilder) -> None:
    flip_byte(builder.payload(builder.save(10)))
    with holding_lock(builder.root):
        answer = here("verify", builder.root, "--json")
    assert (answer.code, answer.json["in_use"]) == (13, True)


def test_verifying_changes_nothing(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    flip_byte(builder.payload(builder.save(20)))
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in builder.root.rglob("*") if p.is_file()}
    here("verify", builder.root)
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in builder.root.rglob("*") if p.is_file()} == before


def test_a_progress_bar_only_on_a_terminal_and_never_on_stdout(builder: StoreBuilder) -> None:
    builder.save(10)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "deploy.cli", "verify", str(builder.root), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment()) as process:
        os.close(theirs)
        shown = _read_all(ours)
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["ok"]
    assert process.returncode == 0
    assert b"Verifying" in shown


def _read_all(descriptor: int) -> bytes:
    shown = b""
    try:
        while piece := os.read(descriptor, 4096):
            shown += piece
    except OSError:  # Linux's way to say that the other end is closed
        pass
    finally:
        os.close(descriptor)
    return shown
