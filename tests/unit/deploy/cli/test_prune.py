from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.cli import prune as prune_command
from store.catalog import open_or_create
from store.names import SaveId
from store.session import StoreLock
from store.storage.local import LocalFiles
from tests.support.cli import Here
from tests.support.processes import holding_lock
from tests.support.stores import StoreBuilder, flip_byte

ONE = ("--keep-last", 1, "--no-log-spaced")


@pytest.fixture
def builder(tmp_path: Path) -> StoreBuilder:
    return StoreBuilder(tmp_path / "store")


def commits(builder: StoreBuilder) -> list[str]:
    return sorted(path.stem for path in (builder.root / "manifests").iterdir())


def groups(builder: StoreBuilder) -> list[str]:
    return sorted(path.name for path in (builder.root / "segments").iterdir())


def everything(builder: StoreBuilder) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in builder.root.rglob("*") if path.is_file()}


def test_deletes_what_need_not_be_kept_and_says_what_it_freed(here: Here, builder: StoreBuilder) -> None:
    first, second, third = (builder.save(step) for step in (10, 20, 30))
    size = sum(p.stat().st_size for save in (first, second) for p in builder.payload(save).parent.iterdir())
    answer = here("prune", builder.root, *ONE, "--json")
    assert answer.code == 0
    assert answer.json["keep"] == [third.name]
    assert answer.json["delete"] == {
        "commits": [first.name, second.name],
        "segments": [first.name, second.name],
        "temporaries": [],
        "weights": [],
    }
    assert (answer.json["freed_bytes"], answer.json["dry_run"], answer.json["blocked"]) == (size, False, None)
    assert commits(builder) == groups(builder) == [third.name]
    assert here("verify", builder.root).code == 0


def test_a_dry_run_says_the_same_and_deletes_nothing(here: Here, builder: StoreBuilder) -> None:
    for step in (10, 20, 30):
        builder.save(step)
    before = everything(builder)
    dry = here("prune", builder.root, *ONE, "--dry-run", "--json").json
    text = here("prune", builder.root, *ONE, "-n").out
    assert everything(builder) == before
    assert "Would delete  2 commits: 00000020-000001, 00000010-000001" in text
    assert "Would free" in text
    assert here("prune", builder.root, *ONE, "--json").json == {**dry, "dry_run": False}


def test_retention_comes_from_the_options(here: Here, builder: StoreBuilder) -> None:
    saves = {step: builder.save(step) for step in range(10, 170, 10)}

    def kept(*options: object) -> list[int]:
        answer = here("prune", builder.root, *options, "--dry-run", "--json")
        return [int(name.partition("-")[0]) for name in answer.json["keep"]]

    assert kept(*ONE) == [160]
    assert kept("--keep-last", 3, "--no-log-spaced") == [140, 150, 160]
    assert kept("--no-log-spaced") == [140, 150, 160]
    assert kept(*ONE, "--keep-every", 50) == [10, 50, 100, 150, 160]
    assert kept("--keep-last", 1) == [10, 40, 100, 130, 150, 160]
    builder.prove(saves[70])
    assert kept(*ONE) == [70, 160]


def test_what_was_deleted_and_freed_nothing_is_no_reason_to_delete_more(here: Here, builder: StoreBuilder) -> None:
    """The segments of the commits that go are needed by the one that stays."""
    names = [layer.name for layer in builder.layers]
    builder.save(10)
    for step, layer in ((20, names[0]), (30, names[1]), (40, names[1])):
        builder.save(step, layers=(layer,), slots=("fp32",))
    builder.prove(SaveId(40, 1))
    told = here("prune", builder.root, "--keep-last", 2, "--no-log-spaced")
    assert "Deleted" in told.out and "Freed 0 B" in " ".join(told.out.split()) and "frees nothing" not in told.out


def test_the_minimum_frees_what_log_spacing_keeps(here: Here, builder: StoreBuilder) -> None:
    saves = [builder.save(step) for step in (10, 20, 40)]
    usual = here("prune", builder.root, "--dry-run")
    assert "This frees nothing. Add --minimum" in usual.out.replace("\n", " ")
    builder.prove(saves[1])
    answer = here("prune", builder.root, "--minimum", "--json")
    assert answer.json["keep"] == [saves[1].name, saves[2].name]
    assert answer.json["delete"]["commits"] == [saves[0].name]
    assert answer.json["freed_bytes"] > 0
    assert commits(builder) == groups(builder) == [saves[1].name, saves[2].name]
    assert here("prune", builder.root, "--minimum", "--json").json["freed_bytes"] == 0


