"""ZeRO-2 with copies made beside training, for a long run: at every version and every save the script takes hashes of
its own, of all that the rank owns, between two optimizer steps, with nothing else at work on the parameters. What the
memory tier and the segments say of the same step is told beside them.

Usage: staging_consistency.py SPEC.json
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from resume_jobs import Results, build, leave, rank, start_group

import monitor
from monitor.adapters import adapter_for
from monitor.adapters.module_tensors import as_bytes
from monitor.save.async_copy import AsyncCopy
from store.memory.index import scan_node
from store.memory.layout import Tier
from store.names import FROZEN, SaveId
from store.schema import Entry
from store.segment import read_part
from tests.support.internals import session_of, wait_for_snapshot

Hashes = dict[str, str]


def key(fqn: str, slot: str, start: int, numel: int) -> str:
    return f"{fqn}|{slot}|{start}|{numel}"


def own(target: Any) -> Hashes:
    """Of a copy that is taken now, with training paused."""
    found = {}
    for piece in adapter_for(target).owned():
        if piece.fragment.numel and piece.fragment.slot != FROZEN:
            copy = piece.tensor.detach().clone()
            one = piece.fragment
            found[key(one.fqn, one.slot, one.start, one.numel)] = xxhash.xxh3_128_hexdigest(as_bytes(copy))
    return found


def stored(entries: tuple[Entry, ...]) -> Hashes:
    return {
        key(one.fqn, one.slot, one.start, one.numel): one.xxh3_128
        for one in entries
        if one.slot != FROZEN and one.encoding == "raw" and one.packing is None
    }


class Compared:
    """Own hashes by step, and what was said of the same steps."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.own: dict[int, Hashes] = {}
        self.counts = {"memory": 0, "saves": 0, "fragments": 0}

    def compare(self, kind: str, step: int, found: Hashes) -> None:
        wanted = self.own[step]
        wrong = sorted(name for name in wanted if found.get(name) != wanted[name])
        self.counts[kind] += 1
        self.counts["fragments"] += len(wanted)
        if wrong or found.keys() - wanted.keys():
            self.results.tell("wrong", of=kind, step=step, fragments=wrong[:5])


class Late:
    """Has other threads copy nothing until they are let, as where they get no processor."""

    def __init__(self) -> None:
        self._let = threading.Event()
        finish = AsyncCopy.finish

        def finished(copying: AsyncCopy, *beside: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                self._let.wait()
            finish(copying, *beside)

        AsyncCopy.finish = finished  # type: ignore[method-assign]

    def hold(self) -> None:
        self._let.clear()

    def let(self) -> None:
        self._let.set()


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=True)
    results = Results(spec["results"])
    trainee = build(spec["case"], seed=1)
    settings = {
        "store": str(Path(spec["directory"]) / "store"),
        "every": 5,
        "staging": "lazy",
        "retention": {"keep_last": 3, "log_spaced": False},
        "metrics": {"enabled": False},
        "memory": {"enabled": True, "every": 1, "path": spec["shared"]},
    }
    ckpt = monitor.attach(trainee.target, settings, state=trainee.state)
    ckpt.resume()
    opened, compared = session_of(ckpt), Compared(results)
    tier = Tier(Path(spec["shared"]), opened.catalog.store_id)
    saves: list[SaveId] = []
    late = Late() if spec["mutant"] else None
    for step in range(1, spec["steps"] + 1):
        trainee.step()
        if late is not None:
            late.hold()
        report = ckpt.step()
        compared.own[step] = own(trainee.target)  # the copies may run beside this, and must not see it otherwise
        if late is not None:
            if step % 10 == 3:
                owned = adapter_for(trainee.target).owned()
                next(piece for piece in owned if piece.fragment.slot == "exp_avg").tensor.data[1] += 1.0
            late.let()
        if step % 3 == 0:
            wait_for_snapshot(ckpt)
        for save, held in scan_node(tier).versions.items():
            if rank() in held and save.step in compared.own:
                compared.compare("memory", save.step, stored(held[rank()].record.part.entries))
        if report is not None and report.skipped is None:
            saves.append(SaveId(step, opened.epoch))
        if saves and step % 5 == 4:
            ckpt.flush()
            dist.barrier()
            part = read_part(opened.files, opened.catalog.store_id, saves[-1], rank())
            compared.compare("saves", saves[-1].step, stored(part.entries))
    results.tell("compared", **compared.counts)
    torch.distributed.barrier()
    ckpt.close()
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
