"""Daemon process: single-instance lock, socket server, peer identification, signals, and start-up.

One daemon per user and base directory: the lock decides, and an existing socket without the lock is replaced. One
asyncio thread. No message ends the daemon: an invalid one closes its connection and is counted. Forked children
(data-loader workers) keep a dead trainer's connection open, so processes are watched by pidfd instead."""

import asyncio
import errno
import logging
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.daemon.metrics import DaemonMetrics
from deploy.daemon.node import Node, NodeJob, Options, RankConnection
from store import daemon_protocol as protocol
from store.errors import DaemonError, StorageError, system_errors
from store.memory.arena import Owner
from store.memory.layout import home, make_home

_PIDFD = getattr(socket, "SO_PEERPIDFD", 77)
"""Since Linux 6.5. Before, the descriptor is opened by pid, and a process that just ended could be missed."""

_log = logging.getLogger("driftpoint")
CONNECTIONS = 128  # most connections at a time; a node has one per rank
_BACKLOG = 256  # connections queued by the kernel
_FIRST_MESSAGE_SECONDS = 10.0  # seconds until the first message must arrive
_SEND_SECONDS = 5.0  # seconds for a client to receive a message
_DEATHS_SECONDS = 2.0  # seconds to wait, after a signal, for trainers that were signalled too
_CLEANUP_SECONDS = 3600.0  # seconds between cleanups of old snapshots
_ANSWER_SECONDS = 1.0  # seconds for a running daemon to answer


class InstanceLock:
    """Lock and socket of the daemon, held until :meth:`release`. Raises DaemonError if a daemon runs already."""

    def __init__(self, base: Path) -> None:
        self._path = protocol.socket_path(base)
        make_home(base)
        try:
            self._lock = Owner(home(base) / "daemon.lock")
        except StorageError as error:
            raise DaemonError(f"a daemon runs for {base}: see `driftpoint daemon status --memory {base}`") from error
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self._path.unlink(missing_ok=True)
            self.socket.bind(str(self._path))
            self._path.chmod(0o600)
            self.socket.listen()
            self._inode = self._path.stat().st_ino
        except OSError as error:
            self.socket.close()
            self._lock.release()
            raise StorageError(f"cannot listen at {self._path}: {error.strerror or error}") from error

    def is_reachable(self) -> bool:
        """Return whether clients can still reach the socket: its file exists and is the same."""
        with suppress(OSError):
            return self._path.stat().st_ino == self._inode
        return False

    def release(self) -> None:
        if self.is_reachable():
            with suppress(OSError):
                self._path.unlink()
        self.socket.close()
        self._lock.release()


