"""Register the trainer with the node daemon and report its commits and in-memory snapshots.

The training thread only records updates; a background thread connects, starts a daemon if there is none, and sends. If
the daemon is lost, training continues and saves by itself; the failure is logged once and counted. In a forked child
(a data-loader worker) the client does nothing."""

import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from monitor.config.schema import DaemonSettings
from monitor.events import AttachEvent, CommitEvent, MemoryEvent, SaveListener
from monitor.telemetry.metrics import Metrics
from store import daemon_protocol as protocol
from store.errors import DaemonError, DriftpointError, StorageError
from store.memory.arena import Owner
from store.memory.layout import home, make_home
from store.metrics_server import EndpointSecurity

_log = logging.getLogger("driftpoint")

_CONNECT_TIMEOUT = 1.0  # all times in seconds
_MESSAGE_TIMEOUT = 10.0  # for the daemon to take or send a line
_START_TIMEOUT = 60.0
_MAX_STARTS, _START_PERIOD = 3, 3600.0  # daemons that one trainer starts in a period
_RETRY_DELAY = 10.0  # least time between two attempts to connect; a further one also needs a new update
_POLL_INTERVAL = 0.1
_CLOSE_TIMEOUT = 1.0  # for the final message at the end of a job


class _ConnectionLostError(Exception):
    """The daemon is gone."""


