"""Serve a Prometheus registry over HTTP or HTTPS, with ``prometheus_client.start_http_server``.

Addresses other than loopback need TLS or ``insecure: true``; a client CA makes client certificates mandatory."""

import errno
import io
import ipaddress
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from store.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry

LOOPBACK = "127.0.0.1"
_ACCEPT_RETRY = 0.5
_CLIENT_TIMEOUT = 10.0  # seconds that a client may be silent before its connection is closed
_CLOSE_TIMEOUT = 5.0
_log = logging.getLogger("driftpoint")


class Tls(BaseModel):
    """Files in PEM, read at the start; for the daemon's endpoint, too."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    cert: str | None = Field(default=None, min_length=1, description="certificate of the server")
    key: str | None = Field(default=None, min_length=1, description="its key, without a passphrase")
    client_ca: str | None = Field(default=None, min_length=1, description="CA of client certificates, then required")


class EndpointSecurity(BaseModel):
    """TLS files of an endpoint; ``insecure`` allows plain HTTP on addresses other than loopback."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    tls: Tls = Tls()
    insecure: bool = False

    def check(self, host: str, setting: str) -> None:
        """Raise ConfigError for incomplete TLS settings, or if ``host`` (set by ``setting``) needs TLS."""
        tls = self.tls
        if (tls.cert is None) != (tls.key is None):
            there, missing = ("cert", "key") if tls.key is None else ("key", "cert")
            raise ConfigError(f"metrics.tls: {there} is set and {missing} is not: set both, or neither")
        if tls.client_ca is not None and tls.cert is None:
            raise ConfigError("metrics.tls.client_ca: needs metrics.tls.cert and key: set them, or remove it")
        if tls.cert is None and not self.insecure and not is_loopback(host):
            raise ConfigError(
                f"{setting}: {host!r} lets other machines read the metrics: set `metrics: {{tls: {{cert: FILE, key: "
                "FILE}}` as well, or `metrics: {insecure: true}` where the network is trusted"
            )

    def cli_options(self) -> list[str]:
        """Return the options of ``driftpoint daemon run`` that mean the same, with absolute paths."""
        files = {"--tls-cert": self.tls.cert, "--tls-key": self.tls.key, "--tls-client-ca": self.tls.client_ca}
        # os.path.abspath: symbolic links stay as they are named.
        options = [(name, os.path.abspath(os.path.expanduser(path))) for name, path in files.items() if path]  # noqa: PTH100, PTH111
        return [word for option in options for word in option] + (["--insecure"] if self.insecure else [])


class MetricsServer:
    """Serves a registry from a daemon thread until it is closed; forked children close their copy of the socket.

    ``port``: 0 takes a free one. OSError if it cannot listen, ConfigError if the TLS files cannot be used."""

    def __init__(self, registry: "CollectorRegistry", host: str, port: int, security: EndpointSecurity) -> None:
        from prometheus_client import start_http_server  # commands that serve nothing need not load it

        files = _tls_arguments(security.tls)
        try:
            self._server, self._thread = start_http_server(port, host, registry, **files)
        except ValueError as error:  # from getaddrinfo, before any resolver is asked
            raise OSError(f"{host!r} is not a valid host name") from error
        _servers.add(self._server)
        server: Any = self._server
        if files:  # or the accepting thread waits for the handshake, and one silent client stops all others
            server.socket.do_handshake_on_connect = False
        handler = server.RequestHandlerClass
        quiet = {"timeout": _CLIENT_TIMEOUT, "get_stderr": lambda _: io.StringIO()}  # wsgiref prints tracebacks there
        server.RequestHandlerClass = type(handler.__name__, (handler,), quiet)
        server.get_request = partial(_accept, server.get_request)
        server.handle_error = lambda *_: _log.debug("a request for metrics failed", exc_info=True)
        self._thread.name = "driftpoint-metrics"
        self.port = int(self._server.server_port)
        name = f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if files else ''}://{name}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening and free the port."""
        if self._server.socket.fileno() < 0:  # closed before, or a forked child, which has no thread to stop
            return
        threading.Thread(target=self._server.shutdown, daemon=True).start()
        self._thread.join(_CLOSE_TIMEOUT)
        self._server.server_close()


class ServedMetrics:
    """Metrics with an endpoint; if it cannot be started, that is logged, and only the endpoint is missing."""

    whose: str  # and ``todo``: for the messages about that
    todo: str
    registry: "CollectorRegistry"
    port: int | None = None  # of the endpoint, also after it closed; None without one
    url: str | None = None
    trouble: str | None = None  # why the endpoint could not be started
    _server: MetricsServer | None = None

    def serve(self, host: str, port: int, security: EndpointSecurity | None = None) -> None:
        """Start the endpoint; ``port`` 0 takes a free one."""
        try:
            self._server = MetricsServer(self.registry, host, port, security or EndpointSecurity())
            self.port, self.url = self._server.port, self._server.url
        except OSError as error:
            self.trouble = f"port {port} is taken" if error.errno == errno.EADDRINUSE else f"cannot listen on {host}"
            why = error.strerror or error
            _log.warning("no metrics %s: cannot listen on %s port %d (%s); %s", self.whose, host, port, why, self.todo)
        except ConfigError as error:
            self.trouble = str(error)
            _log.error("no metrics %s: %s", self.whose, error)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ``host``; names other than localhost count as reachable by others."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tls_arguments(tls: Tls) -> dict[str, Any]:
    """Return the arguments of ``start_http_server``, after loading the files without asking for a passphrase."""
    if tls.cert is None or tls.key is None:
        return {}
    cert, key = str(Path(tls.cert).expanduser()), str(Path(tls.key).expanduser())
    client_ca = None if tls.client_ca is None else str(Path(tls.client_ca).expanduser())
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"metrics.tls: cannot use cert {cert}, key {key}, client_ca {client_ca}: {error}") from error
    return {"certfile": cert, "keyfile": key, "client_cafile": client_ca, "client_auth_required": client_ca is not None}


def _accept(accept: Callable[[], Any]) -> Any:
    """Accept a connection. Without free descriptors, wait: the connection stays pending, and the loop would spin."""
    try:
        return accept()
    except OSError:
        time.sleep(_ACCEPT_RETRY)
        raise


def _close_in_child() -> None:
    for server in list(_servers):
        server.socket.close()


_servers: "weakref.WeakSet[WSGIServer]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
