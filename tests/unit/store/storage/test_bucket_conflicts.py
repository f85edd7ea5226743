"""A server that answers 409 or 412 to a request without a condition has not answered it: such a request is repeated."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from store.errors import ExistsError, UnreachableError
from store.storage.bucket import Bucket, ObjectOptions
from tests.support.s3 import BUCKET, KEYS, Server

pytest.importorskip("obstore")

_DATA = b"an object"


class Refusing(ThreadingHTTPServer):
    """Refuses so many requests for a key, then has the object."""

    status = 409
    refusals = 2
    asked = 0


class _Handler(BaseHTTPRequestHandler):
    server: Refusing

    def _answer(self) -> None:
        if length := int(self.headers.get("Content-Length", 0)):
            self.rfile.read(length)
        self.server.asked += 1
        refused = self.server.asked <= self.server.refusals
        body = b"<Error><Code>OperationAborted</Code></Error>" if refused else _DATA
        self.send_response(self.server.status if refused else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"abc"')
        self.send_header("Last-Modified", "Mon, 05 Jan 2026 10:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = _answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusing]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with Refusing(("127.0.0.1", 0), _Handler) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def bucket(server: Refusing, seconds: float) -> Bucket:
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    return Bucket(BUCKET, ObjectOptions(endpoint=endpoint, region="us-east-1", allow_http=True, retry_seconds=seconds))


@pytest.mark.parametrize("status", [409, 412])
def test_reads_are_repeated(server: Refusing, status: int) -> None:
    server.status = status
    assert bucket(server, 60.0).get("key", 100) == _DATA
    server.asked = 0
    assert bucket(server, 60.0).size("key") == len(_DATA)
    server.asked = 0
    bucket(server, 60.0).replace("key", _DATA)


@pytest.mark.parametrize("status", [409, 412])
def test_a_read_that_is_refused_to_the_end_does_not_claim_that_the_object_is_there(
    server: Refusing, status: int
) -> None:
    server.status, server.refusals = status, 10**9
    with pytest.raises(UnreachableError):
        bucket(server, 0.5).get("key", 100)


def test_of_two_that_create_an_object_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the server of the tests is slow between looking for the object and putting it."""
    from moto.s3.models import S3Backend

    look = S3Backend.get_object

    def look_slowly(backend: S3Backend, *arguments: object, **named: object) -> object:
        found = look(backend, *arguments, **named)
        time.sleep(0.2)
        return found

    def create(data: bytes) -> bool:
        try:
            made.create("object", data)
        except ExistsError:
            return False
        return True

    monkeypatch.setattr(S3Backend, "get_object", look_slowly)
    with Server() as server, ThreadPoolExecutor(2) as pool:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        made = Bucket(BUCKET, ObjectOptions(region="us-east-1"))
        assert sorted(pool.map(create, (b"one", b"two"))) == [False, True]
