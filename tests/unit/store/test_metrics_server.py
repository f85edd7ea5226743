"""The metrics server over real sockets: TLS, client certificates, silent clients, forked children."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from store import metrics_server
from store.errors import ConfigError
from store.metrics_server import EndpointSecurity, MetricsServer, Tls, is_loopback
from tests.support.cli import environment
from tests.support.tls import certificate

PLAIN = EndpointSecurity()


@contextmanager
def serving(security: EndpointSecurity = PLAIN, host: str = "127.0.0.1") -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("driftpoint_test", "One", registry=registry).set(1)
    server = MetricsServer(registry, host, 0, security)
    try:
        yield server
    finally:
        server.close()


def get(server: MetricsServer, context: ssl.SSLContext | None = None) -> str:
    with urllib.request.urlopen(server.url, timeout=180, context=context) as answer:
        text: str = answer.read().decode()
        return text


def trusting(crt: Path, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(crt))
    if own is not None:
        context.load_cert_chain(*own)
    return context


def tls(crt: Path, key: Path, client_ca: Path | None = None) -> EndpointSecurity:
    return EndpointSecurity(
        tls=Tls(cert=str(crt), key=str(key), client_ca=None if client_ca is None else str(client_ca))
    )


def listens(server: MetricsServer) -> bool:
    """Whether this process has the listening socket of the server's port, by the kernel's tables."""
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    port = f":{server.port:04X}"
    listening = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port) and row[3] == "0A"}
    return any(_target(one) in listening for one in Path("/proc/self/fd").iterdir())


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # the descriptor of the listing itself
        return ""


def test_plain_http_on_loopback() -> None:
    with serving() as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        assert "driftpoint_test 1.0" in get(server)


def test_ipv6() -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 on this machine")
    with serving(host="::1") as server:
        assert server.url == f"http://[::1]:{server.port}/metrics"
        assert "driftpoint_test 1.0" in get(server)


def test_https_refuses_plain_requests(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    crt, key = certificate(tmp_path, "server")
    with serving(tls(crt, key)) as server:
        assert server.url == f"https://127.0.0.1:{server.port}/metrics"
        assert "driftpoint_test 1.0" in get(server, trusting(crt))
        with pytest.raises(OSError), urllib.request.urlopen(server.url.replace("https", "http"), timeout=180):
            pass
        assert "driftpoint_test 1.0" in get(server, trusting(crt))
    assert capfd.readouterr().err == "", "a failed handshake does not fill the job's stderr"


def test_client_certificates_are_required_with_a_client_ca(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "server")
    ca, _ = certificate(tmp_path, "clients")
    own = certificate(tmp_path, "reader", ca.with_suffix(""))
    with serving(tls(crt, key, ca)) as server:
        assert "driftpoint_test 1.0" in get(server, trusting(crt, own))
        for stranger in (None, certificate(tmp_path, "stranger")):
            with pytest.raises(OSError):
                get(server, trusting(crt, stranger))
        assert "driftpoint_test 1.0" in get(server, trusting(crt, own))


def test_unusable_tls_files_are_a_config_error(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "one")
    _, other = certificate(tmp_path, "other")
    locked, text = tmp_path / "locked.key", tmp_path / "text"
    text.write_text("no certificate\n")
    words = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(words, check=True, capture_output=True)
    for security in (
        tls(crt, other),
        tls(text, key),
        tls(tmp_path / "missing", key),
        tls(crt, locked),  # must not ask for the passphrase
        tls(crt, key, text),
        tls(crt, key, tmp_path / "missing"),
    ):
        with pytest.raises(ConfigError, match=r"metrics\.tls: cannot use cert"), serving(security):
            pass


def test_silent_clients_do_not_delay_others_or_the_end(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "one")
    for security, context in ((PLAIN, None), (tls(crt, key), trusting(crt))):
        with ExitStack() as stack, serving(security) as server:
            for _ in range(3):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30))
            assert "driftpoint_test" in get(server, context)
        assert not listens(server)


def test_silent_clients_are_disconnected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(metrics_server, "_CLIENT_TIMEOUT", 0.2)
    for security in (PLAIN, tls(*certificate(tmp_path, "one"))):
        with serving(security) as server, socket.create_connection(("127.0.0.1", server.port), 30) as client:
            assert client.recv(1) == b""


def test_malformed_requests_end_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        for rubbish in (
            b"\0" * 100_000,
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"\r\n",
        ):
            with socket.create_connection(("127.0.0.1", server.port), 30) as client:
                try:
                    client.sendall(rubbish)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass
                except OSError:  # it was ended already
                    pass
        assert "driftpoint_test" in get(server)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["node..7", f"{'a' * 70}.example"])
def test_an_invalid_host_name_is_an_os_error(host: str) -> None:
    with pytest.raises(OSError, match=r"is not a valid host name"):
        MetricsServer(CollectorRegistry(), host, 0, EndpointSecurity(insecure=True))


def test_a_port_in_use_is_an_os_error() -> None:
    with serving() as server, pytest.raises(OSError):
        MetricsServer(CollectorRegistry(), "127.0.0.1", server.port, PLAIN)


@pytest.mark.parametrize("secure", [False, True])
def test_a_forked_child_does_not_keep_the_port(tmp_path: Path, secure: bool) -> None:
    """A data loader's worker may outlive its trainer. The child looks itself, after ``os.fork`` returned to it."""
    crt, key = certificate(tmp_path, "one")
    with serving(tls(crt, key) if secure else PLAIN) as server:
        assert listens(server)
        child = os.fork()
        if child == 0:
            try:
                before = listens(server)
                server.close()  # returns at once: there is no thread to wait for
                os._exit(1 if before else 0)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert listens(server)
        assert "driftpoint_test" in get(server, trusting(crt) if secure else None), "the parent's still serves"


