"""The one error hierarchy of the project.

    DriftpointError
    ├── UsageError                what the user gave cannot be carried out as given
    │   ├── ConfigError           a setting is unknown, senseless or contradicts another one
    │   ├── UnsupportedError      a framework, layout or tensor that is not handled (yet)
    │   └── ModelMismatchError    the store holds another model than the one at hand
    ├── StoreError                something about the store
    │   ├── NoStoreError          there is no store at this path
    │   ├── StoreInUseError       another job owns this store now
    │   ├── FencedError           this job lost the store to a newer epoch
    │   ├── NewerFormatError      written by a newer release
    │   ├── NothingToResumeError  no manifest can be resumed
    │   ├── StorageError          the operating system refused an operation
    │   │   ├── MissingError      the file or directory is not there
    │   │   ├── ExistsError       the name is taken, and nothing here is ever replaced
    │   │   └── UnreachableError  an object store did not answer: what it holds is not known
    │   └── DamagedError          bytes are not what was committed
    ├── DaemonError               the daemon of this node is not there, or says what cannot be understood
    ├── PeerError                 another rank's node does not take or give what memory holds
    ├── SaveError                 a save did not come about; the older commit is intact
    │   └── NotFiniteError        nothing of it was finite: NaN or Inf replaces nothing
    └── MergeError                a checkpoint could not be rebuilt

Every message says what is wrong, where, and what to do next. Each class carries the exit code of the
command line, so that the table of codes lives in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from store.names import Unit

PREEMPTED: Final = 75
"""Exit code of a training process that ended because it was told to, with what time allowed saved: not an error, and
worth starting again (EX_TEMPFAIL)."""


class DriftpointError(Exception):
    """Root of everything that this project raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(DriftpointError):
    """What the user gave cannot be carried out as given."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, senseless, or contradicts another one."""


class UnsupportedError(UsageError):
    """A framework, layout or tensor that is not handled; the message says what is."""


class ModelMismatchError(UsageError):
    """The store holds the state of another model than the one at hand."""


class StoreError(DriftpointError):
    """Something about the store."""


class NoStoreError(StoreError):
    """There is no store at this path."""

    exit_code = 10


class StoreInUseError(StoreError):
    """Another live job owns this store."""

    exit_code = 11


class FencedError(StoreError):
    """This job lost the store to a newer epoch and must not write to it any more."""

    exit_code = 11


class NewerFormatError(StoreError):
    """The store was written in a format that this release cannot read."""


class NothingToResumeError(StoreError):
    """No manifest of the store can be resumed."""

    exit_code = 13


class StorageError(StoreError):
    """The operating system refused a file operation (full, read-only, unreadable, ...)."""


class MissingError(StorageError):
    """The file or directory is not there."""


class ExistsError(StorageError):
    """The name is taken already; what is written once is never replaced."""


class UnreachableError(StorageError):
    """An object store gave no answer that tells anything, as long as it was asked: another time may go better.

    Nothing stands in for what was asked for: it may well be whole."""


class DamagedError(StoreError):
    """Bytes in the store are not what was committed."""

    exit_code = 12


class DaemonError(DriftpointError):
    """The daemon of this node is not there, or one of the two says what the other cannot understand."""


class PeerError(DriftpointError):
    """Another rank's node does not take what it is to keep of this one's memory, or does not give it back."""


class SaveError(DriftpointError):
    """A save did not come about. The older commit is intact."""


class NotFiniteError(SaveError):
    """What was to be saved has NaN or Inf, and none of it replaces a version. units: those that have."""

    def __init__(self, message: str, units: Sequence[Unit]) -> None:
        super().__init__(message)
        self.units = tuple(units)


class MergeError(DriftpointError):
    """A checkpoint could not be rebuilt."""
