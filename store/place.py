"""Where a store is: a directory, or a prefix in a bucket; and the files there.

A bucket's place has the manners of a path, so that whoever hands places on, shows them or compares them need not ask
which it is. It knows no store's format.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PosixPath

from store.errors import ConfigError
from store.files import Files, LocalFiles
from store.objects.options import ObjectOptions

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?!/)(.*)\Z", re.DOTALL)
"""With one slash, too: a path that was made of a URL has lost the other."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]\Z")
_PREFIX = re.compile(r"[\w.=+@,-]+(/[\w.=+@,-]+)*\Z", re.ASCII)


class ObjectUrl(PosixPath):
    """``s3://bucket/prefix``: a path that is absolute wherever one stands, and at which no directory of this machine
    is. Opening it as a file finds nothing."""

    @property
    def bucket(self) -> str:
        """The bucket's name."""
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
        """Itself."""
        return self

    def resolve(self, strict: bool = False) -> ObjectUrl:  # noqa: ARG002
        """Itself."""
        return self

    def expanduser(self) -> ObjectUrl:
        """Itself."""
        return self

    def exists(self, **_: bool) -> bool:
        """False: nothing of this machine is there."""
        return False

    def is_dir(self, **_: bool) -> bool:
        """As :meth:`exists`."""
        return False

    def is_file(self, **_: bool) -> bool:
        """As :meth:`exists`."""
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
    from store.objects.files import ObjectFiles

    return ObjectFiles(found, found.bucket, found.prefix, options or ObjectOptions())