def test_closing_frees_the_port_and_ends_the_thread() -> None:
    before = set(threading.enumerate())  # other tests of this process may have left one
    with serving() as server:
        assert listens(server)
    assert not listens(server)
    left = set(threading.enumerate()) - before
    assert not any(one.name == "driftpoint-metrics" and one.is_alive() for one in left)
    server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert is_loopback(host)
    PLAIN.check(host, "metrics.host")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.3", "node7", "localhost.evil.example", "2130706433"])
def test_other_addresses_need_tls_or_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^metrics\.host: .*tls.*insecure: true"):
        PLAIN.check(host, "metrics.host")
    EndpointSecurity(tls=Tls(cert="c", key="k")).check(host, "metrics.host")
    EndpointSecurity(insecure=True).check(host, "metrics.host")


@pytest.mark.parametrize(
    ("incomplete", "names"),
    [
        (Tls(cert="c"), "metrics.tls: cert is set and key is not"),
        (Tls(key="k"), "metrics.tls: key is set and cert is not"),
        (Tls(client_ca="a"), "metrics.tls.client_ca: needs"),
    ],
)
def test_incomplete_tls_settings_are_refused(incomplete: Tls, names: str) -> None:
    for insecure in (False, True):
        with pytest.raises(ConfigError, match=names):
            EndpointSecurity(tls=incomplete, insecure=insecure).check("127.0.0.1", "metrics.host")


OUT_OF_DESCRIPTORS = """
import os, resource, socket, time
from prometheus_client import CollectorRegistry
from store.metrics_server import EndpointSecurity, MetricsServer

server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, EndpointSecurity())
client = socket.socket()
client.settimeout(30)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
client.connect(("127.0.0.1", server.port))
began, used = time.monotonic(), time.process_time()
time.sleep(2)
print((time.process_time() - used) / (time.monotonic() - began))
for descriptor in held:
    os.close(descriptor)
client.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
print(client.recv(12).decode())
"""


@pytest.mark.slow
def test_without_free_descriptors_it_waits_and_takes_no_processor_time() -> None:
    command = [sys.executable, "-c", OUT_OF_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=True)
    share, answer = done.stdout.splitlines()
    assert float(share) < 0.2, "of a core; a loop that does not wait takes more than half of one"
    assert answer == "HTTP/1.0 200"


def test_a_malformed_accept_header_leaves_the_log_of_the_job_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as server, socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text;version=x\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.0 500"
    assert capfd.readouterr().err == ""
