"""What a job is going to need of a disk and of memory, by its configuration and the size of its model. Pure.

Estimates for Adam in fp32, before packing, as docs/encodings.md counts them: what is frozen or of another optimizer
takes less. Retention is asked, not guessed: by the rule itself, over a long run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from monitor.config import Config
from store.encoding import encoding_named
from store.errors import UsageError
from store.names import RAW, WEIGHTS, SaveId
from store.retention import kept

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
            held = kept(held | {SaveId(number * every, 1)}, frozenset(), rule)
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