class DaemonClient(SaveListener):
    """Connects one rank to the daemon of its node. Does nothing until the job is attached, or if disabled.

    base: folder of shared memory. security: protects the metrics endpoint of a daemon that this client starts."""

    def __init__(
        self, settings: DaemonSettings, base: str, metrics: Metrics, security: EndpointSecurity | None = None
    ) -> None:
        self._settings, self._metrics = settings, metrics
        self._base = Path(os.path.abspath(base))  # noqa: PTH100 - links stay as they are named
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._status, self._unsent = protocol.StatusUpdate(), False
        self._unregister: protocol.Unregister | None = None
        self._wake = -1
        self._register: protocol.Register | None = None
        self._starter = _DaemonStarter(self._base, settings, security or EndpointSecurity())
        self._may_start = settings.start
        self._received = b""  # an incomplete line of the daemon's
        self._last_warning = ""

    def on_attach(self, event: AttachEvent) -> None:
        if not self._settings.enabled or event.store_id is None or self._thread is not None:
            return
        self._register = protocol.Register(pid=self._pid, base=str(self._base), **vars(event))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._work, name="driftpoint-daemon-link", daemon=True)
        self._thread.start()

    def on_commit(self, event: CommitEvent) -> None:
        self._update(lambda status: replace(status, committed=event.save.name))

    def on_memory(self, event: MemoryEvent) -> None:
        snapshot = event.snapshot
        if snapshot is not None:
            self._update(lambda status: replace(status, memory=snapshot.name))

    def on_close(self, clean: bool, timeout: float) -> None:  # noqa: ARG002 - the event's
        if self._thread is None or os.getpid() != self._pid:
            return
        with self._lock:
            self._unregister = self._unregister or protocol.Unregister(clean=clean)
        self._wake_thread()
        self._thread.join(_CLOSE_TIMEOUT)

    def _update(self, change: Callable[[protocol.StatusUpdate], protocol.StatusUpdate]) -> None:
        if self._thread is None or os.getpid() != self._pid:
            return
        with self._lock:
            self._status, self._unsent = change(self._status), True
        self._wake_thread()

    def _wake_thread(self) -> None:
        with suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # Everything below runs in the client's thread.

    def _work(self) -> None:
        try:
            while not self._closing():
                self._run_connection()
        except Exception as error:  # noqa: BLE001 - the thread's edge: logged, and training continues
            self._warn(f"daemon client stopped after an unexpected error, saves continue: {error!r}")
        finally:
            self._starter.close()

    def _run_connection(self) -> None:
        """Connect and send updates until the connection ends; then wait until another attempt is due."""
        try:
            with self._connect() as connection:
                self._received = b""
                try:
                    self._handshake(connection)
                except _ConnectionLostError as error:  # a daemon that was about to exit
                    if isinstance(error.__cause__, TimeoutError):  # or it hangs
                        raise
                    time.sleep(_POLL_INTERVAL)
                    return
                self._serve(connection)
            return
        except _ConnectionLostError as error:
            self._warn(str(error))
            return
        except DriftpointError as error:
            self._warn(str(error))
        self._wait(_RETRY_DELAY)
        self._wait(None)

    def _connect(self) -> socket.socket:
        try:
            return protocol.connect(self._base, _CONNECT_TIMEOUT)
        except DaemonError:
            if not self._may_start or not self._starter.may_start():
                raise
        return self._starter.start(self._closing)

    def _handshake(self, connection: socket.socket) -> None:
        assert self._register is not None
        connection.settimeout(_MESSAGE_TIMEOUT)
        self._send(connection, self._register)
        self._receive(connection)
        self._last_warning = ""
        with self._lock:
            self._unsent = True

    def _serve(self, connection: socket.socket) -> None:
        """Send updates and read messages until the job ends or the connection is lost."""
        while True:
            with self._lock:
                unsent, self._unsent = self._unsent, False
                status, last = self._status, self._unregister
            if unsent or last is not None:
                self._send(connection, status)
            if last is not None:
                self._send(connection, last)
                return
            ready, _, _ = select.select([connection.fileno(), self._wake], [], [])
            if self._wake in ready:
                self._clear_wake()
            if connection.fileno() in ready:
                self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(protocol.LINE_LIMIT)
        except OSError as error:
            raise _ConnectionLostError(f"the node daemon is gone: {error}") from error
        if not data:
            raise _ConnectionLostError(
                "the node daemon is gone: saves continue, but in-memory snapshots are not rescued if this job dies now"
            )
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > protocol.LINE_LIMIT:
            raise DaemonError(f"the daemon sent a line longer than {protocol.LINE_LIMIT} bytes")
        for line in lines:
            message = protocol.parse_daemon_message(line)
            if isinstance(message, protocol.Refused):
                self._may_start = False
                raise DaemonError(f"the node daemon refused this job: {message.why}")
            if isinstance(message, protocol.ShuttingDown):
                self._may_start = False  # stopped on request, or unused
                raise DaemonError(f"the node daemon (process {message.pid}) is asked to stop; this job starts no other")

    def _send(self, connection: socket.socket, message: protocol.Message) -> None:
        try:
            connection.sendall(protocol.to_line(message))
        except OSError as error:
            self._receive(connection)  # its last message may give the reason
            raise _ConnectionLostError(f"the node daemon is gone: {error}") from error

    def _closing(self) -> bool:
        with self._lock:
            return self._unregister is not None

    def _wait(self, seconds: float | None) -> None:
        """Wait for an update or the end of the job; with ``seconds`` for the end alone."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._closing() and not (deadline is None and self._unsent):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._wake], [], [], left)[0]:
                return
            self._clear_wake()

    def _clear_wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _warn(self, text: str) -> None:
        """Log a failure once, until another one occurs."""
        if text != self._last_warning and not self._closing():
            self._metrics.counter("failures").labels("daemon").inc()
            _log.warning("%s", text)
        self._last_warning = text


class _DaemonStarter:
    """Starts daemons, at a limited rate. Client's thread only."""

    def __init__(self, base: Path, settings: DaemonSettings, security: EndpointSecurity) -> None:
        self._base, self._settings, self._security = base, settings, security
        self._times: deque[float] = deque(maxlen=_MAX_STARTS)
        self._process: subprocess.Popen[bytes] | None = None

    def may_start(self) -> bool:
        return len(self._times) < _MAX_STARTS or time.monotonic() - self._times[0] > _START_PERIOD

    def start(self, closing: Callable[[], bool]) -> socket.socket:
        """Connect to a daemon that this or another process of the node starts. Raises DaemonError, StorageError."""
        make_home(self._base)
        lock: Owner | None = None
        with suppress(StorageError):  # another rank starts it: wait for that one
            lock = Owner(home(self._base) / "daemon.starting")
        try:
            if lock is not None:
                self._times.append(time.monotonic())
                self._spawn()
            return self._wait_for_daemon(self._process if lock is not None else None, closing)
        finally:
            if lock is not None:
                lock.release()

    def close(self) -> None:
        """Detach from the daemon, which keeps running."""
        if self._process is not None:
            self._process.poll()
            self._process.returncode = self._process.returncode or 0  # no ResourceWarning that it still runs

    def _spawn(self) -> None:
        if self._process is not None:
            self._process.poll()
        command, null = self._settings.command(self._base, self._security), subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
        except OSError as error:
            raise DaemonError(f"the node daemon could not be started: {error}") from error

    def _wait_for_daemon(self, process: subprocess.Popen[bytes] | None, closing: Callable[[], bool]) -> socket.socket:
        deadline = time.monotonic() + _START_TIMEOUT
        while True:
            try:
                return protocol.connect(self._base, _CONNECT_TIMEOUT)
            except DaemonError as error:
                code = None if process is None else process.poll()
                if code is not None or time.monotonic() >= deadline or closing():
                    why = f"it exited with code {code}" if code is not None else f"no answer after {_START_TIMEOUT:g} s"
                    raise DaemonError(
                        f"the node daemon could not be started ({why}); see {protocol.log_path(self._base)}, or run "
                        f"`driftpoint daemon run --memory {self._base}` yourself"
                    ) from error
            time.sleep(_POLL_INTERVAL)
