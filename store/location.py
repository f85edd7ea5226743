"""Parse the location of a store (a directory, or an s3://, az:// or gs:// URL), open its files, find its filesystem.

The location of an object store behaves like an absolute path, so that code which passes, shows or compares locations
need not tell the two apart."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Literal

import psutil

from store.errors import ConfigError
from store.storage.bucket import SCHEMES, ObjectOptions
from store.storage.local import Files, LocalFiles

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?!/)(.*)\Z", re.DOTALL)
"""Also with one slash: ``Path`` removes the other from a URL."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]\Z")
_PREFIX = re.compile(r"[\w.=+@,-]+(/[\w.=+@,-]+)*\Z", re.ASCII)


class ObjectUrl(PosixPath):
    """``s3://bucket/prefix`` as an absolute path at which this machine has no file or directory."""

    @property
    def bucket(self) -> str:
        return self.parts[1]

    @property
    def prefix(self) -> str:
        """Common prefix of all keys, without the slash at its end; ``""`` is the whole bucket."""
        return "/".join(self.parts[2:])

    def __str__(self) -> str:
        return "/".join((f"{self.parts[0]}/", *self.parts[1:]))

    def __fspath__(self) -> str:
        return str(self)

    def resolve(self, strict: bool = False) -> "ObjectUrl":  # noqa: ARG002
        return self

    absolute = expanduser = resolve

    def exists(self, **_: bool) -> bool:
        return False

    is_dir = is_file = exists


def place_of(text: str | os.PathLike[str]) -> Path:
    """Return a directory's path as given, or an :class:`ObjectUrl`. Raises ConfigError for other URLs."""
    if isinstance(text, ObjectUrl):
        return text
    given = os.fspath(text)
    match = _URL.match(given)
    if match is None:
        return Path(text)
    scheme, rest = match[1].lower(), match[2].rstrip("/")
    if scheme not in SCHEMES:
        raise ConfigError(
            f"{given}: {scheme}:// is not supported; use a directory, s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or "
            "gs://BUCKET/PREFIX. Other object stores work through an S3 interface, with `s3: {endpoint: ...}`"
        )
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.match(bucket):
        raise ConfigError(f"{given} names no bucket: a store's location is {scheme}://BUCKET/PREFIX")
    if prefix and (not _PREFIX.match(prefix) or {".", ".."} & set(prefix.split("/"))):
        raise ConfigError(f"{given}: a prefix is names between single slashes, of letters, digits and . _ - = + @ ,")
    return ObjectUrl(f"{scheme}:", bucket, *(prefix.split("/") if prefix else ()))


def store_place(text: str | os.PathLike[str]) -> Path:
    """Return the absolute location of a job's ``store:`` setting, with ``~`` expanded."""
    location = place_of(text)
    return location if is_url(location) else Path(os.path.abspath(location.expanduser()))  # noqa: PTH100


def beside(place: Path, suffix: str) -> Path:
    """Return the local file named like the store plus ``suffix``: in its parent directory, or for s3 in the cwd."""
    return Path.cwd() / f"{place.name}{suffix}" if is_url(place) else Path(f"{place}{suffix}")


def is_url(place: Path) -> bool:
    """Return whether the location is in an object store."""
    return isinstance(place, ObjectUrl)


def files_at(place: str | os.PathLike[str], options: ObjectOptions | None = None) -> Files:
    """Open the files at a location. ConfigError if it is invalid, UnsupportedError if it needs a missing library."""
    location = place_of(place)
    if not isinstance(location, ObjectUrl):
        return LocalFiles(location)
    from store.storage.bucket import Bucket
    from store.storage.object_store import ObjectFiles

    bucket = Bucket(location.bucket, options or ObjectOptions(), location.parts[0].removesuffix(":"))
    return ObjectFiles(location, bucket, location.prefix)


Kind = Literal["local", "shared", "passing", "container", "unknown"]
"""``passing``: gone after a reboot. ``container``: gone with the container. ``local``: of one machine. ``shared``: of
all machines that mount it."""

_KINDS: Mapping[Kind, frozenset[str]] = {
    "shared": frozenset(
        {"nfs", "nfs4", "lustre", "gpfs", "ceph", "fuse.ceph-fuse", "beegfs", "glusterfs", "fuse.glusterfs", "cifs"}
        | {"smb3", "9p", "virtiofs", "afs", "orangefs", "pvfs2", "wekafs", "weka", "daos", "fuse.daos", "fuse.juicefs"}
        | {"quobyte", "fuse.quobyte", "vast", "gfs2", "ocfs2"}
    ),
    "passing": frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs"}),
    "container": frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"}),
    "local": frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs"}),
}


@dataclass(frozen=True)
class Mount:
    """Mounted filesystem: its type ``name`` in the kernel's terms, and its mount ``point``."""

    name: str
    point: str

    @property
    def kind(self) -> Kind:
        """Kind of the filesystem; ``unknown`` for FUSE filesystems and types that are not listed here."""
        return next((kind for kind, names in _KINDS.items() if self.name in names), "unknown")

    @property
    def loss(self) -> str | None:
        """Event that loses the files without a disk failure; None if there is none."""
        return {"passing": "a reboot empties it", "container": "it goes with the container"}.get(self.kind)


def free_bytes(files: Files) -> int | None:
    """Return the bytes that this user can still write; None if unknown, as in an object store."""
    root = getattr(files, "root", None)
    if root is None or is_url(root):
        return None
    try:
        found = os.statvfs(root)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def mount_of(path: str | os.PathLike[str]) -> Mount | None:
    """Return the mount of ``path``, which need not exist; None if the mounts cannot be listed."""
    place = os.path.realpath(path)
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return None
    above = [one for one in mounts if one.mountpoint in ("/", place) or place.startswith(f"{one.mountpoint}/")]
    if not above:
        return None
    # Of two mounts on the same point the later one hides the earlier one.
    longest = max(enumerate(above), key=lambda item: (len(item[1].mountpoint), item[0]))[1]
    return Mount(longest.fstype, longest.mountpoint)
