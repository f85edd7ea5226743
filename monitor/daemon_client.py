"""A trainer's word with the daemon of its node: that it lives, what is committed, what is in memory, and goodbye.

The training thread only notes; a thread of its own does everything that may take time: connecting, starting a daemon
where there is none, noticing that it is gone. Whatever happens to the daemon, training goes on and saves by itself; it
is said once in the log and counted. A forked child (a data-loader worker) has a copy of this that does nothing.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from monitor.config.schema import DaemonSettings
from monitor.events import AttachEvent, CommitEvent, MemoryEvent, SaveListener
from monitor.telemetry.metrics import Metrics
from store.daemon_protocol import (
    LINE_LIMIT,
    Message,
    Refused,
    Register,
    ShuttingDown,
    StatusUpdate,
    Unregister,
    connect,
    log_path,
    make_home,
    parse_daemon_message,
    to_line,
)
from store.errors import DaemonError, DriftpointError, StorageError
from store.memory.arena import Owner
from store.memory.layout import home
from store.metrics_server import EndpointSecurity

_log = logging.getLogger("driftpoint")

_CONNECTING = 1.0
"""Seconds for a daemon that is there to accept."""

_ANSWERING = 10.0
"""Seconds for it to take or say a line."""

_STARTING = 60.0
"""Seconds for one that was started to be there."""

_STARTS, _PER = 3, 3600.0
"""Daemons that one trainer starts in so many seconds."""

_AGAIN = 10.0
"""Seconds between two attempts to connect, where no daemon is; besides, only news bring one about."""

_PAUSE = 0.1
"""Seconds between two looks whether a daemon is there yet, or not any more."""

_LAST = 1.0
"""Seconds that the end of a job waits for the goodbye to be sent."""


class _LostError(Exception):
    """The daemon is gone."""


class _EndedError(Exception):
    """It said why it will have nothing more to do with us."""


@dataclass(frozen=True)
class _News:
    """What is to be told. goodbye: and then nothing more."""

    note: StatusUpdate
    goodbye: Unregister | None


class DaemonClient(SaveListener):
    """Of one rank. Does nothing before the job is attached, or if the settings want no daemon. base: of shared memory.
    security: of the metrics endpoint of a daemon that it starts."""

    def __init__(
        self, settings: DaemonSettings, base: str, metrics: Metrics, security: EndpointSecurity | None = None
    ) -> None:
        self._settings, self._metrics = settings, metrics
        self._base = Path(os.path.abspath(base))  # noqa: PTH100 - links stay as they are named
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._note, self._fresh = StatusUpdate(), False
        self._goodbye: Unregister | None = None
        self._wake = -1
        self._hello: Register | None = None
        self._starter = _Starter(self._base, settings, security or EndpointSecurity())
        self._may_start = settings.start
        self._told = ""

    @override
    def on_attach(self, event: AttachEvent) -> None:
        if not self._settings.enabled or event.store_id is None or self._thread is not None:
            return
        self._hello = Register(
            pid=self._pid,
            rank=event.rank,
            world_size=event.world_size,
            store=event.store,
            store_id=event.store_id,
            epoch=event.epoch,
            base=str(self._base),
        )
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._work, name="driftpoint-daemon-link", daemon=True)
        self._thread.start()

    @override
    def on_commit(self, event: CommitEvent) -> None:
        self._tell(lambda note: note.model_copy(update={"committed": event.save.name}))

    @override
    def on_memory(self, event: MemoryEvent) -> None:
        snapshot = event.snapshot
        if snapshot is not None:
            self._tell(lambda note: note.model_copy(update={"memory": snapshot.name}))

    @override
    def on_close(self, clean: bool, timeout: float) -> None:
        if self._thread is None or os.getpid() != self._pid:
            return
        with self._lock:
            self._goodbye = self._goodbye or Unregister(clean=clean)
        self._ring()
        self._thread.join(_LAST)

    def _tell(self, change: Callable[[StatusUpdate], StatusUpdate]) -> None:
        if self._thread is None or os.getpid() != self._pid:
            return
        with self._lock:
            self._note, self._fresh = change(self._note), True
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # The thread.

    def _work(self) -> None:
        try:
            while self._news().goodbye is None:
                self._once()
        except Exception as error:  # noqa: BLE001 - the thread's edge: told, and training goes on
            self._complain(f"the link to the daemon failed and is given up: {error!r}")
        finally:
            self._starter.close()

    def _once(self) -> None:
        """Connect, and stay so as long as it goes well; or wait until it may be worth another attempt."""
        try:
            with self._connected() as link:
                lines = _Lines()
                try:
                    self._introduce(link, lines)
                except _LostError:  # one that was about to end
                    time.sleep(_PAUSE)
                    return
                self._attend(link, lines)
            return
        except _LostError as error:
            self._complain(str(error))
            return
        except (DriftpointError, _EndedError) as error:
            self._complain(str(error))
        self._wait(_AGAIN)  # not at once, whatever the news
        self._wait(None)

    def _connected(self) -> socket.socket:
        try:
            return connect(self._base, _CONNECTING)
        except DaemonError:
            if not self._may_start or not self._starter.may_start():
                raise
        return self._starter.start(lambda: self._news().goodbye is not None)

    def _introduce(self, link: socket.socket, lines: _Lines) -> None:
        assert self._hello is not None
        link.settimeout(_ANSWERING)
        self._send(link, self._hello, lines)
        self._hear(link, lines)
        self._told = ""
        with self._lock:
            self._fresh = True

    def _attend(self, link: socket.socket, lines: _Lines) -> None:
        """As long as it goes well, or until goodbye is said."""
        while True:
            news = self._taken()
            if news is not None:
                self._send(link, news.note, lines)
                if news.goodbye is not None:
                    self._send(link, news.goodbye, lines)
                    return
            ready, _, _ = select.select([link.fileno(), self._wake], [], [])
            if self._wake in ready:
                self._hush()
            if link.fileno() in ready:
                self._hear(link, lines)

    def _hear(self, link: socket.socket, lines: _Lines) -> None:
        try:
            data = link.recv(LINE_LIMIT)
        except OSError as error:
            raise _LostError(f"the daemon of this node is gone: {error}") from error
        if not data:
            raise _LostError(
                "the daemon of this node is gone: what is in memory is not written if this job dies now, saves go on"
            )
        for line in lines.of(data):
            said = parse_daemon_message(line)
            if isinstance(said, Refused):
                self._may_start = False
                raise _EndedError(f"the daemon of this node refused this job: {said.why}")
            if isinstance(said, ShuttingDown):
                self._may_start = False  # somebody asked it to, or nobody needs it
                raise _EndedError(f"the daemon of this node (process {said.pid}) was asked to end: no other is started")

    def _send(self, link: socket.socket, message: Message, lines: _Lines) -> None:
        try:
            link.sendall(to_line(message))
        except OSError as error:
            self._hear(link, lines)  # it may have said why
            raise _LostError(f"the daemon of this node is gone: {error}") from error

    def _news(self) -> _News:
        with self._lock:
            return _News(self._note, self._goodbye)

    def _taken(self) -> _News | None:
        """What was not told yet."""
        with self._lock:
            fresh, self._fresh = self._fresh, False
            return _News(self._note, self._goodbye) if fresh or self._goodbye is not None else None

    def _wait(self, seconds: float | None) -> None:
        """For news, or the end of the job; with ``seconds`` for the end alone."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._news().goodbye is None and not (deadline is None and self._fresh):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._wake], [], [], left)[0]:
                return
            self._hush()

    def _hush(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _complain(self, text: str) -> None:
        """Once, until it is another trouble."""
        if text != self._told and self._news().goodbye is None:
            self._metrics.counter("failures").labels("daemon").inc()
            _log.warning("%s", text)
        self._told = text


class _Lines:
    """Whole lines out of what arrives."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, data: bytes) -> list[bytes]:
        """Those that are whole now. DaemonError where one is endless."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_LIMIT:
            raise DaemonError("the daemon sends a line without an end")
        return whole


class _Starter:
    """Starts daemons, but not too many. Link's thread only."""

    def __init__(self, base: Path, settings: DaemonSettings, security: EndpointSecurity) -> None:
        self._base, self._settings, self._security = base, settings, security
        self._times: deque[float] = deque(maxlen=_STARTS)
        self._process: subprocess.Popen[bytes] | None = None

    def may_start(self) -> bool:
        """Whether there were few enough."""
        return len(self._times) < _STARTS or time.monotonic() - self._times[0] > _PER

    def start(self, ended: Callable[[], bool]) -> socket.socket:
        """A connection to a daemon that this process or another one of this node starts. DaemonError, StorageError."""
        make_home(self._base)
        mine: Owner | None = None
        with suppress(StorageError):  # another rank does it: wait with it
            mine = Owner(home(self._base) / "daemon.starting")
        try:
            if mine is not None:
                self._times.append(time.monotonic())
                self._spawn()
            return self._awaited(self._process if mine is not None else None, ended)
        finally:
            if mine is not None:
                mine.release()

    def close(self) -> None:
        """Have nothing more to do with it: it lives on."""
        if self._process is not None:
            self._process.poll()
            self._process.returncode = self._process.returncode or 0  # no complaint that it still runs

    def _spawn(self) -> None:
        if self._process is not None:
            self._process.poll()
        settings = self._settings
        command = [sys.executable, "-m", "deploy.cli", "daemon", "run", "--memory", str(self._base)]
        command += ["--port", str(settings.port), "--exit-idle", str(settings.exit_idle_seconds)]
        command += ["--log", str(log_path(self._base)), "--host", settings.host, *self._security.cli_options()]
        nothing = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
            )
        except OSError as error:
            raise DaemonError(f"no daemon could be started: {error}") from error

    def _awaited(self, process: subprocess.Popen[bytes] | None, ended: Callable[[], bool]) -> socket.socket:
        deadline = time.monotonic() + _STARTING
        while True:
            try:
                return connect(self._base, _CONNECTING)
            except DaemonError as error:
                code = None if process is None else process.poll()
                if code is not None or time.monotonic() >= deadline or ended():
                    why = f"it ended with {code}" if code is not None else f"it is not there after {_STARTING:g} s"
                    raise DaemonError(
                        f"no daemon could be started ({why}); see {log_path(self._base)}, or run "
                        f"`driftpoint daemon run --memory {self._base}` yourself"
                    ) from error
            time.sleep(_PAUSE)
