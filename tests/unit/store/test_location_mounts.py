"""Which filesystem a directory lies on, from the kernel's table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from store.location import Mount, mount_of

TABLE = """\
overlay / overlay rw,lowerdir=/a 0 0
tmpfs /dev/shm tmpfs rw,nosuid 0 0
10.0.0.1@tcp:/fs /data lustre rw 0 0
/dev/sda2 /data/my\\040disk ext4 rw 0 0
server:/x /data nfs4 rw 0 0
none /none ramfs rw 0 0
odd line
"""


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has psutil read another table of mounts."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path / "proc"))
    return (tmp_path / "proc" / "self" / "mounts").write_text  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("/home/me", "overlay", "container"),
        ("/dev/shm/x", "tmpfs", "passing"),
        ("/data", "nfs4", "shared"),  # what was mounted last on a point hides what was before
        ("/data/my disk/store", "ext4", "local"),
        ("/database", "overlay", "container"),
        ("/none/x", "ramfs", "passing"),
    ],
)
def test_the_nearest_mount_above(mounted: Callable[[str], None], path: str, name: str, kind: str) -> None:
    mounted(TABLE)
    found = mount_of(path)
    assert found is not None
    assert (found.name, found.kind) == (name, kind)


def test_what_is_lost_without_a_disk_failing() -> None:
    assert Mount("tmpfs", "/").loss == "a reboot empties it"
    assert Mount("overlay", "/").loss == "it goes with the container"
    assert Mount("ext4", "/").loss is None and Mount("fuse.somebody", "/").loss is None


def test_a_link_is_followed(mounted: Callable[[str], None], tmp_path: Path) -> None:
    mounted(f"x / ext4 rw 0 0\ns {tmp_path}/there nfs rw 0 0\n")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    found = mount_of(tmp_path / "link" / "store")
    assert found is not None and found.name == "nfs"


def test_no_table(mounted: Callable[[str], None]) -> None:
    assert mounted is not None and mount_of("/") is None


def test_here() -> None:
    found = mount_of("/proc/self")
    assert found is not None and found.name == "proc"
    assert mount_of(Path.cwd()) is not None
