"""Messages and socket of the node daemon.

What trainers, the command line and the daemon of a node say to each other: one JSON object a line.

Whoever connects speaks first: a trainer says ``hello``, and later ``note`` and ``bye``; the command line asks for
``status`` or says ``stop``. These and the daemon's answers carry the version of the protocol, and the daemon refuses
another one than its own. Lines to the daemon are short; its report may be longer. Unknown keys are ignored, so that a
later release may add some without a new version.

That a trainer died is no message: the daemon sees its process end.

How the processes of a node find the daemon beside them, and what they say to each other. No process, no thread.

place      where its socket is, and how to connect to it
messages   what goes over it: one JSON object a line

Where the daemon of a node is reached: a socket beside the memory of all stores, one for each user and base.

It knows names and permissions, and how to connect. The folder is this user's own (mode 0700), so that what answers
there is of this user.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from store.errors import DaemonError, StorageError
from store.memory.layout import home, require_own
from store.schema import Digest, Natural, SaveName

VERSION = 1
"""Of the protocol."""

LINE_LIMIT = 1 << 16
"""Bytes of a line to the daemon."""

ANSWER_LIMIT = 1 << 24
"""Bytes of a line from it."""

Place = Annotated[str, StringConstraints(pattern=r"^/", max_length=4096)]
"""An absolute path."""


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Register(Message):
    """A trainer: one rank of a job. epoch: that it claimed first. base: where its shared memory is."""

    kind: Literal["hello"] = "hello"
    version: Natural = VERSION
    pid: Natural
    rank: Natural
    world_size: Annotated[int, Field(ge=1)]
    store: Place
    store_id: Digest
    epoch: Natural
    base: Place


class StatusUpdate(Message):
    """What this rank knows of its job: the newest commit, and the newest version in memory that all ranks have."""

    kind: Literal["note"] = "note"
    committed: SaveName | None = None
    memory: SaveName | None = None


class Unregister(Message):
    """A trainer's last word. clean: it ends as it was meant to, and left nothing that anybody should write."""

    kind: Literal["bye"] = "bye"
    clean: bool


class AskStatus(Message):
    """From the command line; answered by a :class:`Report`."""

    kind: Literal["status"] = "status"
    version: Natural = VERSION


class AskStop(Message):
    """From the command line: finish the rescue under way, and end. Answered by :class:`ShuttingDown`."""

    kind: Literal["stop"] = "stop"
    version: Natural = VERSION


class Welcome(Message):
    """To a trainer."""

    kind: Literal["welcome"] = "welcome"
    version: Natural = VERSION
    pid: Natural


class Refused(Message):
    """The daemon's last word on a connection."""

    kind: Literal["refused"] = "refused"
    version: Natural = VERSION
    why: str


class ShuttingDown(Message):
    """The daemon ends because it was asked to, or because nobody needed it: no reason to start another one."""

    kind: Literal["leaving"] = "leaving"
    version: Natural = VERSION
    pid: Natural


class JobReport(Message):
    """A job on this node. alive, dead: ranks. committed, memory: as its ranks told. state: ``training``, ``dying``
    (some ranks are gone, the others are waited for), ``waiting`` or ``rescuing``."""

    store: str
    store_id: str
    epoch: int
    world_size: int
    alive: tuple[int, ...]
    dead: tuple[int, ...]
    state: str
    committed: str | None = None
    committed_at: float | None = None
    memory: str | None = None


class RescueReport(Message):
    """What became of one. at: seconds since 1970, for people."""

    store: str
    outcome: str
    why: str
    seconds: float
    at: float


class StoreReport(Message):
    """What the daemon verified of a store. damage: what it found, newest last."""

    store: str
    store_id: str
    verified: int
    damaged: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()


class Report(Message):
    """All that the daemon knows. port, url: of its metrics, None where it could not have one."""

    kind: Literal["report"] = "report"
    version: Natural = VERSION
    pid: Natural
    base: str
    started: str
    port: int | None
    url: str | None = None
    jobs: tuple[JobReport, ...]
    rescues: tuple[RescueReport, ...]
    stores: tuple[StoreReport, ...]
    verified_bytes: int
    verifying: str | None
    refused: int


ToDaemon = Annotated[Register | StatusUpdate | Unregister | AskStatus | AskStop, Field(discriminator="kind")]
FromDaemon = Annotated[Welcome | Refused | ShuttingDown | Report, Field(discriminator="kind")]

