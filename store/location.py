"""file or s3:// location; filesystem kind.

Where a store is: a directory, or a prefix in a bucket; and the files there.

A bucket's place has the manners of a path, so that whoever hands places on, shows them or compares them need not ask
which it is. It knows no store's format.

Tell on which kind of filesystem a directory lies, and whether it outlasts the machine or the container.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Final, Literal

import psutil

from store.errors import ConfigError
from store.storage.bucket import ObjectOptions
from store.storage.local import Files, LocalFiles

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?!/)(.*)\Z", re.DOTALL)
"""With one slash, too: a path that was made of a URL has lost the other."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]\Z")
_PREFIX = re.compile(r"[\w.=+@,-]+(/[\w.=+@,-]+)*\Z", re.ASCII)


class ObjectUrl(PosixPath):
    """``s3://bucket/prefix``: a path that is absolute wherever one stands, and at which no directory of this machine
    is. Opening it as a file finds nothing."""

    @property
    def bucket(self) -> str:
        return self.parts[1]

    @property
    def prefix(self) -> str:
        """What the keys of all its objects begin with, without the slash at its end; ``""``: the whole bucket."""
        return "/".join(self.parts[2:])

    def __str__(self) -> str:
        return "/".join((f"{self.parts[0]}/", *self.parts[1:]))

    def __fspath__(self) -> str:
        return str(self)

    def absolute(self) -> ObjectUrl:
        return self

    def resolve(self, strict: bool = False) -> ObjectUrl:  # noqa: ARG002
        return self

    def expanduser(self) -> ObjectUrl:
        return self

    def exists(self, **_: bool) -> bool:
        return False

    def is_dir(self, **_: bool) -> bool:
        return False

    def is_file(self, **_: bool) -> bool:
        return False


def place_of(text: str | os.PathLike[str]) -> Path:
    """A directory's path as it was given, or an :class:`ObjectUrl`. ConfigError for a URL that is no store's place."""
    if isinstance(text, ObjectUrl):
        return text
    given = os.fspath(text)
    match = _URL.match(given)
    if match is None:
        return Path(text)
    scheme, rest = match[1].lower(), match[2].rstrip("/")
    if scheme != "s3":
        raise ConfigError(
            f"{given}: stores are kept in directories and in s3://BUCKET/PREFIX, and {scheme}:// is neither; an object "
            "store of another kind can be used through an S3 interface, with `s3: {endpoint: ...}`"
        )
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.match(bucket):
        raise ConfigError(f"{given} names no bucket: a store's place is s3://BUCKET/PREFIX")
    if prefix and (not _PREFIX.match(prefix) or {".", ".."} & set(prefix.split("/"))):
        raise ConfigError(
            f"{given}: a prefix consists of names between single slashes, of letters, digits and . _ - = + @ ,"
        )
    return ObjectUrl("s3:", bucket, *(prefix.split("/") if prefix else ()))


def store_place(text: str | os.PathLike[str]) -> Path:
    """As a job's settings name it: ``~`` is the user's home, and the rest of a path counts from where one stands."""
    return Path(os.path.abspath(found.expanduser())) if not is_url(found := place_of(text)) else found  # noqa: PTH100


def beside(place: Path, suffix: str) -> Path:
    """A file of this machine called like the store: beside its directory; of one in a bucket, where one stands."""
    return Path.cwd() / f"{place.name}{suffix}" if is_url(place) else Path(f"{place}{suffix}")


def is_url(place: Path) -> bool:
    """Whether it is in an object store."""
    return isinstance(place, ObjectUrl)


def files_at(place: str | os.PathLike[str], options: ObjectOptions | None = None) -> Files:
    """The files at a place. options: of an object store; without them, what the environment says.

    ConfigError where the place is none, UnsupportedError where what is needed for it is not installed."""
    found = place_of(place)
    if not isinstance(found, ObjectUrl):
        return LocalFiles(found)
    from store.storage.object_store import ObjectFiles

    return ObjectFiles(found, found.bucket, found.prefix, options or ObjectOptions())


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
