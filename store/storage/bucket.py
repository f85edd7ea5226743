"""Send requests to one bucket with obstore: retried, bounded in time, with errors mapped to the project's.

A missing answer does not tell whether a request was carried out. So a new object is put on the condition that it does
not exist, and after a refusal or no answer it is read: an object with exactly our bytes is ours. Credentials come only
from the environment. Any thread may use a bucket."""

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, repeat
from typing import Any, TypeVar

from store.errors import ExistsError, MissingError, NoSpaceError, StorageError, UnreachableError, UnsupportedError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_LOST = "Received redirect without LOCATION"  # obstore's message when the bucket is in another region
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})

_CHECK_KEYS = (
    "check the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; AZURE_STORAGE_ACCOUNT_NAME and "
    "AZURE_STORAGE_ACCOUNT_KEY; GOOGLE_APPLICATION_CREDENTIALS; a web identity, or the instance's role) and what they "
    "permit in this bucket: get, put, delete and list"
)
_CHECK_BUCKET = "there is no such bucket: make it, or check its name and `s3: {endpoint: ..., region: ...}`"
_CHECK_REGION = "the bucket is in another region: set `s3: {region: ...}`, or AWS_REGION"
_ADVICE = {
    "NoSuchBucket": _CHECK_BUCKET,
    "ContainerNotFound": _CHECK_BUCKET,
    "AuthenticationFailed": _CHECK_KEYS,
    "AccessDenied": _CHECK_KEYS,
    "InvalidAccessKeyId": _CHECK_KEYS,
    "SignatureDoesNotMatch": _CHECK_KEYS,
    "ExpiredToken": _CHECK_KEYS,
    "PermanentRedirect": _CHECK_REGION,
    "AuthorizationHeaderMalformed": _CHECK_REGION,
    "NotImplemented": "the server lacks conditional puts (If-None-Match, or Google's header), which a commit needs: "
    "use one that has them",
    "SlowDown": "the server asked for fewer requests until the retries ended",
    "RequestTimeTooSkewed": "the clock of this machine is wrong: set it",
    "EntityTooLarge": "the object is too large for the server",
    "QuotaExceeded": "the quota is used up: free space in it",
}
_SIGNS = (
    (("169.254.", "/latest/api/token", "computeMetadata"), f"there are no credentials, or none came; {_CHECK_KEYS}"),
    ((_LOST,), _CHECK_REGION),
    (("service account file",), "GOOGLE_APPLICATION_CREDENTIALS must name the file of a service account or a user"),
    (("invalid path",), "an object has a key that is no path (an empty name, or a dot, between slashes): remove it"),
    (
        ("timed out", "kind: Timeout"),
        "the server did not answer in time: check the endpoint, or raise `s3: {request_seconds: ...}`",
    ),
    (
        ("error sending request", "Connect"),
        "the server cannot be reached: check `s3: {endpoint: ...}`, AWS_ENDPOINT_URL or GOOGLE_BASE_URL",
    ),
)
"""Parts of obstore's own messages, and the advice for each."""


def import_obstore() -> Any:
    """Import obstore. Raises UnsupportedError, with the command to install it, if it is missing."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise UnsupportedError(f"object stores need obstore ({error}): run `pip install 'driftpoint[s3]'`") from error
    return obstore


def is_taken(error: BaseException) -> bool:
    """Return whether a put was refused because the object exists or is being put at this moment."""
    return isinstance(error, _exceptions().AlreadyExistsError | _exceptions().PreconditionError)


def is_passing(error: BaseException) -> bool:
    """Return whether a retry may succeed: no answer came, or a temporary error."""
    found = _exceptions()
    refused = found.PermissionDeniedError, found.UnauthenticatedError, found.NotSupportedError, found.InvalidPathError
    if isinstance(error, (*refused, FileNotFoundError)) or _LOST in str(error):
        return False
    status = _STATUS.search(str(error))
    return int(status[1]) in _PASSING if status is not None else isinstance(error, found.GenericError | OSError)


def storage_error(error: BaseException, verb: str, where: str) -> StorageError:
    """Return the project's error for an error of obstore. ``where`` is bucket and key."""
    text = str(error)
    code = _CODE.search(text)
    advice = _ADVICE.get(code[1] if code else "") or _advice(error, text)
    if isinstance(error, FileNotFoundError) and not (code and _ADVICE.get(code[1]) == _CHECK_BUCKET):
        return MissingError(f"cannot {verb} {where}: it is not there")
    if is_taken(error):
        return ExistsError(f"cannot {verb} {where}: another object is there already")
    kind = NoSpaceError if code and code[1] == "QuotaExceeded" else StorageError
    return kind(f"cannot {verb} {where}: {advice or _short(text)}" + (f" ({_short(text)})" if advice else ""))


