"""The daemon's process: the socket and who talks over it, signals, and the clock.

One asyncio thread; see :mod:`deploy.daemon.node` for what it does. Nothing that a connection sends ends the daemon:
what cannot be understood closes that connection and is counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from deploy.daemon.hold import Hold
from deploy.daemon.jobs import Member, NodeJob
from deploy.daemon.metrics import DaemonMetrics
from deploy.daemon.node import Node
from deploy.daemon.options import Options
from deploy.daemon.peers import end_of, peer_of
from store.daemon.messages import (
    LINE_LIMIT,
    AskStatus,
    AskStop,
    Bye,
    Hello,
    Leaving,
    Message,
    Note,
    Refused,
    Welcome,
    heard_by_daemon,
    to_line,
)
from store.errors import DaemonError, StorageError
from store.memory.cleaning import clear_old

_log = logging.getLogger("driftpoint")

CONNECTIONS = 128
"""At a time; a node has one for each rank."""

_WAITING = 256
"""Connections that the kernel keeps for us."""

_FIRST_WORD = 10.0
"""Seconds that a connection may say nothing at all."""

_SENDING = 5.0
"""Seconds for the other end to take what it is sent."""

_LAST_DEATHS = 2.0
"""Seconds that a daemon, told to end by a signal, looks whether the trainers were told so, too."""

_CLEANING = 3600.0
"""Seconds between two looks for memory that nobody will resume from."""


@dataclass(eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    joined: tuple[NodeJob, Member] | None = None


class Daemon:
    """One for each base."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._metrics = DaemonMetrics()
        self._connections: set[_Connection] = set()
        self._last_deaths = 0.0

    def run(self) -> None:
        """Serve until it is asked to end. DaemonError where one runs already, StorageError where no socket can be."""
        hold = Hold(self._options.base)
        try:
            asyncio.run(self._main(hold))
        finally:
            self._metrics.close()
            hold.release()

    async def _main(self, hold: Hold) -> None:
        self._ending = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)
        self._hold = hold
        self._metrics.serve(self._options.host, self._options.port, self._options.security)
        self._node = Node(self._options, self._metrics)
        self._node.take_up()
        server = await asyncio.start_unix_server(self._serve, sock=hold.socket, limit=LINE_LIMIT, backlog=_WAITING)
        ticking = asyncio.create_task(self._tick())
        _log.info("daemon %d serves %s, metrics at %s", os.getpid(), self._options.base, self._metrics.url)
        await self._ending.wait()
        ticking.cancel()
        server.close()
        await self._leave()

    def _signalled(self) -> None:
        self._last_deaths = min(_LAST_DEATHS, self._options.grace)
        self._ending.set()

    async def _leave(self) -> None:
        """Say so to everybody, and finish what is under way, and what died until now left."""
        for one in list(self._connections):
            if self._hold.stands():  # else trainers should look for another one
                await self._send(one, Leaving(pid=os.getpid()))
            one.writer.close()
        await self._node.last_deaths(self._last_deaths)
        if not await asyncio.to_thread(self._node.end, self._options.grace):
            _log.warning("the rescue under way is not finished after %.0f s: the next one goes on", self._options.grace)
        _log.info("daemon %d ends", os.getpid())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(reader, writer)
        self._connections.add(connection)
        try:
            if len(self._connections) > CONNECTIONS:
                await self._refuse(connection, "too many", f"more than {CONNECTIONS} connections at a time")
            else:
                await self._converse(connection)
        except DaemonError as error:
            await self._refuse(connection, "misunderstood", str(error))
        except (OSError, asyncio.IncompleteReadError):
            pass  # it went away; what that means, the end of its process tells
        finally:
            self._connections.discard(connection)
            if connection.joined is not None:
                self._node.disconnected(*connection.joined)
            with suppress(OSError):
                writer.close()

    async def _converse(self, connection: _Connection) -> None:
        pid = peer_of(connection.writer.get_extra_info("socket"))
        try:
            first = await asyncio.wait_for(self._heard(connection), _FIRST_WORD)
        except TimeoutError as error:
            raise DaemonError(f"it said nothing for {_FIRST_WORD:g} s") from error
        if isinstance(first, AskStatus):
            await self._send(connection, self._node.report())
        elif isinstance(first, AskStop):
            _log.info("asked to end by process %d", pid)
            await self._send(connection, Leaving(pid=os.getpid()))
            self._ending.set()
        elif isinstance(first, Hello):
            end = end_of(connection.writer.get_extra_info("socket"), pid)
            connection.joined = self._node.join(first, pid, end)
            await self._send(connection, Welcome(pid=os.getpid()))
            await self._listen(connection, *connection.joined)
        else:
            raise DaemonError("its first word is none of hello, status and stop")

    async def _listen(self, connection: _Connection, job: NodeJob, member: Member) -> None:
        while True:
            message = await self._heard(connection)
            if isinstance(message, Note):
                job.noted(message, time.time())
            elif isinstance(message, Bye):
                member.clean = message.clean
            else:
                raise DaemonError("a trainer says note or bye after its hello")

    async def _heard(self, connection: _Connection) -> Hello | Note | Bye | AskStatus | AskStop:
        try:
            return heard_by_daemon(await connection.reader.readuntil(b"\n"))
        except asyncio.LimitOverrunError as error:
            raise DaemonError(f"a line of more than {LINE_LIMIT} bytes") from error

    async def _send(self, connection: _Connection, message: Message) -> None:
        """Nobody is waited for who does not read."""
        with suppress(OSError, TimeoutError):
            connection.writer.write(to_line(message))
            await asyncio.wait_for(connection.writer.drain(), _SENDING)

    async def _refuse(self, connection: _Connection, reason: str, why: str) -> None:
        self._node.refused += 1
        self._metrics.refused.labels(reason).inc()
        if self._node.refused <= 100 or not self._node.refused % 1000:
            _log.warning("a connection was refused: %s", why)
        await self._send(connection, Refused(why=why))

    async def _tick(self) -> None:
        cleaned, idle = time.monotonic() - _CLEANING + 60.0, self._options.exit_idle
        while True:
            await asyncio.sleep(0.5)
            self._metrics.show(self._node.report(), self._options.base)
            if not self._hold.stands():
                _log.error("the socket of this daemon was removed, so that nobody can reach it")
                self._ending.set()
            if idle is not None and self._node.idle_seconds() >= idle:
                _log.info("no job for %.0f s", idle)
                self._ending.set()
            if time.monotonic() - cleaned >= _CLEANING and not self._node.busy:
                cleaned = time.monotonic()
                await asyncio.to_thread(self._clean)

    def _clean(self) -> None:
        try:
            nbytes = clear_old(self._options.base)
        except (StorageError, OSError) as error:
            _log.warning("what old jobs left in memory could not be removed: %s", error)
            return
        if nbytes:
            _log.info("%d bytes of memory that nobody came back for were given back", nbytes)
