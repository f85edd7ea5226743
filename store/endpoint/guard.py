"""TLS and basic authentication of an endpoint, made of the files that its settings name.

Read once, when listening begins, but for the certificate: one that was renewed is taken with the next connection, for
endpoints live longer than certificates. A renewal that cannot be read leaves the one before in force.
"""

from __future__ import annotations

import base64
import hmac
import logging
import os
import ssl
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from store.endpoint.access import BasicAuth, Tls
from store.errors import ConfigError

_log = logging.getLogger("driftpoint")

_MOST = 4096
"""Bytes of a password file."""

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application."""


class Certificates:
    """A server's TLS context."""

    def __init__(self, files: Tls) -> None:
        """ConfigError where a file cannot be read or is none of what it should be."""
        self._files = files
        self._stamp = self._stamped()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load()
        if files.client_ca is not None:
            try:
                self.context.load_verify_locations(Path(files.client_ca).expanduser())
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"metrics.tls.client_ca: cannot use {files.client_ca}: {error}") from error
            self.context.verify_mode = ssl.CERT_REQUIRED

    def renew(self) -> None:
        """Take the files as they are now, if they have changed."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._load()
        except ConfigError as error:
            _log.warning("%s: the certificate before stays in use", error)

    def _load(self) -> None:
        assert self._files.cert is not None and self._files.key is not None
        cert, key = Path(self._files.cert).expanduser(), Path(self._files.key).expanduser()
        try:
            self.context.load_cert_chain(cert, key, password=_no_passphrase)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(f"metrics.tls: cannot use cert {cert} with key {key}: {error}") from error

    def _stamped(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in (self._files.cert, self._files.key))


def _stamp(path: str | None) -> tuple[int, int, int] | None:
    try:
        found = Path(path or "").expanduser().stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _no_passphrase() -> str:
    raise ValueError("the key is encrypted: nobody is there to type its passphrase")


def with_login(app: App, login: BasicAuth) -> App:
    """``app`` behind a login; as it is where there is none. ConfigError where the password cannot be read."""
    if login.user is None or login.password_file is None:
        return app
    expected = sha256(f"{login.user}:{_password(login.password_file)}".encode()).digest()

    def guarded(environ: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        # Digests, so that the time of the comparison tells nothing, not even of the length.
        if hmac.compare_digest(sha256(_given(environ)).digest(), expected):
            return app(environ, respond)
        challenge = ("WWW-Authenticate", 'Basic realm="driftpoint", charset="UTF-8"')
        respond("401 Unauthorized", [challenge, ("Content-Type", "text/plain; charset=utf-8")])
        return [b"name and password, please\n"]

    return guarded


def _given(environ: dict[str, Any]) -> bytes:
    kind, _, word = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
    if kind.lower() != "basic":
        return b""
    try:
        return base64.b64decode(word.strip(), validate=True)
    except ValueError:
        return b""


def _password(path: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            found, mode = file.read(_MOST + 1), os.fstat(file.fileno()).st_mode
        text = found.decode().rstrip("\r\n")
    except OSError as error:
        raise ConfigError(f"metrics.basic_auth.password_file: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"metrics.basic_auth.password_file: {path} is not text") from error
    if not text or len(found) > _MOST:
        raise ConfigError(f"metrics.basic_auth.password_file: {path} is empty, or longer than {_MOST} bytes")
    if mode & 0o044:
        _log.warning("metrics: others of this machine can read the password in %s: `chmod 600 %s`", path, path)
    return text
