"""Which filesystem a directory lies on, from the kernel's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.mounts import Mount, mount_of

TABLE = """\
22 1 8:1 / / rw,relatime - overlay overlay rw,lowerdir=/a
30 22 0:26 / /dev/shm rw,nosuid - tmpfs tmpfs rw
31 22 0:27 / /data rw - lustre 10.0.0.1@tcp:/fs rw
32 31 8:2 / /data/my\\040disk rw shared:3 master:1 - ext4 /dev/sda2 rw
33 22 0:28 / /data rw - nfs4 server:/x rw
odd line
"""


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("/home/me", "overlay", "container"),
        ("/dev/shm/x", "tmpfs", "passing"),
        ("/data", "nfs4", "shared"),  # what was mounted last on a point hides what was before
        ("/data/my disk/store", "ext4", "local"),
        ("/database", "overlay", "container"),
    ],
)
def test_the_nearest_mount_above(tmp_path: Path, path: str, name: str, kind: str) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    found = mount_of(path, table)
    assert found is not None
    assert (found.name, found.kind) == (name, kind)


def test_what_is_lost_without_a_disk_failing() -> None:
    assert Mount("tmpfs", "/").loss == "a reboot empties it"
    assert Mount("overlay", "/").loss == "it goes with the container"
    assert Mount("ext4", "/").loss is None and Mount("fuse.somebody", "/").loss is None


def test_a_link_is_followed(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"22 1 8:1 / / rw - ext4 x rw\n23 22 0:9 / {tmp_path}/there rw - nfs s rw\n")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    found = mount_of(tmp_path / "link" / "store", table)
    assert found is not None and found.name == "nfs"


def test_no_table(tmp_path: Path) -> None:
    assert mount_of("/", tmp_path / "missing") is None


def test_here() -> None:
    found = mount_of("/proc/self")
    assert found is not None and found.name == "proc"
    assert mount_of(Path.cwd()) is not None