def test_segments_that_later_commits_use_stay(here: Here, builder: StoreBuilder) -> None:
    first = builder.save(10)
    second = builder.save(20, slots=("fp32",))
    answer = here("prune", builder.root, *ONE, "--json")
    assert answer.json["delete"] == {"commits": [first.name], "weights": [], "segments": [], "temporaries": []}
    assert groups(builder) == [first.name, second.name]
    assert here("verify", builder.root).code == 0


def test_what_is_not_recognised_is_told_and_stays(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    builder.save(20)
    for name in ("notes.txt", "manifests/old.json", "segments/mine"):
        (builder.root / name).touch()
    answer = here("prune", builder.root, *ONE, "--json")
    assert sorted(answer.json["unrecognised"]) == ["manifests/old.json", "notes.txt", "segments/mine"]
    assert "Unrecognised files, not deleted:\n" in here("prune", builder.root, *ONE).out
    assert all((builder.root / name).exists() for name in ("notes.txt", "manifests/old.json", "segments/mine"))


def test_refused_while_a_job_uses_the_store(here: Here, builder: StoreBuilder) -> None:
    for step in (10, 20):
        builder.save(step)
    before = everything(builder)
    with holding_lock(builder.root) as pid:
        refused = here("prune", builder.root, *ONE)
        assert (refused.code, refused.out) == (11, "")
        assert f"in use by process {pid}" in refused.err
        assert here("prune", builder.root, *ONE, "--json").json["error"]["type"] == "StoreInUseError"
        dry = here("prune", builder.root, *ONE, "--dry-run", "--json")
        assert (dry.code, dry.json["in_use_by"]) == (0, pid)
        assert "without --dry-run this fails" in " ".join(here("prune", builder.root, *ONE, "--dry-run").out.split())
    assert everything(builder) | {builder.root / "LOCK": b""} == before | {builder.root / "LOCK": b""}
    assert here("prune", builder.root, *ONE).code == 0


def test_holds_the_lock_while_it_deletes_and_lets_go(
    here: Here, builder: StoreBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        builder.save(step)
    seen: list[int | None] = []
    real = prune_command.execute

    def watching(*args: Any) -> None:
        seen.append(here_in_another_process(builder.root))
        real(*args)

    monkeypatch.setattr(prune_command, "execute", watching)
    assert here("prune", builder.root, *ONE).code == 0
    assert seen == [11]
    StoreLock(builder.root, wait_seconds=0).release()


def here_in_another_process(root: Path) -> int:
    from tests.support.cli import driftpoint

    return driftpoint("prune", root, *ONE).code


def test_nothing_is_deleted_where_a_commit_cannot_be_read(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    flip_byte(builder.manifest(builder.save(20)), 100)
    builder.save(30)
    before = everything(builder)
    answer = here("prune", builder.root, *ONE, "--json")
    assert answer.code == 12
    assert "00000020-000001 cannot be read" in answer.json["blocked"]
    assert everything(builder).keys() - before.keys() <= {builder.root / "LOCK"}
    assert before.items() <= everything(builder).items()
    text = here("prune", builder.root, *ONE)
    assert text.code == 12
    assert text.out.startswith("Not pruned: commit 00000020-000001 cannot be read")


def test_an_empty_store_and_none_at_all(here: Here, tmp_path: Path) -> None:
    open_or_create(LocalFiles(tmp_path / "store"))
    assert here("prune", tmp_path / "store").code == 13
    assert here("prune", tmp_path).code == 10
    assert not (tmp_path / "LOCK").exists()


@pytest.mark.parametrize("options", [("--keep-last", "0"), ("--keep-every", "0"), ("--keep-last", "x")])
def test_senseless_numbers_are_wrong_usage(here: Here, builder: StoreBuilder, options: tuple[str, str]) -> None:
    builder.save(10)
    answer = here("prune", builder.root, *options)
    assert (answer.code, answer.out) == (2, "")
    assert options[0] in answer.err and "driftpoint prune --help" in answer.err


def test_a_refusal_by_the_system_is_an_error_and_the_lock_is_let_go(here: Here, builder: StoreBuilder) -> None:
    for step in (10, 20):
        builder.save(step)
    in_the_way = builder.root / "manifests" / ".tmp-0123456789ab-00000010-000001.json"
    in_the_way.mkdir()
    answer = here("prune", builder.root, *ONE)
    assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1)
    assert str(in_the_way) in answer.err
    in_the_way.rmdir()
    assert here("prune", builder.root, *ONE).code == 0
    assert groups(builder) == ["00000020-000001"]


def test_a_store_of_another_host_is_pointed_out(
    here: Here, builder: StoreBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.save(10)
    assert "ran on" not in here("prune", builder.root).out
    monkeypatch.setattr("socket.gethostname", lambda: "node-17")
    builder.restart()
    monkeypatch.undo()
    monkeypatch.setenv("COLUMNS", "80")
    assert "The newest job on this store ran on node-17." in here("prune", builder.root).out
