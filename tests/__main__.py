"""Runs the whole suite as ``make test`` does, over two processes: fast tests first, then slow ones, then those that
launch jobs of their own, a file to a process since the tests of a file share their launches.

Arguments go to pytest. Stops at the first stage that fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STAGES = {
    "fast": ["-m", "not slow and not distributed", "-n", "2"],
    "slow": ["-m", "slow and not distributed", "-n", "2", "--dist", "worksteal"],
    "distributed": ["-m", "distributed", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"],
}
NO_TESTS = 5
COMPILE = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load(verbose=False)"


def main() -> int:
    # Started in the background of a script, or by nohup, a process ignores Ctrl-C or SIGHUP, and so would the commands
    # under test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # two test processes on two cores
        "TORCH_EXTENSIONS_DIR": str(_own_extensions()),
    }
    for name, options in STAGES.items():
        began = time.monotonic()
        if name == "distributed":
            # Once and beforehand: the first launch's ranks would compile it side by side, against its time limit.
            subprocess.call([sys.executable, "-c", COMPILE], env=environment)
        code = subprocess.call(
            [sys.executable, "-m", "pytest", "-q", "--durations=5", *options, *sys.argv[1:]], env=environment
        )
        print(f"stage {name}: {time.monotonic() - began:.0f} s", flush=True)
        if code not in (0, NO_TESTS):
            return code
    return 0


def _own_extensions() -> Path:
    """Where torch keeps what DeepSpeed compiles: a place of the suite's own, without locks of runs before.

    A process that is killed while it loads such a module leaves a lock behind on which every later one waits for ever.
    """
    place = Path(sys.prefix) / "torch_extensions"
    for lock in place.rglob("lock"):
        lock.unlink()
    return place


if __name__ == "__main__":
    sys.exit(main())
