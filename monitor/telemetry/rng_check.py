"""Compare where a resumed loop draws random numbers with where the saved run drew them.

A resume restores the generators. A loop that has drawn more or less than the saved run when its next optimizer step
begins holds something that was not handed over: a batch fetched ahead, an iterator that begins anew (docs/loops.md).
After each save, the state of rank 0's generators at the next optimizer step goes into the drift trace, as a digest.
Generators of devices are not compared, nor python's, which libraries draw from. Training thread."""

import logging
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import xxhash

from monitor.adapters.base import Adapter
from monitor.distributed import Group
from monitor.telemetry.trace import TraceRecorder
from store import trace as traces

_log = logging.getLogger("driftpoint")

_TAIL = 4 << 20  # bytes at the end of a trace in which the line of a step is looked for


def check_rng(adapter: Adapter, recorder: TraceRecorder, path: Path | None, group: Group) -> None:
    """Record the digests at optimizer steps, and warn once after a resume whose loop draws otherwise.

    path: of the trace."""

    def before_update() -> None:
        saved, resumed = recorder.saved_step, recorder.resumed_step
        if saved is None and resumed is None:
            return
        recorder.saved_step = recorder.resumed_step = None
        found = generators_digest()
        line = None if resumed is None or path is None else last_drawn(path, resumed)
        if saved is not None:
            recorder.put_drawn(saved, found)
        if line is not None and line.world_size == group.world_size and line.digest != found:
            _log.warning(
                "after this resume the loop has drawn more or fewer random numbers than the saved run had at the same "
                "optimizer step, so it does not go on as that run did: does it fetch a batch ahead, or begin an "
                "iterator anew? See docs/loops.md"
            )

    if group.rank == 0 and path is not None:
        adapter.before_update(before_update)


def generators_digest() -> str:
    """Return a digest of the global generators of torch on the host and of numpy."""
    held = [torch.get_rng_state().numpy(), *np.random.get_state(legacy=False)["state"].values()]
    return xxhash.xxh3_64_hexdigest(
        b"".join(str(one).encode() if isinstance(one, int) else one.tobytes() for one in held)
    )


def last_drawn(path: Path, step: int) -> traces.DrawnLine | None:
    """Return the newest line of a step near the end of a trace, if there is one."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        raw = [line for line in file if line.startswith(b'{"kind":"drawn"')]
        found = [line for line in traces.iter_lines(raw) if isinstance(line, traces.DrawnLine) and line.step == step]
        return found[-1] if found else None
    return None