def _advice(error: BaseException, text: str) -> str:
    found = _exceptions()
    if isinstance(error, found.PermissionDeniedError | found.UnauthenticatedError):
        return _CHECK_KEYS
    if "scheme" in text.lower() and "http" in text:
        return "the endpoint is not https: set `s3: {allow_http: true}`, AWS_ALLOW_HTTP or GOOGLE_ALLOW_HTTP, if meant"
    return next((advice for signs, advice in _SIGNS if any(sign in text for sign in signs)), "")


def _short(text: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", text.split("\n\nDebug source", 1)[0]).split())[:240]


def _exceptions() -> Any:
    return import_obstore().exceptions


MIB = 1 << 20
_PARTS = 9000


@dataclass(frozen=True)
class ObjectOptions:
    """Settings of an object store."""

    endpoint: str | None = None  # None for the environment's, ``AWS_ENDPOINT_URL``
    region: str | None = None  # None for the environment's, ``AWS_REGION``
    allow_http: bool | None = None  # None for the environment's, ``AWS_ALLOW_HTTP``
    virtual_hosted: bool = False  # whether the bucket is part of the host name
    request_seconds: float = 30.0  # time limit of one request
    retry_seconds: float = 60.0  # time limit of one operation with all retries
    part_mib: float = 16  # size of the parts of large payloads; smaller ones take one request
    connections: int = 8  # parallel parts or ranges
    spool: str | None = None  # directory for payloads whose header is written last; None for the system's temporary one

    def part_bytes(self, most: int = 0) -> int:
        """Return the part size in bytes of a payload of up to ``most`` bytes: S3 allows 10 000 parts."""
        return max(int(self.part_mib * MIB), -(-most // _PARTS))


SCHEMES = {
    "s3": ("S3Store", "endpoint", "AWS_ALLOW_HTTP"),
    "az": ("AzureStore", "endpoint", "AZURE_ALLOW_HTTP"),
    "gs": ("GCSStore", "base_url", "GOOGLE_ALLOW_HTTP"),
}
"""Kinds of URLs, with obstore's class, its option for an endpoint, and the variable that permits one without TLS."""

T = TypeVar("T")

OWNER = "driftpoint_write"  # metadata key that identifies an upload in parts; Azure permits no hyphen


class Bucket:
    """One bucket. Raises UnsupportedError if obstore is not installed, StorageError for invalid options."""

    def __init__(self, name: str, options: ObjectOptions, scheme: str = "s3") -> None:
        self.name, self.options, self._scheme = name, options, scheme
        self._lib = import_obstore()
        self.failures = (self._lib.exceptions.BaseError, OSError)  # that a :meth:`writer` may raise
        try:
            self._store = self._open()
        except (*self.failures, ValueError) as error:
            raise storage_error(error, "open", self.where("")) from error

    def where(self, key: str) -> str:
        """Return the URL of an object for messages."""
        return f"{self._scheme}://{self.name}/{key}"

    def create(self, key: str, data: bytes) -> None:
        """Put an object under a free name. Raises ExistsError if an object with other bytes is there."""

        def put() -> None:
            try:
                self._lib.put(self._store, key, data, mode="create", use_multipart=False)
            except self.failures as error:
                found = self._holds(key, data) if is_taken(error) or is_passing(error) else None
                if found is None:
                    raise
                if not found:
                    raise ExistsError(f"cannot put {self.where(key)}: another object is there already") from error

        self._retry("put", key, put)

    def replace(self, key: str, data: bytes) -> None:
        self._retry("put", key, lambda: self._lib.put(self._store, key, data, use_multipart=False))

    def get(self, key: str, limit: int) -> bytes | None:
        """Return a whole object, None if it has more than ``limit`` bytes. Raises MissingError."""

        def ask() -> bytes | None:
            found = self._lib.get(self._store, key)
            return bytes(found.bytes()) if found.meta["size"] <= limit else None

        return self._retry("read", key, ask)

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of an object, which must have them."""
        return memoryview(
            self._retry("read", key, lambda: self._lib.get_range(self._store, key, start=start, end=stop))
        )

    def size(self, key: str) -> int:
        """Return the size of an object in bytes. Raises MissingError."""
        return int(self._retry("look at", key, lambda: self._lib.head(self._store, key))["size"])

    def modified(self, key: str) -> float:
        """Return when an object was put, by the server's clock, in seconds since 1970. Raises MissingError."""
        found = self._retry("look at", key, lambda: self._lib.head(self._store, key))
        return float(found["last_modified"].timestamp())

    def upload_at(self, key: str) -> tuple[str | None, int]:
        """Return the :data:`OWNER` of an upload, and its size in bytes. Raises MissingError."""
        found = self._retry("look at", key, lambda: self._lib.get(self._store, key, options={"head": True}))
        return dict(found.attributes).get(OWNER), int(found.meta["size"])

    def names(self, prefix: str) -> list[str]:
        """Return all names directly below a prefix (ending in ``/``, or empty), sorted."""
        folder = prefix.rstrip("/")
        found = self._retry("list", prefix, lambda: self._lib.list_with_delimiter(self._store, folder or None))
        below = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
        # Consoles represent a folder by an empty object with its name, which is not part of its contents.
        return sorted({key.rstrip("/").rpartition("/")[2] for key in below if key.rstrip("/") != folder})

    def delete(self, keys: Sequence[str]) -> None:
        """Remove the objects that exist, a thousand in a request."""
        if not keys:
            return
        try:
            self._retry("delete", keys[0], lambda: self._lib.delete(self._store, list(keys)))
        except MissingError:  # one of them, at which Azure and Google end
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def writer(self, key: str, owner: str, part_bytes: int, head: bytes) -> Any:
        """Return a context manager with ``write(bytes)`` that uploads in parts and replaces the object on success.

        ``head``, its first bytes, is larger than a part, so the upload has begun. For Google obstore does not repeat
        the request that begins one."""

        def begin() -> Any:
            with ExitStack() as stack:
                opened = self._lib.open_writer(self._store, key, buffer_size=part_bytes, **self._in_parts(owner))
                writer = stack.enter_context(opened)
                writer.write(head)
                stack.pop_all()
                return writer

        return self._retry("upload", key, begin)

    def upload(self, key: str, owner: str, source: Any, part_bytes: int) -> None:
        """Upload a file in parts, replacing the object."""

        def put() -> None:
            source.seek(0)
            try:
                shared = self._in_parts(owner)
                self._lib.put(self._store, key, source, use_multipart=True, chunk_size=part_bytes, **shared)
            except self.failures:
                with suppress(MissingError):
                    if self.upload_at(key)[0] == owner:
                        return
                raise

        self._retry("upload", key, put)

    def _in_parts(self, owner: str) -> dict[str, Any]:
        return {"attributes": {OWNER: owner}, "max_concurrency": self.options.connections}

    def failed(self, error: BaseException, verb: str, key: str) -> StorageError:
        """Return the project's error for an error of a :meth:`writer`."""
        return storage_error(error, verb, self.where(key))

    def _holds(self, key: str, data: bytes) -> bool | None:
        """Return whether an object has these bytes; None if there is none."""
        try:
            return self.get(key, len(data)) == data
        except MissingError:
            return None

    def _retry(self, verb: str, key: str, ask: Callable[[], T]) -> T:
        """Run an idempotent request with retries; obstore does not retry those that it considers changes.

        Refusals with 409 or 412 are retried, too: a request without a condition collided with another, and one with a
        condition checked itself who has the name. The last retry's error never claims that a name is free or taken."""
        deadline = time.monotonic() + self.options.retry_seconds
        for pause in chain((0.1, 0.2, 0.5, 1.0, 2.0), repeat(5.0)):
            try:
                return ask()
            except self.failures as error:
                found = storage_error(error, verb, self.where(key))
                if not (is_passing(error) or is_taken(error)):
                    raise found from error
                if time.monotonic() >= deadline:
                    contradicted = "" if type(found) is StorageError else ", and the answers contradict each other"
                    raise UnreachableError(f"{found}{contradicted}") from error
            time.sleep(pause)
        raise AssertionError("there is always another pause")

    def _open(self) -> Any:
        given, (kind, endpoint, http) = self.options, SCHEMES[self._scheme]
        config: dict[str, Any] = {"virtual_hosted_style_request": given.virtual_hosted} if kind == "S3Store" else {}
        if given.endpoint is not None:
            config[endpoint] = given.endpoint
        if given.region is not None:
            config["region"] = given.region
        # The library takes this from the environment only where it is given no other option of the client.
        plain = os.environ.get(http, "").lower() in ("1", "true")
        client: dict[str, Any] = {
            "timeout": timedelta(seconds=given.request_seconds),
            "allow_http": plain if given.allow_http is None else given.allow_http,
        }
        retry = {"max_retries": 1000, "retry_timeout": timedelta(seconds=given.retry_seconds)}
        return getattr(self._lib.store, kind)(self.name, config=config, client_options=client, retry_config=retry)
