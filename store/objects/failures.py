"""What an object store's refusals are in our words, and which of them may pass.

Goes by the library's classes, and where those say no more than that something went wrong by what the server answered.
"""

from __future__ import annotations

import re
from typing import Any

from store.errors import ExistsError, MissingError, StorageError, UnsupportedError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")

_LOST = "Received redirect without LOCATION"
"""How the library says that the bucket is in another region."""

_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})

_CHECK_KEYS = (
    "check the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a web identity, or the instance's role) and "
    "what they permit in this bucket: get, put, delete and list"
)
_CHECK_BUCKET = "there is no such bucket: make it, or check its name and `s3: {endpoint: ..., region: ...}`"
_CHECK_REGION = "the bucket is in another region: set `s3: {region: ...}`, or AWS_REGION"
_ADVICE = {
    "NoSuchBucket": _CHECK_BUCKET,
    "AccessDenied": _CHECK_KEYS,
    "InvalidAccessKeyId": _CHECK_KEYS,
    "SignatureDoesNotMatch": _CHECK_KEYS,
    "ExpiredToken": _CHECK_KEYS,
    "PermanentRedirect": _CHECK_REGION,
    "AuthorizationHeaderMalformed": _CHECK_REGION,
    "NotImplemented": "the server cannot put on a condition (If-None-Match), which a commit needs: take one that can",
    "SlowDown": "the server asks for fewer requests, and did so until the time was up",
    "RequestTimeTooSkewed": "the clock of this machine is wrong: set it",
    "EntityTooLarge": "the object is too large for the server",
    "QuotaExceeded": "the quota is used up: free space or run `driftpoint prune STORE`",
}
_SIGNS = (
    (("169.254.", "/latest/api/token"), f"there are no credentials, or they could not be got; {_CHECK_KEYS}"),
    ((_LOST,), _CHECK_REGION),
    (
        ("invalid path",),
        "an object is in the way whose key is no path (an empty name, or a dot, between slashes): remove it",
    ),
    (
        ("timed out", "kind: Timeout"),
        "the server did not answer in time: check the endpoint, or raise `s3: {request_seconds: ...}`",
    ),
    (
        ("error sending request", "Connect"),
        "the server cannot be reached: check `s3: {endpoint: ...}`, or AWS_ENDPOINT_URL",
    ),
)
"""What the library says, where the server says nothing, and what to do then."""


def library() -> Any:
    """obstore. UnsupportedError, with what to type, where it is not installed."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise UnsupportedError(f"stores in s3:// need obstore ({error}): run `pip install 'driftpoint[s3]'`") from error
    return obstore


def is_taken(error: BaseException) -> bool:
    """Whether a put was refused because something is there, or is being put there at this moment."""
    return isinstance(error, _exceptions().AlreadyExistsError | _exceptions().PreconditionError)


def is_passing(error: BaseException) -> bool:
    """Whether another try may go better: no answer came, or one that says so."""
    found = _exceptions()
    refused = found.PermissionDeniedError, found.UnauthenticatedError, found.NotSupportedError, found.InvalidPathError
    if isinstance(error, (*refused, FileNotFoundError)):
        return False
    if _LOST in str(error):
        return False
    status = _STATUS.search(str(error))
    if status is not None:
        return int(status[1]) in _PASSING
    return isinstance(error, found.GenericError | OSError)


def told(error: BaseException, verb: str, where: str) -> StorageError:
    """The error to raise instead. where: bucket and key."""
    text = str(error)
    code = _CODE.search(text)
    advice = _ADVICE.get(code[1] if code else "") or _advice(error, text)
    if isinstance(error, FileNotFoundError) and not (code and code[1] == "NoSuchBucket"):
        return MissingError(f"cannot {verb} {where}: it is not there")
    if is_taken(error):
        return ExistsError(f"cannot {verb} {where}: another object is there already")
    return StorageError(f"cannot {verb} {where}: {advice or _short(text)}" + (f" ({_short(text)})" if advice else ""))


def _advice(error: BaseException, text: str) -> str:
    found = _exceptions()
    if isinstance(error, found.PermissionDeniedError | found.UnauthenticatedError):
        return _CHECK_KEYS
    if "scheme" in text.lower() and "http" in text:
        return "the endpoint is not https: set `s3: {allow_http: true}`, or AWS_ALLOW_HTTP=true, where that is meant"
    return next((advice for signs, advice in _SIGNS if any(sign in text for sign in signs)), "")


def _short(text: str) -> str:
    """An answer without the library's own view of it, on one line."""
    plain = text.split("\n\nDebug source", 1)[0]
    return " ".join(re.sub(r"<[^>]*>", " ", plain).split())[:240]


def _exceptions() -> Any:
    return library().exceptions
