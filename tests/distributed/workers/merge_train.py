"""Under torchrun: trains each case, saves it into a store and with DeepSpeed itself, and goes on.

Usage: merge_train.py DIRECTORY CASE... — per case: ``store``, ``composite`` (some), ``own-4`` and ``own-7``
(DeepSpeed's checkpoints), ``losses-RANK.json`` and ``states.pt`` (whole tensors at the two steps of the composite).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from merge_cases import COMPOSITES, EARLIER, LAST, SAVED, build, leave, train, whole_state
from merge_store import StoreWriter

from monitor.adapters import adapter_for
from store.names import Unit


def in_the_later_save(unit: Unit) -> bool:
    """All weights but those of one layer, and the moments of the last block only."""
    return unit.layer != "blocks.0" if unit.slot == "fp32" else unit.layer == "blocks.2"


def run(case: str, folder: Path) -> None:
    built = build(case, 0)
    adapter = adapter_for(built)
    store = StoreWriter(folder / "store", adapter)
    composite = StoreWriter(folder / "composite", adapter) if case in COMPOSITES else None
    states = {}
    train(built, range(EARLIER))
    if composite is not None:
        states[EARLIER] = whole_state(built)
        composite.save(EARLIER)
    store.save(EARLIER)
    train(built, range(EARLIER, SAVED))
    if composite is not None:
        states[SAVED] = whole_state(built)
        composite.save(SAVED, in_the_later_save)
    store.save(SAVED)
    built.save_checkpoint(str(folder / f"own-{SAVED}"))
    losses = train(built, range(SAVED, LAST))
    built.save_checkpoint(str(folder / f"own-{LAST}"))
    (folder / f"losses-{dist.get_rank()}.json").write_text(json.dumps(losses))
    if dist.get_rank() == 0:
        torch.save(states, folder / "states.pt")


def main(directory: Path, cases: Sequence[str]) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for case in cases:
        if dist.get_rank() == 0:
            (directory / case).mkdir()
        dist.barrier()
        run(case, directory / case)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
