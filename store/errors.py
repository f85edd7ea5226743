"""Define the project's errors, with exit codes. Every message says what is wrong, where, and what to do next."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from store.names import Unit

PREEMPTED: Final = 75  # exit code of a preempted job that saved what time allowed and can be restarted (EX_TEMPFAIL)


class DriftpointError(Exception):
    """Base of all errors that this project raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(DriftpointError):
    """The request cannot be carried out as given."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, invalid, or contradicts another one."""


class UnsupportedError(UsageError):
    """A framework, layout or tensor is not supported; the message names the supported ones."""


class UnstorableError(UnsupportedError):
    """Something in the state has a type that no save can hold; the message names it. Trying again does not help."""


class ModelMismatchError(UsageError):
    """The store holds the state of another model."""


class StoreError(DriftpointError):
    """An operation on a store failed."""


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
    """The name is taken; files are never replaced."""


class UnreachableError(StorageError):
    """An object store gave no usable answer until the retries ended. The object may be whole; nothing replaces it."""


class NoSpaceError(StorageError):
    """The disk is full, or a quota is used up."""


class DamagedError(StoreError):
    """Bytes in the store are not those that were committed."""

    exit_code = 12


class DaemonError(DriftpointError):
    """The daemon of this node is not running, or a message of its protocol is invalid."""


class CollectiveError(DriftpointError):
    """A collective of all ranks failed: one of them was later than the job's timeout, or is gone."""


class PeerError(DriftpointError):
    """Another rank's node refused a replica of this rank's memory, or did not return it."""


class SaveError(DriftpointError):
    """A save failed. The older commit is intact."""


class StateChangedError(SaveError):
    """The state was changed while it was copied. What is live now is not that of the save's step."""


class MissingSegmentsError(SaveError):
    """Segments of earlier ``saves``, which a commit needs, are gone, so that it was not made."""

    def __init__(self, message: str, saves: "Sequence[str]") -> None:
        super().__init__(message)
        self.saves = tuple(saves)


class NotFiniteError(SaveError):
    """The values to save contain NaN or Inf in ``units``; no version was replaced."""

    def __init__(self, message: str, units: "Sequence[Unit]") -> None:
        super().__init__(message)
        self.units = tuple(units)


class MergeError(DriftpointError):
    """A checkpoint could not be rebuilt."""


@contextmanager
def system_errors(
    verb: str, what: object, advice: str = "", kind: type[DriftpointError] = StorageError
) -> Iterator[None]:
    """Turn an OSError of the block into ``kind``: ``cannot VERB WHAT: REASON``, and the advice."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot {verb} {what}: {error.strerror or error}{advice}") from error
