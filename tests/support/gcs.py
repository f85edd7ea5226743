"""Google Cloud Storage's XML interface, as far as obstore asks for it: a small server of our own, in this process.

It was written from Google's description, since no registry has a server with this interface, and compared with nothing
of Google's. What it does not know it answers with 501. Every request must have a token of the metadata server, which is
at the same address, so credentials are fetched as on one of Google's machines. Its list of requests is for tests.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET = "bucket"
TOKEN = "token-of-the-instance"
_PAGE = 1000
_OWN = "x-goog-meta-"
_STATUS = {
    "AuthenticationRequired": 401,
    "EntityTooSmall": 400,
    "InvalidPart": 400,
    "InvalidRange": 416,
    "MalformedCompleteMultipartUploadRequest": 400,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NotImplemented": 501,
    "PreconditionFailed": 412,
}


class Refused(Exception):
    """An answer by its code."""


@dataclass(frozen=True)
class Object:
    data: bytes
    metadata: Mapping[str, str]
    generation: int
    stamp: float

    @property
    def etag(self) -> str:
        return _etag(self.data)

    @property
    def headers(self) -> dict[str, str]:
        stamp = {"Last-Modified": formatdate(self.stamp, usegmt=True)}
        return {"ETag": self.etag, "x-goog-generation": str(self.generation), **stamp, **self.metadata}

    def entry(self, key: str) -> str:
        """How a list shows it."""
        stamp = datetime.fromtimestamp(self.stamp, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        told = f"<Generation>{self.generation}</Generation><LastModified>{stamp}</LastModified><ETag>{self.etag}</ETag>"
        return f"<Contents><Key>{escape(key)}</Key>{told}<Size>{len(self.data)}</Size></Contents>"


@dataclass
class Upload:
    key: str
    metadata: Mapping[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class GoogleServer:
    """A context manager. least_part: bytes that every part of an upload must have, but for the last one."""

    def __init__(self, least_part: int = 5 << 20) -> None:
        self.least_part = least_part
        self.kept: dict[str, Object] = {}
        self.uploads: dict[str, Upload] = {}
        self.asked: list[str] = []
        self._lock = threading.Lock()
        self._numbers = count(1)

    def __enter__(self) -> GoogleServer:
        server = self

        class Handler(_Handler):
            of = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it, besides a URL."""
        host = f"127.0.0.1:{self.port}"
        return {"GOOGLE_BASE_URL": f"http://{host}", "GOOGLE_ALLOW_HTTP": "true", "GCE_METADATA_HOST": host}

    def objects(self, prefix: str) -> dict[str, bytes]:
        """All objects below a prefix, by the rest of their keys."""
        with self._lock:
            found = {key: one.data for key, one in self.kept.items() if key.startswith(f"{prefix}/")}
        return {key.removeprefix(f"{prefix}/"): data for key, data in found.items()}

    def put(self, prefix: str, objects: Mapping[str, bytes]) -> None:
        """Have just these objects below a prefix."""
        with self._lock:
            for key in [key for key in self.kept if key.startswith(f"{prefix}/")]:
                del self.kept[key]
            for name, data in objects.items():
                self._keep(f"{prefix}/{name}", data, {})

    def unfinished_uploads(self) -> list[str]:
        """Keys of uploads in parts that were neither completed nor given up."""
        return [upload.key for upload in list(self.uploads.values())]

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Carry one request out. ``headers``: by their names in small letters."""
        parts = urlsplit(target)
        if parts.path.startswith("/computeMetadata/"):
            return _token(headers)
        if headers.get("authorization") != f"Bearer {TOKEN}":
            raise Refused("AuthenticationRequired")
        bucket, _, key = unquote(parts.path.removeprefix("/")).partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        with self._lock:
            self.asked.append(" ".join([method, ",".join(sorted(query)) or "-", key]))
            if bucket != BUCKET:
                raise Refused("NoSuchBucket")
            if not key:
                return self._listed(query) if method == "GET" else _unknown(method)
            if "uploads" in query or "uploadId" in query:
                return self._in_parts(method, key, query, headers, body)
            if query:
                return _unknown(str(query))
            if method == "PUT":
                return self._put(key, headers, body)
            if key not in self.kept:
                raise Refused("NoSuchKey")
            if method == "DELETE":
                del self.kept[key]
                return Answer(204)
            return _read(self.kept[key], headers.get("range"))

    def _put(self, key: str, headers: Mapping[str, str], body: bytes) -> Answer:
        wanted = headers.get("x-goog-if-generation-match")
        now = self.kept[key].generation if key in self.kept else 0
        if wanted is not None and int(wanted) != now:
            raise Refused("PreconditionFailed")
        return Answer(200, b"", self._keep(key, body, _own(headers)).headers)

    def _keep(self, key: str, data: bytes, metadata: Mapping[str, str]) -> Object:
        self.kept[key] = made = Object(data, metadata, next(self._numbers), time.time())
        return made

    def _in_parts(
        self, method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> Answer:
        if method == "POST" and "uploads" in query:
            name = f"upload/{next(self._numbers)}+="
            self.uploads[name] = Upload(key, _own(headers))
            return _xml("InitiateMultipartUploadResult", ("Bucket", BUCKET), ("Key", key), ("UploadId", name))
        upload = self.uploads.get(query["uploadId"])
        if upload is None or upload.key != key:
            raise Refused("NoSuchUpload")
        if method == "PUT":
            upload.parts[int(query["partNumber"])] = body
            return Answer(200, b"", {"ETag": _etag(body)})
        if method == "DELETE":
            del self.uploads[query["uploadId"]]
            return Answer(204)
        if method != "POST":
            return _unknown(method)
        made = self._keep(key, self._joined(upload, body), upload.metadata)
        del self.uploads[query["uploadId"]]
        answer = _xml("CompleteMultipartUploadResult", ("Bucket", BUCKET), ("Key", key), ("ETag", made.etag))
        return Answer(200, answer.body, {"x-goog-generation": str(made.generation)})

    def _joined(self, upload: Upload, body: bytes) -> bytes:
        listed = [
            (int(part.findtext("{*}PartNumber", "")), part.findtext("{*}ETag", ""))
            for part in ElementTree.fromstring(body).findall("{*}Part")
        ]
        numbers = [number for number, _ in listed]
        if not numbers or numbers != sorted(set(numbers)):
            raise Refused("MalformedCompleteMultipartUploadRequest")
        if any(number not in upload.parts or _etag(upload.parts[number]) != etag for number, etag in listed):
            raise Refused("InvalidPart")
        if any(len(upload.parts[number]) < self.least_part for number in numbers[:-1]):
            raise Refused("EntityTooSmall")
        return b"".join(upload.parts[number] for number in numbers)

    def _listed(self, query: Mapping[str, str]) -> Answer:
        """Names after the token, at most a page of objects and common prefixes together."""
        if query.get("list-type") != "2" or set(query) - {"list-type", "prefix", "delimiter", "continuation-token"}:
            return _unknown(str(query))
        found: list[str] = []
        text, last = "", ""
        for name, one in self._names(query.get("prefix", ""), query.get("delimiter", "")):
            if name <= query.get("continuation-token", "") or name in found[-1:]:
                continue
            if len(found) == _PAGE:
                text += f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
                break
            found.append(name)
            last = name
            text += (
                f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" if one is None else one.entry(name)
            )
        more = str("NextContinuationToken" in text).lower()
        return Answer(200, f"<ListBucketResult><IsTruncated>{more}</IsTruncated>{text}</ListBucketResult>".encode())

    def _names(self, prefix: str, delimiter: str) -> Iterator[tuple[str, Object | None]]:
        for key in sorted(key for key in self.kept if key.startswith(prefix)):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            yield (f"{prefix}{head}{found}", None) if found else (key, self.kept[key])


def _token(headers: Mapping[str, str]) -> Answer:
    if headers.get("metadata-flavor") != "Google":
        raise Refused("AuthenticationRequired")
    found = {"access_token": TOKEN, "expires_in": 3599, "token_type": "Bearer"}
    return Answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})


def _unknown(what: str) -> Answer:
    raise Refused("NotImplemented", what)


def _own(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith(_OWN)}


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _read(one: Object, asked: str | None) -> Answer:
    if asked is None:
        return Answer(200, one.data, one.headers)
    start, _, last = asked.removeprefix("bytes=").partition("-")
    first, end = int(start), min(int(last or len(one.data)) + 1, len(one.data))
    if first >= len(one.data):
        raise Refused("InvalidRange")
    place = {"Content-Range": f"bytes {first}-{end - 1}/{len(one.data)}"}
    return Answer(206, one.data[first:end], {**one.headers, **place})


def _xml(name: str, *told: tuple[str, str]) -> Answer:
    inner = "".join(f"<{tag}>{escape(text)}</{tag}>" for tag, text in told)
    return Answer(200, f"<?xml version='1.0' encoding='UTF-8'?><{name}>{inner}</{name}>".encode())


class _Handler(BaseHTTPRequestHandler):
    of: GoogleServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each body waits until the client has acknowledged the headers

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def _asked(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            answer = self.of.answer(self.command, self.path, headers, body)
        except Refused as refused:
            code = str(refused.args[0])
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{escape(str(refused))}</Message></Error>"
            answer = Answer(_STATUS[code], text.encode(), {"Content-Type": "application/xml; charset=UTF-8"})
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _asked

    def log_message(self, format: str, *args: object) -> None:
        pass
