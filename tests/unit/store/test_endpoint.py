"""Endpoints over real sockets: logins, TLS, certificates that are renewed, and clients that mean no good."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from store.endpoint import server
from store.endpoint.access import BasicAuth, Guards, Tls, is_loopback, url
from store.endpoint.server import Endpoint
from store.endpoint.share import BURST, SHARE, Share
from store.errors import ConfigError
from tests.support.tls import certificate


@contextmanager
def listening(guards: Guards | None = None) -> Iterator[Endpoint]:
    registry = CollectorRegistry()
    Gauge("driftpoint_test", "One", registry=registry).set(1)
    endpoint = Endpoint(registry, "127.0.0.1", 0, guards or Guards())
    try:
        yield endpoint
    finally:
        endpoint.close()


def get(endpoint: Endpoint, login: str | None = None, context: ssl.SSLContext | None = None) -> str:
    request = urllib.request.Request(endpoint.url)
    if login is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    with urllib.request.urlopen(request, timeout=180, context=context) as answer:
        text: str = answer.read().decode()
        return text


def trusting(crt: Path, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(crt))
    if own is not None:
        context.load_cert_chain(*own)
    return context


@pytest.fixture
def login(tmp_path: Path) -> BasicAuth:
    path = tmp_path / "password"
    path.write_text("säcret: with colon\n")
    path.chmod(0o600)
    return BasicAuth(user="prometheus", password_file=str(path))


def test_a_login_is_asked_for(login: BasicAuth) -> None:
    with listening(Guards(basic_auth=login)) as endpoint:
        assert "driftpoint_test 1.0" in get(endpoint, "prometheus:säcret: with colon")
        wrong = (None, "", "prometheus:", "prometheus:säcret: with colo", "Prometheus:säcret: with colon", ":", "\0")
        for attempt in wrong:
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(endpoint, attempt)
            assert refused.value.code == 401
            assert refused.value.headers["WWW-Authenticate"].startswith('Basic realm="driftpoint"')
            assert b"driftpoint_test" not in refused.value.read()


@pytest.mark.parametrize("header", ["Basic", "Basic !!!", "Bearer cHJvbQ==", "Basic " + "A" * 5000, "basic ÿ"])
def test_what_is_no_login_is_none(login: BasicAuth, header: str) -> None:
    with listening(Guards(basic_auth=login)) as endpoint:
        with socket.create_connection(("127.0.0.1", endpoint.port), 30) as client:
            client.sendall(f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\n\r\n".encode("latin-1"))
            assert client.recv(4096).split(b"\r\n")[0].endswith(b"401 Unauthorized")
        assert "driftpoint_test" in get(endpoint, "prometheus:säcret: with colon")


def test_a_password_that_cannot_be_had_leaves_no_open_door(tmp_path: Path, login: BasicAuth) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path in (tmp_path / "none", empty, tmp_path):
        with (
            pytest.raises(ConfigError, match=r"metrics\.basic_auth\.password_file"),
            listening(Guards(basic_auth=BasicAuth(user="a", password_file=str(path)))),
        ):
            pass


def test_a_password_that_others_can_read_is_told(login: BasicAuth, caplog: pytest.LogCaptureFixture) -> None:
    Path(login.password_file or "").chmod(0o644)
    with listening(Guards(basic_auth=login)):
        assert "chmod 600" in caplog.text


def test_over_tls_and_a_renewed_certificate_is_taken(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "old")
    with listening(Guards(tls=Tls(cert=str(crt), key=str(key)))) as endpoint:
        assert endpoint.url.startswith("https://127.0.0.1:")
        assert "driftpoint_test 1.0" in get(endpoint, context=trusting(crt))
        with pytest.raises(OSError), urllib.request.urlopen(endpoint.url.replace("https", "http"), timeout=180):
            pass
        old = crt.read_bytes()
        new_crt, new_key = certificate(tmp_path, "new")
        crt.write_bytes(b"half a certificate")
        (tmp_path / "old.pem").write_bytes(old)
        assert "driftpoint_test 1.0" in get(endpoint, context=trusting(tmp_path / "old.pem")), "the one before stays"
        crt.write_bytes(new_crt.read_bytes())
        key.write_bytes(new_key.read_bytes())
        assert "driftpoint_test 1.0" in get(endpoint, context=trusting(new_crt))
        with pytest.raises(urllib.error.URLError):
            get(endpoint, context=trusting(tmp_path / "old.pem"))


def test_a_certificate_that_is_renewed_before_its_key_costs_nothing(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "old")
    new_crt, new_key = certificate(tmp_path, "new")
    with listening(Guards(tls=Tls(cert=str(crt), key=str(key)))) as endpoint:
        before = tmp_path / "before.pem"
        before.write_bytes(crt.read_bytes())
        crt.write_bytes(new_crt.read_bytes())
        assert "driftpoint_test 1.0" in get(endpoint, context=trusting(before)), "both of before stay"
        key.write_bytes(new_key.read_bytes())
        assert "driftpoint_test 1.0" in get(endpoint, context=trusting(new_crt))


def test_readers_with_certificates(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "server")
    ca, _ = certificate(tmp_path, "clients")
    own = certificate(tmp_path, "reader", ca.with_suffix(""))
    with listening(Guards(tls=Tls(cert=str(crt), key=str(key), client_ca=str(ca)))) as endpoint:
        assert "driftpoint_test 1.0" in get(endpoint, context=trusting(crt, own))
        for stranger in (None, certificate(tmp_path, "stranger")):
            with pytest.raises(OSError):
                get(endpoint, context=trusting(crt, stranger))


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "one")
    _, other = certificate(tmp_path, "other")
    (tmp_path / "none").write_text("no certificate\n")
    for tls in (Tls(cert=str(crt), key=str(other)), Tls(cert=str(tmp_path / "none"), key=str(key))):
        with pytest.raises(ConfigError, match=r"metrics\.tls: cannot use cert"), listening(Guards(tls=tls)):
            pass


def _silent(endpoint: Endpoint, stack: ExitStack) -> Callable[[], bool]:
    """Connects and says nothing. Whether it was ended."""
    client = stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), 30))

    def ended() -> bool:
        client.settimeout(30)
        try:
            return client.recv(1) == b""
        except ConnectionError:
            return True

    return ended


def test_silent_clients_cost_nobody_else_anything(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "one")
    for guards, context in ((Guards(), None), (Guards(tls=Tls(cert=str(crt), key=str(key))), trusting(crt))):
        with listening(guards) as endpoint, ExitStack() as stack:
            first = _silent(endpoint, stack)
            assert "driftpoint_test" in get(endpoint, context=context), "one silent client stops nobody"
            others = [_silent(endpoint, stack) for _ in range(3 * server._CONNECTIONS)]
            assert "driftpoint_test" in get(endpoint, context=context), "nor do many"
            assert first() and others[0](), "the oldest are ended"


def test_a_client_that_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server._Handler, "timeout", 0.2)
    with listening() as endpoint, ExitStack() as stack:
        assert _silent(endpoint, stack)()


def test_what_is_no_request_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with listening() as endpoint:
        for rubbish in (
            b"\0" * 100_000,
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"\r\n",
        ):
            with socket.create_connection(("127.0.0.1", endpoint.port), 30) as client:
                try:
                    client.sendall(rubbish)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass
                except OSError:  # it was ended already
                    pass
        assert "driftpoint_test" in get(endpoint)
    assert capfd.readouterr().err == ""


def test_a_client_that_never_comes_to_an_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LONGEST", 0.2)
    with listening() as endpoint, socket.create_connection(("127.0.0.1", endpoint.port), 30) as client:
        client.sendall(b"GET / HTTP/1.1\r\nA: ")
        client.settimeout(0.01)
        ended, tries = False, 0
        while not ended and tries < 3000:  # each byte well within the patience for silence
            tries += 1
            try:
                client.sendall(b"b")
                ended = client.recv(1) == b""
            except TimeoutError:
                pass
            except ConnectionError:
                ended = True
        assert ended


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=x",
        "text/plain; version=1.x",
        "text/plain;version=\xff",
        "," * 5000,
        "*/*",
    ],
)
def test_whatever_a_client_would_like_to_have_it_gets_something(accept: str, caplog: pytest.LogCaptureFixture) -> None:
    with listening() as endpoint:
        request = urllib.request.Request(endpoint.url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert b"driftpoint_test 1.0" in answer.read()
    assert caplog.text == ""


@pytest.mark.parametrize("host", ["node..7", f"{'a' * 70}.example"])
def test_a_host_that_is_no_name_is_a_trouble_like_any_other(host: str) -> None:
    with pytest.raises(OSError, match=r"is no name of a host"):
        Endpoint(CollectorRegistry(), host, 0, Guards(insecure=True))


def test_a_forked_child_does_not_keep_the_port() -> None:
    """As a worker of a data loader does, that outlives its trainer."""
    with listening() as endpoint:
        port = endpoint.port
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        os.close(read)
        assert "driftpoint_test" in get(endpoint), "the parent's goes on"
    try:
        Endpoint(CollectorRegistry(), "127.0.0.1", port, Guards()).close()
    finally:
        os.close(write)
        os.waitpid(child, 0)


class Watch:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_clients_take_their_share_and_then_wait() -> None:
    clock = Watch()
    share = Share(clock)
    share.took(BURST)
    assert share.wait() == 0, "a burst"
    share.took(0.5)
    assert share.wait() == pytest.approx(0.5 / SHARE)
    clock.now += 0.4 / SHARE
    assert share.wait() == pytest.approx(0.1 / SHARE)
    clock.now += 1e6
    share.took(BURST)
    assert share.wait() == 0, "no more than a burst gathers"
    share.took(0.5)
    assert share.wait() > 0


def test_whoever_asks_without_end_waits_and_closing_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Watch()
    monkeypatch.setattr(server, "Share", lambda: Share(clock))
    with listening() as endpoint:
        share = endpoint._server._share
        get(endpoint)
        assert share.wait() == 0
        share.took(BURST)  # what the first one cost was counted, too
        while share.wait() == 0:
            time.sleep(0.01)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(get, endpoint)
            assert wait([waiting], 0.5).not_done, "nobody is served"
            clock.now += 1e6
            assert "driftpoint_test" in waiting.result(30)
        share.took(1e6)
        with socket.create_connection(("127.0.0.1", endpoint.port), 30):
            pass


def test_closing_lets_go_of_the_port_and_the_thread() -> None:
    before = set(threading.enumerate())  # other tests of this process may have left one
    with listening() as endpoint:
        port = endpoint.port
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 5)
    left = set(threading.enumerate()) - before
    assert not any(one.name == "driftpoint-metrics" and one.is_alive() for one in left)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_this_machine_needs_no_guard(host: str) -> None:
    assert is_loopback(host)
    Guards().require(host, "metrics.host")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.3", "node7", "localhost.evil.example", "2130706433"])
def test_any_other_needs_tls_and_a_login_or_a_word(host: str) -> None:
    tls, login = Tls(cert="c", key="k"), BasicAuth(user="u", password_file="p")
    for lacking, names in ((Guards(), "tls"), (Guards(basic_auth=login), "tls"), (Guards(tls=tls), "basic_auth")):
        with pytest.raises(ConfigError, match=rf"^metrics\.host: .*{names}.*insecure: true"):
            lacking.require(host, "metrics.host")
    for enough in (
        Guards(tls=tls, basic_auth=login),
        Guards(tls=Tls(cert="c", key="k", client_ca="a")),
        Guards(insecure=True),
    ):
        enough.require(host, "metrics.host")


@pytest.mark.parametrize(
    ("guards", "names"),
    [
        (Guards(tls=Tls(cert="c")), "metrics.tls: cert is set and key is not"),
        (Guards(tls=Tls(key="k")), "metrics.tls: key is set and cert is not"),
        (Guards(basic_auth=BasicAuth(user="u")), "metrics.basic_auth: user is set and password_file is not"),
        (Guards(basic_auth=BasicAuth(password_file="p")), "metrics.basic_auth: password_file is set and user is not"),
        (Guards(tls=Tls(client_ca="a")), "metrics.tls.client_ca: needs"),
    ],
)
def test_half_a_guard_is_none(guards: Guards, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        guards.require("127.0.0.1", "metrics.host")


def test_addresses_for_people() -> None:
    assert url("::1", 9464, False) == "http://[::1]:9464/metrics"
    assert url("node7", 9464, True) == "https://node7:9464/metrics"
