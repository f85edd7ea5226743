"""What damage means to a command that makes something of a source: nothing came of it.

``DamagedError`` has the code for what is damaged but can be resumed. A merge and an import that can work around
damage do so and end well; one that ends with damage has nothing to give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from store.errors import DamagedError, DriftpointError, NothingToResumeError


@contextmanager
def damage_is_the_end() -> Iterator[None]:
    """NothingToResumeError for a DamagedError that leaves the block."""
    try:
        yield
    except DamagedError as error:
        raise told(error) from error


def told(error: DriftpointError) -> DriftpointError:
    """The error as the command tells it."""
    if not isinstance(error, DamagedError):
        return error
    return NothingToResumeError(
        f"{error}; nothing stands in for it: name another checkpoint (--step), or put the file back from a copy"
    )
