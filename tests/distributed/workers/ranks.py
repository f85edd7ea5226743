"""Start the ranks of a script, as a launcher would, but with the rank as its first argument and nothing to meet by.

Usage: ranks.py RANKS SCRIPT ARGUMENTS
"""

from __future__ import annotations

import os
import signal
import sys

from tests.support.preloaded import Forked


def main(ranks: int, script: str, *arguments: str) -> None:
    """Until all have ended."""
    started = [Forked([script, str(rank), *arguments], os.environ, (None, None)) for rank in range(ranks)]
    try:
        codes = [one.wait(240) for one in started]
    finally:
        for one in started:
            if one.returncode is None:
                os.kill(one.pid, signal.SIGKILL)
    sys.exit(f"exit codes of the ranks: {codes}" if any(codes) else 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
