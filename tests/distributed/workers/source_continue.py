"""Under torchrun: stock DeepSpeed goes on from a checkpoint and hands on the client state that it found, as its own
documentation shows.

Usage: source_continue.py CASE FROM TO STEPS
"""

from __future__ import annotations

import os
import sys

import deepspeed
from source_cases import build, train


def main(case: str, start: str, end: str, steps: int) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    engine = build(case)
    _, client_state = engine.load_checkpoint(start)
    kept = {key: client_state[key] for key in ("mine", "driftpoint")}
    train(engine, steps)
    engine.save_checkpoint(end, client_state=kept)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads can abort a process that many engines lived in


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
