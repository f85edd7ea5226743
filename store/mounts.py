"""Tell on which kind of filesystem a directory lies, and whether it outlasts the machine or the container."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Literal

import psutil

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


def mount_of(path: str | os.PathLike[str]) -> Mount | None:
    """Return the mount that ``path`` lies on, or would lie on once it is made; None where the list cannot be read."""
    place = os.path.realpath(path)
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return None
    above = [one for one in mounts if _below(place, one.mountpoint)]
    if not above:
        return None
    # Of two mounts on the same point the later one hides the earlier one.
    longest = max(enumerate(above), key=lambda item: (len(item[1].mountpoint), item[0]))[1]
    return Mount(longest.fstype, longest.mountpoint)


def _below(place: str, point: str) -> bool:
    return point in ("/", place) or place.startswith(f"{point}/")
