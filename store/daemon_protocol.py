"""Define the messages of the node daemon, one JSON object a line, and connect to its Unix socket.

The client sends first: a trainer ``hello``, later ``note`` and ``bye``; the command line ``status`` or ``stop``.
Messages carry the protocol version, and the daemon refuses other versions than its own. Unknown keys are ignored, so
that a later release can add some without a new version. The daemon detects a dead trainer by the end of its process.

There is one socket for each user and base, in a folder of mode 0700, so that only this user can answer there."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Struct

from store.errors import DaemonError
from store.memory.layout import home, require_own
from store.schema import Digest, Natural, Positive, SaveName, learn

VERSION = 1
LINE_LIMIT = 1 << 16  # largest line to the daemon, in bytes
ANSWER_LIMIT = 1 << 24  # largest line from the daemon, in bytes
_SOCKET_PATH_LIMIT = 107  # longest path of a socket on Linux, in bytes

AbsolutePath = Annotated[str, Meta(pattern=r"^/", max_length=4096)]


class Message(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all messages."""

    version: Natural = VERSION


class Register(Message, frozen=True, kw_only=True, tag="hello"):
    """Registers a trainer, one rank of a job. ``epoch`` is the first it claimed, ``base`` its shared memory."""

    pid: Natural
    rank: Natural
    world_size: Positive
    store: AbsolutePath
    store_id: Digest
    epoch: Natural
    base: AbsolutePath


class StatusUpdate(Message, frozen=True, kw_only=True, tag="note"):
    """Reports the newest commit and the newest in-memory version that all ranks have, as this rank knows them."""

    committed: SaveName | None = None
    memory: SaveName | None = None


class Unregister(Message, frozen=True, kw_only=True, tag="bye"):
    """Unregisters a trainer. ``clean``: it ended normally and left nothing to rescue."""

    clean: bool


class AskStatus(Message, frozen=True, kw_only=True, tag="status"):
    """Asks for a :class:`Report`."""


class AskStop(Message, frozen=True, kw_only=True, tag="stop"):
    """Asks the daemon to finish a running rescue and exit; answered by :class:`ShuttingDown`."""


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Accepts a trainer."""

    pid: Natural


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """Refuses a request; the daemon then closes the connection."""

    why: str


class ShuttingDown(Message, frozen=True, kw_only=True, tag="leaving"):
    """The daemon exits on request or because it is idle; clients should not start another one."""

    pid: Natural


class JobReport(Struct, frozen=True, kw_only=True):
    """A job on this node, with its live and dead ranks and their last :class:`StatusUpdate`."""

    store: str
    store_id: str
    epoch: int
    world_size: int
    alive: tuple[int, ...]
    dead: tuple[int, ...]
    state: str  # ``training``, ``dying`` (some ranks died, the others may follow), ``waiting`` or ``rescuing``
    committed: str | None = None
    committed_at: float | None = None
    memory: str | None = None


class RescueReport(Struct, frozen=True, kw_only=True):
    """Outcome of one rescue. ``at`` is in seconds since 1970, for people."""

    store: str
    outcome: str
    why: str
    seconds: float
    at: float


class Report(Message, frozen=True, kw_only=True, tag="report"):
    """State of the daemon. ``port`` and ``url`` are those of its metrics, None if it serves none."""

    pid: Natural
    base: str
    started: str
    port: int | None
    url: str | None = None
    jobs: tuple[JobReport, ...]
    rescues: tuple[RescueReport, ...]
    refused: int


ClientMessage = Register | StatusUpdate | Unregister | AskStatus | AskStop
DaemonMessage = Welcome | Refused | ShuttingDown | Report
learn(ClientMessage, DaemonMessage)

_OF_EVERY_VERSION = ("refused", "stop", "leaving")  # kinds; what ends a daemon of another release


def to_line(message: Message) -> bytes:
    """Return the line of a message."""
    return msgspec.json.encode(message) + b"\n"


def parse_client_message(line: bytes) -> ClientMessage:
    """Parse a line to the daemon. Raises DaemonError if it is invalid."""
    return cast("ClientMessage", _parse(line, LINE_LIMIT, ClientMessage, "the client"))


def parse_daemon_message(line: bytes) -> DaemonMessage:
    """Parse a line from the daemon. Raises DaemonError if it is invalid."""
    try:
        return cast("DaemonMessage", _parse(line, ANSWER_LIMIT, DaemonMessage, "the daemon"))
    except DaemonError as error:
        raise DaemonError(f"the daemon's answer is invalid: {error}") from error


def _parse(line: bytes, limit: int, messages: Any, sender: str) -> Any:
    if len(line) > limit:
        raise DaemonError(f"a line of more than {limit} bytes")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DaemonError("a line that is no JSON") from error
    if not isinstance(body, dict):
        raise DaemonError("a line that is no JSON object")
    version = body.get("version", VERSION)
    if version != VERSION and body.get("kind") not in _OF_EVERY_VERSION:
        raise DaemonError(
            f"{sender} speaks version {version!r} of the daemon's protocol, this release {VERSION}: end the daemon "
            "with `driftpoint daemon stop`, and let a job of the newer release start it"
        )
    try:
        return msgspec.convert(body, messages)
    except msgspec.ValidationError as error:
        raise DaemonError(f"no message of this protocol: {error}") from error


def socket_path(base: Path) -> Path:
    """Return the path of the daemon's socket. Raises DaemonError if it is too long for one."""
    path = home(base) / "daemon.sock"
    if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT:
        raise DaemonError(
            f"{path} is too long for a socket, which may have {_SOCKET_PATH_LIMIT} bytes: set a shorter "
            "`memory: {path: ...}`"
        )
    return path


def log_path(base: Path) -> Path:
    """Return the path of the log of a daemon that a job started."""
    return home(base) / "daemon.log"


def connect(base: Path, timeout: float) -> socket.socket:
    """Connect to the daemon. Raises DaemonError if none answers."""
    path = socket_path(base)
    require_own(path.parent)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        _connect(connection, path, time.monotonic() + timeout)
    except OSError as error:
        connection.close()
        raise DaemonError(
            f"no daemon answers at {path} ({error.strerror or error}): start one with `driftpoint daemon run`"
        ) from error
    return connection


def _connect(connection: socket.socket, path: Path, deadline: float) -> None:
    while True:
        try:
            return connection.connect(str(path))
        except BlockingIOError:  # the backlog is full; the system does not block here
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)


def query_daemon(base: Path, question: Message, timeout: float) -> DaemonMessage:
    """Send one message and return the daemon's answer. Raises DaemonError if there is none."""
    with connect(base, timeout) as link:
        try:
            with suppress(BrokenPipeError):  # a daemon that refuses this user may have answered and closed already
                link.sendall(to_line(question))
            with link.makefile("rb") as stream:
                line = stream.readline(ANSWER_LIMIT + 1)
        except OSError as error:
            raise DaemonError(f"the daemon did not answer within {timeout:g} s: {error}") from error
    if not line.endswith(b"\n"):
        raise DaemonError("the daemon ended before it had answered")
    return parse_daemon_message(line)
