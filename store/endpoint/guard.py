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
from hashlib import sha256
from pathlib import Path

from store.endpoint.access import BasicAuth, Tls
from store.errors import ConfigError

_log = logging.getLogger("driftpoint")

_MOST = 4096
"""Bytes of a password file."""

CHALLENGE = 'Basic realm="driftpoint", charset="UTF-8"'
"""What a client is told that has no login."""


class Certificates:
    """A server's TLS context."""

    def __init__(self, files: Tls) -> None:
        """ConfigError where a file cannot be read or is none of what it should be."""
        self._files = files
        self._stamp = self._stamped()
        self.context = self._made()

    def renew(self) -> None:
        """Take the files as they are now, if they have changed."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.context = self._made()  # not into the one in use: a certificate without its key would spoil that
        except ConfigError as error:
            _log.warning("%s: the certificate before stays in use", error)

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        assert self._files.cert is not None and self._files.key is not None
        cert, key = Path(self._files.cert).expanduser(), Path(self._files.key).expanduser()
        try:
            context.load_cert_chain(cert, key, password=_no_passphrase)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(f"metrics.tls: cannot use cert {cert} with key {key}: {error}") from error
        if self._files.client_ca is not None:
            try:
                context.load_verify_locations(Path(self._files.client_ca).expanduser())
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"metrics.tls.client_ca: cannot use {self._files.client_ca}: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

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


class Login:
    """Who may read; everybody, where no login is set."""

    def __init__(self, wanted: BasicAuth) -> None:
        """ConfigError where the password cannot be read."""
        self._expected: bytes | None = None
        if wanted.user is not None and wanted.password_file is not None:
            self._expected = _digest(f"{wanted.user}:{_password(wanted.password_file)}".encode())

    def allows(self, header: str | None) -> bool:
        """Whether a request with this ``Authorization`` may pass."""
        # Digests, so that the time of the comparison tells nothing, not even of the length.
        return self._expected is None or hmac.compare_digest(_digest(_given(header or "")), self._expected)


def _digest(words: bytes) -> bytes:
    return sha256(words).digest()


def _given(header: str) -> bytes:
    kind, _, word = header.partition(" ")
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
