"""Text that every machine with Python already has: the sources of the standard library, as bytes, in batches.

One token is one byte, so the vocabulary has 256 entries and nothing is downloaded. The order of batches follows
from the seed alone. :class:`Batches` remembers its place, and its state is the same on every rank and at any
world size: a job may resume on more or fewer ranks and still see every window once an epoch.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

VOCABULARY = 256
SEPARATOR = b"\0"
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def standard_library(limit: int = 1 << 24) -> npt.NDArray[np.uint8]:
    """Up to ``limit`` bytes of the standard library's Python files, in the order of their paths, without tests.

    Files are joined by a zero byte, which Python sources cannot contain.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _sources(root):
        text += path.read_bytes() + SEPARATOR
        if len(text) >= limit:
            break
    return np.frombuffer(bytes(text[:limit]), dtype=np.uint8)


class Batches:
    """Endless batches of windows of text, shuffled anew each epoch. Iterating moves it; its state says where it is.

    text: bytes. length: tokens in a window. size: windows in one rank's batch. seed: decides every order.
    Raises ValueError where the text is too short for one batch of all ranks.
    """

    def __init__(
        self, text: npt.NDArray[np.uint8], *, length: int, size: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self._windows = text[: len(text) // length * length].reshape(-1, length)
        self._size, self._seed, self._rank, self._world_size = size, seed, rank, world_size
        self._epoch = self._taken = 0
        self._order = self._shuffled()
        if len(self._windows) < size * world_size:
            raise ValueError(f"{len(text)} bytes are too few for {size * world_size} windows of {length}")

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        """This rank's next batch: int64, ``(size, length)``."""
        together = self._size * self._world_size
        if self._taken + together > len(self._windows):
            self._epoch, self._taken = self._epoch + 1, 0
            self._order = self._shuffled()
        first = self._taken + self._rank * self._size
        self._taken += together
        return torch.from_numpy(self._windows[self._order[first : first + self._size]].astype(np.int64))

    def state_dict(self) -> dict[str, Any]:
        """The place, in windows taken by all ranks together, and what it is a place in."""
        return {"epoch": self._epoch, "taken": self._taken, "seed": self._seed, "windows": len(self._windows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place. ValueError where it is a place in another text or another order."""
        if (state["seed"], state["windows"]) != (self._seed, len(self._windows)):
            raise ValueError(
                f"the saved place is among {state['windows']} windows shuffled with seed {state['seed']}; here are "
                f"{len(self._windows)} with seed {self._seed}: resume with the same text, window length and seed"
            )
        self._epoch, self._taken = int(state["epoch"]), int(state["taken"])
        self._order = self._shuffled()

    def _shuffled(self) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._windows))


def _sources(root: Path) -> list[Path]:
    found = [path for path in root.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(root).parts)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
