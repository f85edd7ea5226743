"""The HTTP server of an endpoint: a registry over HTTP or HTTPS, which no client can stop or fill up.

One thread accepts, one more for each connection. Handshake and request have to come within seconds, and of more
connections than a scraper needs the oldest is ended: whoever opens many and says nothing costs himself only. Whoever
asks without end waits (:mod:`store.endpoint.share`). A child that this process forks lets go of the port, which it
would keep from the job's next incarnation. prometheus_client's own server shakes hands in the accepting thread, where
one silent client stops everybody.
"""

from __future__ import annotations

import gzip
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from store.endpoint.access import Guards, url
from store.endpoint.guard import CHALLENGE, Certificates, Login
from store.endpoint.share import Share

_PATIENCE = 10.0
"""Seconds that a client may be silent."""

_LONGEST = 30.0
"""Seconds that a connection may last, however much a client has to say."""

_LOOK = 0.5
"""Seconds between two looks for what is to end."""

_CONNECTIONS = 16
"""At a time."""

_PATHS = ("/", "/metrics")

_log = logging.getLogger("driftpoint")


class Endpoint:
    """Listens from when it is made until it is closed."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int, guards: Guards) -> None:
        """``port`` 0 takes a free one. OSError where it cannot listen, ConfigError where a guard cannot be had."""
        certificates = Certificates(guards.tls) if guards.tls.cert is not None else None
        self._server = _Server(host, port, registry, Login(guards.basic_auth), certificates)
        self.port: int = self._server.server_port
        self.url = url(host, self.port, certificates is not None)
        self._thread = threading.Thread(target=self._server.serve_forever, name="driftpoint-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE
    server_version, sys_version = "driftpoint", ""

    server: _Server

    def handle(self) -> None:
        with suppress(OSError):  # a client that went away
            super().handle()

    def do_GET(self) -> None:
        if not self.server.login.allows(self.headers.get("Authorization")):
            self._answer(401, b"name and password, please\n", {"WWW-Authenticate": CHALLENGE})
        elif self.path.partition("?")[0] not in _PATHS:
            self._answer(404, b"the metrics are at /metrics\n", {})
        else:
            encoder, kind = _encoder(self.headers.get("Accept") or "")
            body, more = encoder(self.server.registry), {"Content-Type": kind}
            if "gzip" in (self.headers.get("Accept-Encoding") or ""):
                body, more = gzip.compress(body, 1), {**more, "Content-Encoding": "gzip"}
            self._answer(200, body, more)

    def _answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": "text/plain; charset=utf-8", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64  # a scraper that comes in a crowd need not come again

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, login: Login, certificates: Certificates | None
    ) -> None:
        self.registry, self.login = registry, login
        self.closing = threading.Event()
        self._certificates = certificates
        self._open: dict[Any, float] = {}
        self._lock = threading.Lock()
        self._share, self._counted = Share(), 0.0
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except ValueError as error:  # no resolver was asked
            raise OSError(f"{host!r} is no name of a host") from error
        self.address_family = found[0][0]
        super().__init__((str(found[0][4][0]), port), _Handler)
        me = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(me()))

    def server_bind(self) -> None:
        """Without asking a resolver for the machine's name, which may hang."""
        socket_ = self.socket
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socket_.bind(self.server_address)
        self.server_address = socket_.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        """When clients may take more of this process."""
        spent = time.thread_time()
        self._share.took(spent - self._counted)
        self._counted = spent
        while (seconds := self._share.wait()) and not self.closing.wait(min(seconds, _LOOK)):
            self.service_actions()
        try:
            return super().get_request()
        except OSError:
            self.closing.wait(_LOOK)  # no descriptor is left, say: this would be tried again at once, and for ever
            raise

    def service_actions(self) -> None:
        """Now and then: end what lasts too long."""
        now = time.monotonic()
        with self._lock:
            old = [one for one, began in self._open.items() if now - began > _LONGEST]
        _shut(old)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = time.monotonic()
            old = list(self._open)[:-_CONNECTIONS]
        _shut(old)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, whose time is the client's."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._share.took(time.thread_time())

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._certificates is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_PATIENCE)
        self._certificates.renew()
        try:
            # The descriptor stays the plain socket's, so that ending that one ends this one.
            with self._certificates.context.wrap_socket(request.dup(), server_side=True) as secure:
                super().finish_request(secure, client_address)
        except OSError:
            pass  # no handshake: a plain request, a client that does not trust us, or none at all

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A request that failed costs that request."""
        del request, client_address
        _log.warning("metrics could not be served", exc_info=True)


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """By what a client would like to have, where that can be understood."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):
        return choose_encoder("")


def _let_go(server: _Server | None) -> None:
    if server is not None:
        server.socket.close()


def _shut(sockets: Iterable[Any]) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
