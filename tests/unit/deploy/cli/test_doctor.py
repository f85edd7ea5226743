"""``driftpoint doctor``: what it says of real directories, limits and stores, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from deploy.doctor import disk, machine
from deploy.doctor.base import Finding, Plan, Probe, parse_count
from deploy.doctor.disk import check_disk
from deploy.doctor.store import check_store
from monitor.config.load import Config, bytes_each
from store.errors import StorageError, UsageError
from store.retention import Retention
from store.schema import seal
from store.session import StoreLock
from store.storage.local import LocalFiles
from tests.support.cli import ROOT, Here, driftpoint, environment
from tests.support.mounts import tmpfs
from tests.support.records import unseal
from tests.support.stores import StoreBuilder

PLAN = Plan(Config())


@pytest.fixture
def builder(tmp_path: Path) -> StoreBuilder:
    return StoreBuilder(tmp_path / "store")


def _listed(root: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*"))


def _named(findings: Iterator[Finding], check: str) -> Finding:
    found = [one for one in findings if one.check == check]
    assert len(found) == 1
    return found[0]


@pytest.mark.slow
def test_the_whole_command_leaves_a_store_in_use_as_it_was(builder: StoreBuilder) -> None:
    builder.save(10)
    lock = StoreLock(builder.root, 0)
    before = _listed(builder.root)
    try:
        answer = driftpoint("doctor", builder.root, "--parameters", "1m", "--json")
    finally:
        lock.release()
    found = {one["check"]: one for one in answer.json["findings"]}
    assert answer.code == 0, answer.out
    assert answer.json["ok"] is True and answer.json["store"] == str(builder.root)
    assert _listed(builder.root) == before
    assert f"in use by process {os.getpid()}" in found["store"]["seen"]
    assert found["resume"]["seen"].startswith("from step 10, exact")
    for check in ("semantics", "locking", "resume", "permissions", "space"):
        assert found[check]["state"] == "ok", found[check]
    assert all(one["todo"] for one in found.values() if one["state"] != "ok")


def test_text_and_a_store_to_be(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "driftpoint.yaml").write_text("store: deep/er/store\nmetrics: {enabled: false}\n")
    answer = here("doctor", columns=200)
    assert answer.code == 0
    assert f"{tmp_path}/deep/er/store: no check failed" in answer.out
    assert "deep/er/store is empty or missing: the job creates the store" in answer.out
    assert [path.name for path in tmp_path.iterdir()] == ["driftpoint.yaml"]


def test_what_fails_has_code_1_and_says_what_to_do(here: Here, tmp_path: Path) -> None:
    (tmp_path / "strange").write_text("not of a store")
    answer = here("doctor", tmp_path, columns=200)
    assert answer.code == 1
    assert "-> set `store:` to an empty or new directory" in answer.out
    assert "1 check failed" in answer.out


def test_wrong_usage(here: Here, tmp_path: Path) -> None:
    assert here("doctor", tmp_path, "--parameters", "many").code == 2
    assert here("doctor", "-c", tmp_path / "missing.yaml").code == 2


AS_NOBODY = """
import json, os, sys
from dataclasses import asdict
from pathlib import Path
from deploy.doctor.disk import check_disk
from deploy.doctor.store import check_store
from deploy.doctor.base import Plan
from monitor.config.load import Config, bytes_each
from store.retention import Retention
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
root = Path(sys.argv[1])
found = [*check_disk(root, Plan(Config())), *check_store(root, Retention())]
print(json.dumps([asdict(one) for one in found]))
"""


ENDED = """
import os, signal
from deploy.cli.app import main
from deploy.doctor import disk

def end(probe, name):
    written(probe, name)
    assert os.listdir(probe.files.root)
    os.kill(os.getpid(), signal.SIGTERM)

