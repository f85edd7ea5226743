"""Findings of a check, temporary test files, and the resources that a job will need.

Sizes are estimated for Adam in fp32 before packing, as in docs/encodings.md: frozen parameters and other optimizers
need less. The number of commits comes from the retention rule itself, applied to a long run."""

import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from monitor.config.load import Config, bytes_each
from store.errors import StorageError, UsageError
from store.storage.atomic import remove_all
from store.storage.local import Files

_SUFFIXES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_SKEW: Final = 5.0  # accepted clock difference in seconds
F = TypeVar("F", bound=Files)


@dataclass(frozen=True)
class Plan:
    """Resources needed by a configuration for a model of ``parameters`` (None if unknown) on ``nodes`` nodes."""

    config: Config
    parameters: int | None = None
    nodes: int = 1

    @property
    def commit_bytes(self) -> int | None:
        return None if self.parameters is None else round(self.parameters * bytes_each(self.config.encodings()))

    @property
    def store_bytes(self) -> int | None:
        """Return the most bytes of the store, if every commit is full."""
        return None if self.commit_bytes is None else self.commit_bytes * self.config.most_commits()

    @property
    def memory_bytes(self) -> int | None:
        """Return the bytes of in-memory snapshots on each node."""
        if self.parameters is None:
            return None
        each = bytes_each(self.config.memory_encodings()) * self.config.memory.versions
        each *= 2 if self.config.memory.peers else 1  # the replicas of another node's ranks
        return round(self.parameters * each / self.nodes)


def parse_count(text: str) -> int:
    """Parse a number of parameters such as ``8b``, ``350M`` or ``1.3e9``. Raises UsageError."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)([kmgbt]?)", text.strip().lower().replace("_", ""))
    count = round(float(match[1]) * _SUFFIXES[match[2]]) if match else 0
    if not 0 < count < 1 << 60:
        raise UsageError(f"--parameters takes a number such as 350M, 8b or 1.3e9, not {text!r}")
    return count


State = Literal["ok", "warn", "fail"]
"""``warn``: a job runs, but something is lost, slow or wrong. ``fail``: it could not save, or not survive a failure."""


@dataclass(frozen=True)
class Finding:
    """Result of one check: what was seen, and what to do about it."""

    check: str
    state: State
    seen: str
    todo: str = ""


def semantics(broken: Sequence[str], works: str, todo: str) -> Finding:
    """Return the finding of tested promises: those that are broken, or ``works``."""
    return Finding("semantics", "fail", "; ".join(broken), todo) if broken else Finding("semantics", "ok", works)


def clock(whose: str, began: float, stamped: float, todo: str) -> Finding:
    """Compare a clock, which stamped a file between ``began`` and now, with this machine's."""
    now = time.time()
    seconds = stamped - now if stamped > now else min(0.0, stamped - began)
    if abs(seconds) <= _SKEW:
        return Finding("clock", "ok", f"{whose} clock agrees with this machine's within seconds")
    return Finding("clock", "warn", f"{whose} clock differs by {seconds:+.0f} s from this machine's", todo)


class Probe(Generic[F]):
    """Temporary test files, removed on exit."""

    def __init__(self, files: F) -> None:
        self.files = files
        self._names: list[str] = []

    def name(self) -> str:
        """Return a new name, which is removed on exit."""
        self._names.append(f".tmp-{secrets.token_hex(6)}-doctor")
        return self._names[-1]

    def __enter__(self) -> "Probe[F]":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(StorageError):  # checks of deletions report those that fail
            remove_all(self.files, self._names)
