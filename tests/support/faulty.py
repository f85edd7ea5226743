"""A proxy in front of an object server that counts requests and spoils some: refuses them, loses answers, comes late,
or kills who asked, before the server has the request or after it has carried it out.

One fault is set at a time. It knows of S3 and Google only how an error looks, and which headers are conditions.
"""

from __future__ import annotations

import http.client
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote

CODES = {
    301: "PermanentRedirect",
    403: "AccessDenied",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}


CONDITIONS = frozenset({"if-none-match", "x-goog-if-generation-match"})


@dataclass(frozen=True)
class Asked:
    """A request. number: counted from 1 since the fault was set."""

    number: int
    method: str
    path: str
    query: str
    conditional: bool

    @property
    def changes(self) -> bool:
        """Whether it may change something."""
        return self.method not in ("GET", "HEAD")


@dataclass(frozen=True)
class Fault:
    """What becomes of the requests that ``strikes``. after: the server carries it out, and the answer is lost.

    what: an HTTP status, ``drop`` (the connection ends), ``hang`` (no answer for ``seconds``), ``slow``, ``kill``,
    ``unconditional`` (the server does not know conditions), or what to call before going on."""

    what: str | int | Callable[[], object]
    strikes: Callable[[Asked], bool]
    after: bool = False
    seconds: float = 0.0


def nth(number: int) -> Callable[[Asked], bool]:
    """Only the n-th request."""
    return lambda asked: asked.number == number


class Proxy:
    """A context manager, in front of the server at ``port``."""

    def __init__(self, port: int) -> None:
        self.behind = port
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.set(None)

    def set(self, fault: Fault | None) -> None:
        """Begin to count anew."""
        with self._lock:
            self.fault, self.asked = fault, list[Asked]()
            self.struck = 0
            self._victim, self._known = 0, threading.Event()

    def aim(self, pid: int) -> None:
        """Whom to kill."""
        self._victim = pid
        self._known.set()

    def __enter__(self) -> Proxy:
        proxy = self

        class Handler(_Handler):
            of = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def count(self, method: str, target: str, headers: http.client.HTTPMessage) -> Fault | None:
        """Note a request; the fault that strikes it."""
        path, _, query = target.partition("?")
        with self._lock:
            conditional = not CONDITIONS.isdisjoint(name.lower() for name in headers)
            asked = Asked(len(self.asked) + 1, method, unquote(path), query, conditional)
            self.asked.append(asked)
            if self.fault is None or not self.fault.strikes(asked):
                return None
            self.struck += 1
            return self.fault

    def kill(self) -> None:
        """End who asked."""
        assert self._known.wait(180)
        os.kill(self._victim, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Let time pass, but not after the end."""
        self._ended.wait(seconds)


class _Handler(BaseHTTPRequestHandler):
    of: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each body waits until the client has acknowledged the headers

    def setup(self) -> None:
        super().setup()
        self.server_side = http.client.HTTPConnection("127.0.0.1", self.of.behind, timeout=180)

    def finish(self) -> None:
        self.server_side.close()
        super().finish()

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, BrokenPipeError):
            self.close_connection = True

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.of.count(self.command, self.path, self.headers)
        if fault is not None and not fault.after and self._spoiled(fault):
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        if fault is not None and fault.what == "unconditional":
            headers = {name: value for name, value in headers.items() if name.lower() not in CONDITIONS}
        self.server_side.request(self.command, self.path, body, headers)
        answer = self.server_side.getresponse()
        data = answer.read()
        if fault is not None and fault.after and self._spoiled(fault):
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = answer.headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def _spoiled(self, fault: Fault) -> bool:
        """Whether no more is to be done for the request."""
        if fault.what == "unconditional":
            return False
        if callable(fault.what):
            fault.what()
            return False
        if fault.what == "slow":
            self.of.wait(fault.seconds)
            return False
        if fault.what == "hang":
            self.of.wait(fault.seconds)
        if fault.what == "kill":
            self.of.kill()
        if isinstance(fault.what, int):
            self._refuse(fault.what)
        else:
            self.close_connection = True
        return True

    def _refuse(self, status: int) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{CODES[status]}</Code><Message>injected</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass
