"""L2: real power losses: ext4 on a loop device is shut down in the middle of a run, without its log being flushed.

Whatever was not fsynced is gone, as after pulling the plug. Finds a missing fsync of a file or a directory in the
real code on a real filesystem. Needs root and loop devices.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.crash.checker import check, promised, read_newest
from tests.crash.runs import EXIT_TYPED_ERROR, Outcome, Zygote

pytestmark = [pytest.mark.slow, pytest.mark.needs_root]

SIZE = 8 << 20
BEYOND = 1_000_000


@dataclass
class Machine:
    """One that is switched off and on again: a disk image that is mounted, loses power, and is mounted again."""

    zygote: Zygote
    folder: Path
    base_events: Sequence[Mapping[str, Any]] = ()
    mounts: int = 0

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """The store on the mounted filesystem; never left mounted.

        Mounts a copy of the disk. A process in another mount namespace may keep the filesystem that lost power mounted,
        and to mount the same file would bring that one back.
        """
        point = self.folder / "mount"
        point.mkdir(exist_ok=True)
        disk = self.folder / "disk"
        self.mounts += 1
        copied = self.folder / f"disk-{self.mounts}"
        shutil.copyfile(disk, copied)
        copied.replace(disk)
        _run("mount", "-o", "loop", disk, point)
        try:
            yield point / "store"
        finally:
            _run("umount", "-l", point)  # also while another process has files open in it

    def fresh(self, image: str) -> None:
        (self.folder / "disk").unlink(missing_ok=True)
        shutil.copyfile(self.folder / image, self.folder / "disk")
        (self.folder / "journal").unlink(missing_ok=True)

    def run(self, scenario: str, k: int) -> Outcome:
        self.fresh("base" if scenario == "save" else "empty")
        with self.mounted() as store:
            return self.zygote.doomed(scenario, store, self.folder / "journal", k)

    def changes(self, scenario: str) -> int:
        """How many changes a whole run makes."""
        outcome = self.run(scenario, BEYOND)
        assert outcome.code == 0, outcome
        return int(outcome.events[-1]["count"])


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if os.geteuid() != 0:
        pytest.skip("not root: power losses on a real filesystem are NOT tested")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed: power losses on a real filesystem are NOT tested")
    folder = tmp_path_factory.mktemp("power")
    with (folder / "empty").open("wb") as image:
        image.truncate(SIZE)
    _run("mkfs.ext4", "-q", "-F", folder / "empty")
    with Zygote() as zygote:
        machine = Machine(zygote, folder)
        try:
            machine.base_events = machine.run("several", BEYOND).events
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no loop device can be mounted: power losses on a real filesystem are NOT tested ({error})")
        shutil.copyfile(folder / "disk", folder / "base")
        yield machine
    subprocess.run(["umount", "-q", "-l", folder / "mount"], check=False)


@pytest.mark.core
def test_the_power_really_goes(machine: Machine) -> None:
    """What is written and not synced must be lost, or the tests below prove nothing."""
    machine.fresh("base")
    with machine.mounted() as store:
        (store / "not-synced").write_bytes(b"x" * 5000)
        _cut(store)
    with machine.mounted() as store:
        assert (store / "STORE.json").exists()
        assert not (store / "not-synced").exists()


@pytest.mark.parametrize(
    ("scenario", "stride"), [pytest.param("save", 2, marks=pytest.mark.core), ("several", 11), ("varied", 11)]
)
def test_power_lost_at_any_change(machine: Machine, scenario: str, stride: int) -> None:
    base = machine.base_events if scenario == "save" else ()
    for k in range(1, machine.changes(scenario) + 2, stride):
        outcome = machine.run(scenario, k)
        assert outcome.code in (0, EXIT_TYPED_ERROR), (k, outcome)
        with machine.mounted() as store:
            if store.exists():
                check(LocalFiles(store), promised([*base, *outcome.events]))
            else:
                assert not promised(outcome.events).kept


@pytest.mark.core
def test_power_lost_after_the_last_acknowledgement(machine: Machine) -> None:
    """Nothing that was acknowledged is lost, the very last of it included."""
    machine.fresh("base")
    with machine.mounted() as store:
        outcome = machine.zygote.doomed("commit", store, machine.folder / "journal", BEYOND)
    promise = promised([*machine.base_events, *outcome.events])
    assert promise.newest is not None
    assert promise.newest > promised(machine.base_events).newest
    with machine.mounted() as store:
        assert read_newest(open_catalog(LocalFiles(store))).save == promise.newest


def _cut(store: Path) -> None:
    from tests.crash.zygote import Doomed

    Doomed(str(store), 0).cut()


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
