"""What a policy did wrong, in one line: for error messages, logs and manifests.

What the user's code raised may be of the user's own class, so even asking it for its text can fail.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

from policies.answer import PolicyError

_LONGEST = 200


@dataclass(frozen=True)
class Failure:
    """what: ``raised ValueError('x')``, or how the contract was broken. place: ``file:line`` where it was raised, or
    empty. Two failures are the same one if :attr:`kind` is equal: texts may hold a step or a value."""

    what: str
    place: str
    kind: str


def failure_of(error: BaseException) -> Failure:
    """The failure that an error tells of."""
    if isinstance(error, PolicyError):
        about = "" if error.unit is None else f"{error.unit}: "
        return Failure(f"broke its contract ({_line(about + error.what)})", "", error.what)
    place = _place(error)
    return Failure(f"raised {raised(error)}", place, f"{type(error).__name__} at {place}")


def raised(error: BaseException) -> str:
    """Class and text of an error in one printable line."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the edge to the user's own class of errors: its text cannot be had
        text = "?"
    return _line(f"{type(error).__name__}({text!r})" if text else f"{type(error).__name__}()")


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _line(text: str) -> str:
    flat = " ".join(text.encode("utf-8", "backslashreplace").decode("utf-8").split())
    return flat if len(flat) <= _LONGEST else flat[: _LONGEST - 1] + "…"
