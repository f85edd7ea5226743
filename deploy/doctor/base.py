"""Finding, Probe, Plan.

What a job is going to need of a disk and of memory, by its configuration and the size of its model. Pure.

Estimates for Adam in fp32, before packing, as docs/encodings.md counts them: what is frozen or of another optimizer
takes less. Retention is asked, not guessed: by the rule itself, over a long run.

What a check found: how it stands, what was seen, and what to do about it. Pure.

Files or objects of the doctor's own beside what others have, none of which stays.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from monitor.config.load import Config
from store.encoding import encoding_named
from store.errors import UsageError
from store.names import RAW, WEIGHTS, SaveId
from store.retention import select_retained

SLOTS: Final = (WEIGHTS, "exp_avg", "exp_avg_sq")

_SUFFIXES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_COMMITS: Final = 1000
"""Of a long run."""


@dataclass(frozen=True)
class Plan:
    """parameters: of the model, None where nobody said. nodes: that the state is spread over."""

    config: Config
    parameters: int | None = None
    nodes: int = 1

    @property
    def commit_bytes(self) -> int | None:
        """Of one commit that saves everything."""
        return None if self.parameters is None else round(self.parameters * bytes_each(self.config.encodings()))

    @property
    def commits(self) -> int:
        """Kept side by side, at most, and one more that is being written."""
        rule = self.config.retention_rule()
        every = 100 if self.config.every == "auto" else self.config.every
        held: set[SaveId] = set()
        most = 0
        for number in range(1, _COMMITS + 1):
            held = select_retained(held | {SaveId(number * every, 1)}, frozenset(), rule)
            most = max(most, len(held))
        return most + 1

    @property
    def store_bytes(self) -> int | None:
        """Of all that the store holds at its fullest, were every commit to save everything."""
        return None if self.commit_bytes is None else self.commit_bytes * self.commits

    @property
    def memory_bytes(self) -> int | None:
        """Of the memory tier on each node."""
        if self.parameters is None:
            return None
        each = bytes_each(self.config.memory_encodings()) * self.config.memory.versions
        each *= 2 if self.config.memory.peers else 1  # the replicas of another node's ranks
        return round(self.parameters * each / self.nodes)


def bytes_each(encodings: Mapping[str, str]) -> float:
    """Bytes a parameter that weights and both moments take in these encodings."""
    many = 1 << 20
    return sum(encoding_named(encodings.get(slot, RAW)).stored_bytes(many, "F32") / many for slot in SLOTS)


def parsed_count(text: str) -> int:
    """``8b``, ``350M``, ``1.3e9``: a number of parameters. UsageError for anything else."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)([kmgbt]?)", text.strip().lower().replace("_", ""))
    count = round(float(match[1]) * _SUFFIXES[match[2]]) if match else 0
    if not 0 < count < 1 << 60:
        raise UsageError(f"--parameters takes a number such as 350M, 8b or 1.3e9, not {text!r}")
    return count


State = Literal["ok", "warn", "fail"]
"""``warn``: a job runs, and something is lost, slow or off. ``fail``: it would not save, or
not survive what it must."""


@dataclass(frozen=True)
class Finding:
    """One check. seen: in words. todo: what to do next; nothing where all is well."""

    check: str
    state: State
    seen: str
    todo: str = ""


def healthy(findings: Iterable[Finding]) -> bool:
    """Nothing failed."""
    return all(one.state != "fail" for one in findings)


F = TypeVar("F")


class Probe(Generic[F]):
    """files: where they are made. remove: takes those away that are there still, and does not raise."""

    def __init__(self, files: F, remove: Callable[[Sequence[str]], None]) -> None:
        self.files = files
        self._remove = remove
        self._names: list[str] = []

    def name(self) -> str:
        """A new one, which is removed at the end whatever becomes of it."""
        self._names.append(f".tmp-{secrets.token_hex(6)}-doctor")
        return self._names[-1]

    def __enter__(self) -> Probe[F]:
        return self

    def __exit__(self, *error: object) -> None:
        self._remove(self._names)
