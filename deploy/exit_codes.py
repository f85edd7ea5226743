"""Exit codes of the command line and their text for ``--help``.

The numbers are defined by the errors and the restart policy; this adds those without an error class.
"""

from deploy.supervisor import restart_policy
from store.errors import (
    PREEMPTED,
    DamagedError,
    DriftpointError,
    NoStoreError,
    NothingToResumeError,
    StoreInUseError,
    UsageError,
)

OK = restart_policy.OK
INTERRUPTED = restart_policy.INTERRUPTED
BROKEN_PIPE = 141

MEANINGS = {
    OK: "all is well",
    DriftpointError.exit_code: "an error",
    UsageError.exit_code: "wrong usage",
    NoStoreError.exit_code: "no store there",
    StoreInUseError.exit_code: "the store is in use",
    DamagedError.exit_code: "damaged, but a resume works",
    NothingToResumeError.exit_code: "nothing to resume",
    PREEMPTED: "preempted",
    restart_policy.NO_PROGRESS: "no progress",
    INTERRUPTED: "interrupted",
}

EPILOG = "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items()) + "."


def health(*, resumable: bool, damaged: bool) -> int:
    """Return the exit code for the state of a store."""
    if not resumable:
        return NothingToResumeError.exit_code
    return DamagedError.exit_code if damaged else OK
