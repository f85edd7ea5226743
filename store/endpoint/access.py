"""Where an endpoint listens and who may read it: validated records, and the words that hand them to another process.

Metrics name layers, paths and steps: not secret, but nobody else's business. So an endpoint that other machines reach
needs TLS and a login, or a word from the user that it is to go without. It knows no HTTP; files are read by
:mod:`store.endpoint.guard`, when listening begins.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from store.errors import ConfigError

LOOPBACK = "127.0.0.1"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tls(_Section):
    """Files in PEM, for the daemon's endpoint, too."""

    cert: str | None = Field(default=None, min_length=1, description="certificate; taken anew when it is renewed")
    key: str | None = Field(default=None, min_length=1, description="its key")
    client_ca: str | None = Field(
        default=None, min_length=1, description="readers need a certificate that it signed; does for a login"
    )


class BasicAuth(_Section):
    """A login, for the daemon's endpoint, too."""

    user: str | None = Field(default=None, min_length=1, pattern=r"^[^:\x00-\x1f]+$", description="its name")
    password_file: str | None = Field(
        default=None, min_length=1, description="holds the password alone; a line end after it does not count"
    )


class Guards(_Section):
    """What stands between an endpoint and whoever asks. insecure: nothing need to, whatever the host."""

    tls: Tls = Tls()
    basic_auth: BasicAuth = BasicAuth()
    insecure: bool = False

    def require(self, host: str, setting: str) -> None:
        """ConfigError where a setting lacks its other half, or where ``host`` (named ``setting``) lets others in."""
        tls, login = self.tls, self.basic_auth
        _require_pair("metrics.tls", "cert", tls.cert, "key", tls.key)
        _require_pair("metrics.basic_auth", "user", login.user, "password_file", login.password_file)
        if tls.client_ca is not None and tls.cert is None:
            raise ConfigError("metrics.tls.client_ca: needs metrics.tls.cert and key: set them, or remove it")
        if is_loopback(host) or self.insecure:
            return
        if tls.cert is None:
            lacks = "`metrics: {tls: {cert: FILE, key: FILE}}`"
        elif login.user is None and tls.client_ca is None:
            lacks = "`metrics: {basic_auth: {user: NAME, password_file: FILE}}` (or tls.client_ca)"
        else:
            return
        raise ConfigError(
            f"{setting}: {host!r} lets other machines read the metrics: set {lacks} as well, or "
            "`metrics: {insecure: true}` where the network is trusted"
        )

    def words(self) -> list[str]:
        """Options of ``driftpoint daemon run`` that say the same. Paths become absolute."""
        files = {
            "--tls-cert": self.tls.cert,
            "--tls-key": self.tls.key,
            "--tls-client-ca": self.tls.client_ca,
            "--auth-password-file": self.basic_auth.password_file,
        }
        words = [word for name, path in files.items() if path is not None for word in (name, _absolute(path))]
        words += [] if self.basic_auth.user is None else ["--auth-user", self.basic_auth.user]
        return words + (["--insecure"] if self.insecure else [])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it. A name that only a resolver knows counts as reaching further."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url(host: str, port: int, secure: bool) -> str:
    """Of the metrics, for people."""
    name = f"[{host}]" if ":" in host else host
    return f"http{'s' if secure else ''}://{name}:{port}/metrics"


def _require_pair(section: str, one: str, first: str | None, other: str, second: str | None) -> None:
    names: Sequence[str] = (one, other) if first is None else (other, one)
    if (first is None) != (second is None):
        raise ConfigError(f"{section}: {names[1]} is set and {names[0]} is not: set both, or neither")


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - links stay as they are named
