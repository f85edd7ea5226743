"""Jobs of several ranks with a memory tier, in two lives, on one or several "nodes" of this machine; see the worker
``memory_ranks.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.catalog import open_catalog
from store.memory.layout import Tier
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.launch import Launched, torchrun
from tests.support.netns import Network, across

ZERO2 = {"kind": "zero", "stage": 2, "precision": "bf16"}
ZERO3 = {"kind": "zero", "stage": 3, "precision": "bf16"}
DDP = {"kind": "ddp"}
FSDP2 = {"kind": "fsdp2"}
FROZEN_IS_COMMITTED = {"every": 3}
"""The model has a frozen block, and memory begins once that is known to be committed: with the second decision."""


@dataclass
class Place:
    """A store and shared memory for one scenario, and its two lives. networks: a rank in each, where there are any."""

    directory: Path
    shared: Path
    spec: dict[str, Any] = field(default_factory=dict)
    networks: Sequence[Network] = ()

    def life(self, which: str, ranks: int = 2, **spec: Any) -> Launched:
        base = {"case": ZERO2, "shared": str(self.shared), **FROZEN_IS_COMMITTED, **self.spec}
        whole = {**base, **spec, "life": which}
        if self.networks:
            done = across(self.networks, "memory_ranks.py", whole, self.directory)
        else:
            done = torchrun("memory_ranks.py", ranks, whole, self.directory, timeout=600)
        assert (done.code == 0) == (which == "second"), done.output[-5000:]
        if which == "second":  # torch's "recvValueWithTimeout failed" is a launcher that ended before the other
            assert not re.search(r"\bTimeout", done.output), done.output[-5000:]
        return done

    def tier(self, below: str = "") -> Tier:
        return Tier(self.shared / below, open_catalog(LocalFiles(self.directory / "store")).store_id)

    def ended_well(self, done: Launched) -> None:
        assert done.of("end")
        assert verify(open_catalog(LocalFiles(self.directory / "store"))).ok
        assert not list(self.shared.rglob("rank-*.payload"))


def hashes(done: Launched, step: int, ranks: int = 2) -> list[Mapping[str, str]]:
    return [done.one("state", step=step, rank=rank)["hashes"] for rank in range(ranks)]


def resumed(done: Launched, ranks: int = 2) -> tuple[int, bool]:
    """The step and whether it came from memory: alike on all ranks."""
    found = {(one["step"], bool({"memory", "peer"} & {*one["sources"]})) for one in done.of("resumed")}
    assert len(found) == 1 and len(done.of("resumed")) == ranks
    return found.pop()


def said(done: Launched, text: str) -> bool:
    return any(text in one["text"] for one in done.of("said"))
