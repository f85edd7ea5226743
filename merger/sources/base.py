"""What a source is: something that holds a complete training state, or part of one."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from merger.blocks import Flaw
from merger.checkpoint import Checkpoint


class Source(Protocol):
    """One place that checkpoints are read from. Never changed by a merge.

    kind: as the command line says it: ``store``, ``deepspeed``, ``universal``.
    """

    kind: str

    def checkpoint(self, step: int | str | None, flaws: Set[Flaw], /) -> Checkpoint:
        """The state at a step (or named save, or tag), or the newest one for None.

        flaws: versions of stores known to be damaged, which an older version has to stand in for.
        Raises MergeError, naming those that are there, for one that is not; DamagedError, NothingToResumeError.
        """
        ...

    def steps(self) -> tuple[int, ...]:
        """Steps of all checkpoints that are there, newest first."""
        ...