_to_daemon: TypeAdapter[Register | StatusUpdate | Unregister | AskStatus | AskStop] = TypeAdapter(ToDaemon)
_from_daemon: TypeAdapter[Welcome | Refused | ShuttingDown | Report] = TypeAdapter(FromDaemon)


def to_line(message: Message) -> bytes:
    """The line that says it."""
    return message.model_dump_json().encode() + b"\n"


def parse_client_message(line: bytes) -> Register | StatusUpdate | Unregister | AskStatus | AskStop:
    """What a line to the daemon says. DaemonError for anything else."""
    body = _body(line, LINE_LIMIT)
    _require_version(body, "it")
    try:
        return _to_daemon.validate_python(body, strict=False)
    except ValidationError as error:
        raise DaemonError(f"no message of this protocol: {_first(error)}") from error


def parse_daemon_message(line: bytes) -> Welcome | Refused | ShuttingDown | Report:
    """What a line from the daemon says. DaemonError for anything else."""
    try:
        body = _body(line, ANSWER_LIMIT)
    except DaemonError as error:
        raise DaemonError(f"the daemon answered what cannot be understood: {error}") from error
    if body.get("kind") != "refused":
        _require_version(body, "the daemon")
    try:
        return _from_daemon.validate_python(body, strict=False)
    except ValidationError as error:
        raise DaemonError(f"the daemon answered what cannot be understood: {_first(error)}") from error


def _body(line: bytes, limit: int) -> dict[str, Any]:
    if len(line) > limit:
        raise DaemonError(f"a line of more than {limit} bytes")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DaemonError("a line that is no JSON") from error
    if not isinstance(body, dict):
        raise DaemonError("a line that is no JSON object")
    return body


def _require_version(body: dict[str, Any], who: str) -> None:
    version = body.get("version", VERSION)
    if version != VERSION:
        raise DaemonError(
            f"{who} speaks version {version!r} of the daemon's protocol, this release speaks {VERSION}: end the daemon "
            "with `driftpoint daemon stop`, and let a job of the newer release start it"
        )


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(step) for step in first['loc'])}: {first['msg']}"


_LONGEST = 107
"""Bytes of a socket's path that Linux takes."""


def socket_path(base: Path) -> Path:
    """Of the daemon's socket. DaemonError where no socket can have such a path."""
    path = home(base) / "daemon.sock"
    if len(os.fsencode(path)) > _LONGEST:
        raise DaemonError(
            f"{path} is too long for a socket, which may have {_LONGEST} bytes: set a shorter `memory: {{path: ...}}`"
        )
    return path


def lock_path(base: Path) -> Path:
    """Locked by the daemon as long as it lives."""
    return home(base) / "daemon.lock"


def log_path(base: Path) -> Path:
    """Where a daemon that a job started writes its log."""
    return home(base) / "daemon.log"


def make_home(base: Path) -> Path:
    """The folder of this user below ``base``, made where it is not there. StorageError where it is not its own."""
    place = home(base)
    try:
        place.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {place}: {error.strerror}") from error
    require_own(place)
    return place


def connect(base: Path, timeout: float) -> socket.socket:
    """A connection to the daemon. DaemonError where there is none."""
    path = socket_path(base)
    require_own(path.parent)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.settimeout(timeout)
        _connect(found, path, time.monotonic() + timeout)
    except OSError as error:
        found.close()
        raise DaemonError(
            f"no daemon answers at {path} ({error.strerror or error}): start one with `driftpoint daemon run`"
        ) from error
    return found


def _connect(link: socket.socket, path: Path, deadline: float) -> None:
    while True:
        try:
            link.connect(str(path))
        except BlockingIOError:  # too many wait to be accepted; the system does not let us wait with them
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
        else:
            return


def query_daemon(base: Path, question: Message, timeout: float) -> Welcome | Refused | ShuttingDown | Report:
    """The daemon's answer to one question. DaemonError where there is none."""
    with connect(base, timeout) as link:
        try:
            link.sendall(to_line(question))
            with link.makefile("rb") as stream:
                line = stream.readline(ANSWER_LIMIT + 1)
        except OSError as error:
            raise DaemonError(f"the daemon did not answer within {timeout:g} s: {error}") from error
    if not line.endswith(b"\n"):
        raise DaemonError("the daemon ended before it had answered")
    return parse_daemon_message(line)
