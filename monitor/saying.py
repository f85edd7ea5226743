"""The few lines that whoever starts a job wants to see, also where nobody set logging up: as in most training scripts.

They go to the log ``driftpoint`` at level INFO, and to stderr where nobody would see that; never to both.
"""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger("driftpoint")


def say(text: str) -> None:
    """To the log where that is shown or was set up on purpose, else to stderr."""
    shown = _log.isEnabledFor(logging.INFO) and _log.hasHandlers()
    if shown or _log.level != logging.NOTSET:  # whoever gave our logger a level gets what it lets through
        _log.info("%s", text)
        return
    sys.stderr.write(f"driftpoint: {text}\n")
    sys.stderr.flush()
