"""Exit codes of the command line and their text for ``--help``.

The numbers are defined by the errors and the restart policy; this adds those without an error class."""

from deploy.supervisor import restart_policy
from store import errors

OK = restart_policy.OK
INTERRUPTED = restart_policy.INTERRUPTED
BROKEN_PIPE = 141

MEANINGS = {
    OK: "all is well",
    errors.DriftpointError.exit_code: "an error",
    errors.UsageError.exit_code: "wrong usage",
    errors.NoStoreError.exit_code: "no store there",
    errors.StoreInUseError.exit_code: "the store is in use",
    errors.DamagedError.exit_code: "damaged, but a resume works",
    errors.NothingToResumeError.exit_code: "nothing to resume",
    errors.PREEMPTED: "preempted",
    restart_policy.NO_PROGRESS: "no progress",
    INTERRUPTED: "interrupted",
}

EPILOG = "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items()) + "."


def health(*, resumable: bool, damaged: bool) -> int:
    """Return the exit code for the state of a store."""
    if not resumable:
        return errors.NothingToResumeError.exit_code
    return errors.DamagedError.exit_code if damaged else OK