written, disk._written = disk._written, end
main()
"""


def test_every_check_is_documented_and_no_other() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "deploy" / "doctor").glob("*.py"))
    checks = set(re.findall(r'(?:Finding|_port)\(\s*"([a-z ]+)"', sources))
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "doctor.md").read_text(), re.M)
    assert {name for row in rows for name in re.findall(r"`(.*?)`", row)} == checks


class TestDisk:
    def test_it_goes_by_the_nearest_directory_that_is_there(self, tmp_path: Path) -> None:
        found = list(check_disk(tmp_path / "a" / "b", PLAN))
        assert f"{tmp_path} is on " in _named(iter(found), "filesystem").seen
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.needs_root
    def test_a_small_one_full_and_read_only(self, tmp_path: Path) -> None:
        with tmpfs(tmp_path / "small", "1m") as place:
            found = {one.check: one for one in check_disk(place / "store", Plan(Config(), 10**6))}
            assert (found["filesystem"].state, found["filesystem"].todo[:3]) == ("warn", "set")
            assert "tmpfs" in found["filesystem"].seen and "a reboot empties it" in found["filesystem"].seen
            assert found["space"].state == "fail"
            with (place / "much").open("wb") as file, suppress(OSError):
                file.write(bytes(1 << 21))
            full = _named(check_disk(place, PLAN), "writing")
            assert full.state == "fail" and "the filesystem is full" in full.seen
            subprocess.run(["mount", "-o", "remount,ro", place], check=True)
            closed = _named(check_disk(place, PLAN), "writing")
            assert closed.state == "fail" and "read-only" in closed.seen
            assert [path.name for path in place.iterdir()] == ["much"]

    @pytest.mark.needs_root
    @pytest.mark.skipif(os.geteuid() != 0, reason="root may become nobody, NOT tested here")
    def test_a_user_who_may_not(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            StoreBuilder(Path(folder) / "store").save(10)
            (Path(folder) / "closed").mkdir(mode=0o700)
            for name, failing in (("store", {"permissions", "writing"}), ("closed/store", {"writing"})):
                command = [sys.executable, "-c", AS_NOBODY, str(Path(folder) / name)]
                done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
                found = json.loads(done.stdout)
                assert {one["check"] for one in found if one["state"] == "fail"} == failing, found
                assert all(one["todo"] for one in found if one["state"] == "fail")

    @pytest.mark.parametrize(
        ("call", "told"), [("link", "hard links are not supported"), ("rename", "a rename cannot replace a file")]
    )
    def test_what_a_filesystem_has_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, told: str
    ) -> None:
        def refused(self: LocalFiles, source: str, target: str) -> None:
            raise StorageError("Operation not supported")

        monkeypatch.setattr(LocalFiles, call, refused)
        found = _named(check_disk(tmp_path, PLAN), "semantics")
        assert found.state == "fail" and told in found.seen
        assert list(tmp_path.iterdir()) == []

    def test_a_link_that_replaces(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def replacing(self: LocalFiles, source: str, target: str) -> None:
            (self.root / target).unlink(missing_ok=True)
            os.link(self.root / source, self.root / target)

        monkeypatch.setattr(LocalFiles, "link", replacing)
        assert "a hard link replaces an existing file" in _named(check_disk(tmp_path, PLAN), "semantics").seen

    def test_locks_that_another_process_does_not_see(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk, "_LOCKER", "import sys; print('locked', flush=True); sys.stdin.read()")
        found = _named(check_disk(tmp_path, PLAN), "locking")
        assert (found.state, found.seen) == ("warn", "a lock of one process is not seen by another")

    def test_space_for_the_plan(self, tmp_path: Path) -> None:
        small, huge = Plan(Config(), 1000), Plan(Config(), 10**15)
        assert _named(check_disk(tmp_path, small), "space").state == "ok"
        found = _named(check_disk(tmp_path, huge), "space")
        assert found.state == "fail" and "keep_last" in found.todo

    def test_a_doctor_that_is_ended_takes_away_what_it_made(self, tmp_path: Path) -> None:
        place = tmp_path / "place"
        place.mkdir()
        command = [sys.executable, "-c", ENDED, "doctor", str(place)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 128 + signal.SIGTERM, done.stderr
        assert list(place.iterdir()) == []

    def test_what_a_killed_doctor_leaves_is_pruned_or_ignored(self, builder: StoreBuilder) -> None:
        builder.save(10)
        probe = Probe(LocalFiles(builder.root))
        disk._written(probe, probe.name())
        found = list(check_store(builder.root, Retention()))
        assert {one.state for one in found} == {"ok"}


class TestMachine:
    def test_a_port_that_is_taken(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            plan = Plan(Config.model_validate({"metrics": {"port": server.getsockname()[1]}}))
            found = _named(machine._ports(plan), "metrics port")
        assert found.state == "warn" and "Address already in use" in found.seen and "metrics: {port" in found.todo

    def test_ports_that_are_free_or_not_wanted(self) -> None:
        off = Plan(Config.model_validate({"metrics": {"enabled": False}}))
        assert list(machine._ports(off)) == []
        both = Plan(Config.model_validate({"metrics": {"port": 0}, "daemon": {"enabled": True, "port": 0}}))
        assert [(one.check, one.state) for one in machine._ports(both)] == [("metrics port", "ok")]

    def test_limits(self) -> None:
        code = "from deploy.doctor.machine import _open_files; print(_open_files().state)"

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

        done = subprocess.run(
            [sys.executable, "-c", code],
            preexec_fn=limited,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "warn\n"

    def test_memory_that_does_not_suffice(self, tmp_path: Path) -> None:
        settings = Config.model_validate({"memory": {"enabled": True, "path": str(tmp_path)}})
        found = machine._shared_memory(Plan(settings, 10**15))
        assert found.state == "warn" and "the job would run without them" in found.seen and "--nodes" in found.todo
        assert machine._shared_memory(Plan(settings, 1000)).state == "ok"
        assert machine._shared_memory(Plan(Config(), 10**15)).state == "ok"  # nobody asked for it


class TestStore:
    def test_nothing_to_resume_from_damage(self, builder: StoreBuilder) -> None:
        builder.save(10)
        for manifest in (builder.root / "manifests").iterdir():
            manifest.write_bytes(b"{}")
        found = _named(check_store(builder.root, Retention()), "resume")
        assert found.state == "fail" and "driftpoint verify" in found.todo

    def test_what_no_store_has(self, builder: StoreBuilder) -> None:
        builder.save(10)
        (builder.root / "notes.txt").write_text("mine")
        found = _named(check_store(builder.root, Retention()), "leftovers")
        assert found.state == "warn" and "notes.txt" in found.seen

    def test_an_empty_directory_is_a_store_to_be(self, tmp_path: Path) -> None:
        assert [one.state for one in check_store(tmp_path, Retention())] == ["ok"]

    def test_a_store_that_lost_its_head(self, builder: StoreBuilder) -> None:
        builder.save(10)
        (builder.root / "STORE.json").unlink()
        (found,) = check_store(builder.root, Retention())
        assert found.state == "fail" and "--repair" in found.todo

    @pytest.mark.parametrize("what", ["file", "file/below", "to nothing", "x" * 300])
    def test_a_path_at_which_there_can_be_no_directory(self, tmp_path: Path, what: str) -> None:
        (tmp_path / "file").write_text("mine")
        (tmp_path / "to nothing").symlink_to(tmp_path / "nowhere")
        (found,) = check_store(tmp_path / what, Retention())
        assert (found.check, found.state) == ("store", "fail") and "`store:`" in found.todo

    def test_a_link_to_a_directory_is_one(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "there")
        assert [one.state for one in check_store(tmp_path / "link", Retention())] == ["ok"]

    def test_a_store_of_a_newer_release_and_a_damaged_head(self, builder: StoreBuilder) -> None:
        builder.save(10)
        head = builder.root / "STORE.json"
        body = unseal(head.read_bytes(), "STORE.json")
        head.write_bytes(seal({**body, "reader": 99, "format": 99}))
        (newer,) = check_store(builder.root, Retention())
        assert newer.state == "fail" and "--upgrade" in newer.seen and "another directory" in newer.todo
        head.write_bytes(b"{}")
        (damaged,) = check_store(builder.root, Retention())
        assert damaged.state == "fail" and "--repair" in damaged.todo and "restore STORE.json from" in damaged.todo


class TestPlan:
    def test_bytes_of_a_parameter(self) -> None:
        assert bytes_each({}) == 12
        assert bytes_each(Config(encoding="compact").encodings()) == pytest.approx(4 + 1 / 128 + 1 / 4096)

    def test_commits_side_by_side(self) -> None:
        few = Config.model_validate({"every": 100, "retention": {"keep_last": 2, "log_spaced": False}})
        assert few.most_commits() == 3
        assert 8 <= Config().most_commits() <= 20

    def test_memory_is_spread_over_nodes(self) -> None:
        assert Plan(Config(), 8 * 10**9, 4).memory_bytes == 8 * 10**9 * 12 * 2 // 4

    @pytest.mark.parametrize(
        ("text", "count"), [("8b", 8 * 10**9), ("350M", 35 * 10**7), ("1.3e9", 1.3e9), ("1_000", 1000), (".5k", 500)]
    )
    def test_counts(self, text: str, count: int) -> None:
        assert parse_count(text) == count

    @pytest.mark.parametrize("text", ["", "b", "8x", "-1", "0", "8bb", "1e99", "nan"])
    def test_what_is_no_count(self, text: str) -> None:
        with pytest.raises(UsageError, match="--parameters takes a number"):
            parse_count(text)
