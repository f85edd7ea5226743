"""What kind of filesystem a directory lies on, by the kernel's own list. Linux; unknown elsewhere.

It knows the names of kinds, and what they mean for what must outlast a machine; it writes nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Kind = Literal["local", "shared", "passing", "container", "unknown"]
"""``passing``: gone after a reboot. ``container``: gone with the container. ``local``, ``shared``: of one machine, or
of all that mount it."""

_SHARED: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "ceph", "fuse.ceph-fuse", "beegfs", "glusterfs", "fuse.glusterfs", "cifs", "smb3"}
    | {"9p", "virtiofs", "afs", "orangefs", "pvfs2", "wekafs", "weka", "daos", "fuse.daos", "fuse.juicefs"}
    | {"quobyte", "fuse.quobyte", "vast", "gfs2", "ocfs2"}
)
_PASSING: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs"})
_CONTAINER: Final = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
_LOCAL: Final = frozenset(["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs"])


@dataclass(frozen=True)
class Mount:
    """Where a directory lies. name: of the filesystem, as the kernel has it. point: where that is mounted."""

    name: str
    point: str

    @property
    def kind(self) -> Kind:
        """What that means. A FUSE filesystem, or one that is not known here, may be anything."""
        kinds: tuple[tuple[frozenset[str], Kind], ...] = (
            (_SHARED, "shared"),
            (_PASSING, "passing"),
            (_CONTAINER, "container"),
            (_LOCAL, "local"),
        )
        return next((kind for names, kind in kinds if self.name in names), "unknown")

    @property
    def loss(self) -> str | None:
        """When what lies there is lost though no disk is; None where it is not."""
        return {"passing": "a reboot empties it", "container": "it goes with the container"}.get(self.kind)


def mount_of(path: str | os.PathLike[str], table: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """The mount below which ``path`` lies, or its nearest parent that exists; None where nobody knows."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    place = os.path.realpath(path)
    found = None
    for line in lines:  # the last one of those that are mounted on the same point is on top
        mount = _parsed(line)
        if mount is not None and _below(place, mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _parsed(line: str) -> Mount | None:
    before, dash, after = line.partition(" - ")
    fields, rest = before.split(" "), after.split(" ")
    return Mount(rest[0], _plain(fields[4])) if dash and len(fields) > 4 else None


def _plain(point: str) -> str:
    """With what the kernel writes as octal: blanks, tabs, line ends and backslashes."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, character)
    return point


def _below(place: str, point: str) -> bool:
    return point in ("/", place) or place.startswith(f"{point}/")