def peer_pid(connection: socket.socket) -> int:
    """Return the connected process. Raises DaemonError if it is another user's or in another pid namespace."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    if uid != os.getuid():
        raise DaemonError(f"this daemon serves user {os.getuid()}, not user {uid}: start your own daemon")
    if pid <= 0:
        raise DaemonError("the client's process is not visible (another container?): run the daemon there")
    return int(pid)


def process_end_fd(connection: socket.socket, pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, None if it has ended. Raises DaemonError."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _PIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return None
    with system_errors("watch", f"process {pid}", kind=DaemonError), suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None


@dataclass(eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    joined: tuple[NodeJob, RankConnection] | None = None


class Daemon:
    """Serves one base directory."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._metrics = DaemonMetrics()
        self._connections: set[_Connection] = set()
        self._deaths_seconds = 0.0

    def run(self) -> None:
        """Serve until asked to stop. Raises DaemonError if a daemon runs already, StorageError without a socket."""
        hold = InstanceLock(self._options.base)
        try:
            asyncio.run(self._main(hold))
        finally:
            self._metrics.close()
            hold.release()

    async def _main(self, hold: InstanceLock) -> None:
        self._ending = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        self._hold = hold
        self._metrics.serve(self._options.host, self._options.port, self._options.security)
        self._node = Node(self._options, self._metrics)
        self._node.rescue_leftovers()
        limit = protocol.LINE_LIMIT
        server = await asyncio.start_unix_server(self._serve, sock=hold.socket, limit=limit, backlog=_BACKLOG)
        ticking = asyncio.create_task(self._tick())
        _log.info("daemon %d serves %s, metrics at %s", os.getpid(), self._options.base, self._metrics.url)
        await self._ending.wait()
        ticking.cancel()
        server.close()
        await self._shut_down()

    def _on_signal(self) -> None:
        self._deaths_seconds = min(_DEATHS_SECONDS, self._options.grace)
        self._ending.set()

    async def _shut_down(self) -> None:
        """Notify the clients, finish the current rescue, and rescue jobs that died until now."""
        for one in list(self._connections):
            if self._hold.is_reachable():  # else trainers should look for another one
                await self._send(one, protocol.ShuttingDown(pid=os.getpid()))
            one.writer.close()
        await self._node.wait_for_deaths(self._deaths_seconds)
        if not await self._node.rescuer.end(self._options.grace):
            text = "the rescue in progress did not finish within %.0f s; the next daemon completes it"
            _log.warning(text, self._options.grace)
        _log.info("daemon %d exits", os.getpid())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(reader, writer)
        self._connections.add(connection)
        try:
            if len(self._connections) > CONNECTIONS:
                await self._refuse(connection, "too many", f"more than {CONNECTIONS} connections")
            else:
                await self._handle_client(connection)
        except DaemonError as error:
            await self._refuse(connection, "misunderstood", str(error))
        except (OSError, asyncio.IncompleteReadError):
            pass  # disconnected; the end of its process is watched separately
        finally:
            self._connections.discard(connection)
            if connection.joined is not None:
                self._node.disconnected(*connection.joined)
            with suppress(OSError):
                writer.close()

    async def _handle_client(self, connection: _Connection) -> None:
        pid = peer_pid(connection.writer.get_extra_info("socket"))
        try:
            first = await asyncio.wait_for(self._receive(connection), _FIRST_MESSAGE_SECONDS)
        except TimeoutError as error:
            raise DaemonError(f"no message within {_FIRST_MESSAGE_SECONDS:g} s") from error
        if isinstance(first, protocol.AskStatus):
            await self._send(connection, self._node.report())
        elif isinstance(first, protocol.AskStop):
            _log.info("stop requested by process %d", pid)
            await self._send(connection, protocol.ShuttingDown(pid=os.getpid()))
            self._ending.set()
        elif isinstance(first, protocol.Register):
            end = process_end_fd(connection.writer.get_extra_info("socket"), pid)
            connection.joined = self._node.join(first, pid, end)
            await self._send(connection, protocol.Welcome(pid=os.getpid()))
            await self._listen(connection, *connection.joined)
        else:
            raise DaemonError("the first message must be hello, status or stop")

    async def _listen(self, connection: _Connection, job: NodeJob, member: RankConnection) -> None:
        while True:
            message = await self._receive(connection)
            if isinstance(message, protocol.StatusUpdate):
                job.apply(message, time.time())
            elif isinstance(message, protocol.Unregister):
                member.clean = message.clean
            else:
                raise DaemonError("after hello, a trainer may send only note or bye")

    async def _receive(self, connection: _Connection) -> protocol.ClientMessage:
        try:
            return protocol.parse_client_message(await connection.reader.readuntil(b"\n"))
        except asyncio.LimitOverrunError as error:
            raise DaemonError(f"a message exceeds {protocol.LINE_LIMIT} bytes") from error

    async def _send(self, connection: _Connection, message: protocol.Message) -> None:
        """Send a message, without waiting for a client that does not read."""
        with suppress(OSError, TimeoutError):
            connection.writer.write(protocol.to_line(message))
            await asyncio.wait_for(connection.writer.drain(), _SEND_SECONDS)

    async def _refuse(self, connection: _Connection, reason: str, why: str) -> None:
        self._node.refused += 1
        self._metrics.refused.labels(reason).inc()
        if self._node.refused <= 100 or not self._node.refused % 1000:
            _log.warning("a connection was refused: %s", why)
        await self._send(connection, protocol.Refused(why=why))

    async def _tick(self) -> None:
        cleaned, idle = time.monotonic() - _CLEANUP_SECONDS + 60.0, self._options.exit_idle
        while True:
            await asyncio.sleep(0.5)
            self._metrics.show(self._node.report(), self._options.base)
            if not self._hold.is_reachable():
                _log.error("the socket of this daemon was removed: it is unreachable and exits")
                self._ending.set()
            if idle is not None and self._node.idle_seconds() >= idle:
                _log.info("no job for %.0f s", idle)
                self._ending.set()
            if time.monotonic() - cleaned >= _CLEANUP_SECONDS and not self._node.rescuer.busy:
                cleaned = time.monotonic()
                await self._node.clean()


def ensure_daemon(base: Path, command: Sequence[str]) -> str | None:
    """Start a daemon at ``base`` with ``command`` unless one runs.

    Does not wait: a failure is in its log. Returns a message on the start or failure, None if a daemon was running."""
    try:
        make_home(base)
        protocol.connect(base, _ANSWER_SECONDS).close()
    except StorageError as error:
        return f"no daemon: {error}"
    except DaemonError:  # none answers
        nothing = subprocess.DEVNULL
        try:
            made = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
        except OSError as error:
            return f"cannot start the node daemon: {error}"
        return f"started the node's daemon (process {made.pid})"
    return None
