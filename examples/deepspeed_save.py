"""What ``engine.save_checkpoint`` costs on the same state: how long it keeps the training, and how much it writes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist


def timed_save(engine: Any, folder: Path, times: int = 3) -> dict[str, Any]:
    """Save ``times`` times into ``folder``, one after the other; leaves nothing behind. Collective.

    seconds: how long rank 0 was kept, for each. nbytes: size of all files of one save.
    """
    seconds = []
    for index in range(times):
        dist.barrier()
        began = time.perf_counter()
        engine.save_checkpoint(str(folder), tag=f"save-{index}")
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    nbytes = sum(path.stat().st_size for path in (folder / "save-0").rglob("*") if path.is_file())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"seconds": seconds, "nbytes": nbytes}
