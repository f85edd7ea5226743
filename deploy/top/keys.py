"""What somebody types, one key at a time, without waiting for the end of a line. For a terminal, and given back after.

Owned by the thread that draws. Sequences of an escape are told by name; what is not known is nothing.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NAMED = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOH": "home",
    "\x1bOF": "end",
    "k": "up",
    "j": "down",
    "b": "page up",
    " ": "page down",
    "g": "home",
    "G": "end",
    "s": "sort",
    "q": "quit",
    "Q": "quit",
    "\x03": "quit",
}


@contextmanager
def typed() -> Iterator[Callable[[float], list[str]]]:
    """Gives a function that waits so many seconds at most and returns the keys typed meanwhile, by name."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield lambda seconds: _keys(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _keys(descriptor: int, seconds: float) -> list[str]:
    ready, _, _ = select.select([descriptor], [], [], seconds)
    if not ready:
        return []
    data = os.read(descriptor, 256)
    return list(named(data.decode("utf-8", "replace"))) if data else ["quit"]


def named(text: str) -> Iterator[str]:
    """The keys in what a terminal sent."""
    while text:
        found = next((key for key in sorted(_NAMED, key=len, reverse=True) if text.startswith(key)), None)
        if found is not None:
            yield _NAMED[found]
        text = text[len(found) if found is not None else 1 :]
