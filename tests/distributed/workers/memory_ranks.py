"""One scenario of the memory tier on several ranks, in two lives: the first ends by SIGKILL of all ranks, the second
resumes and tells. What is done to one rank is done from within, before or while it keeps its versions.

Usage: memory_ranks.py SPEC.json
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resume_jobs import Results, Trainee, build, leave, rank, start_group
from resume_train import hashes

import monitor
import monitor.memory.replica_client
import monitor.memory.tier
from monitor.adapters import adapter_for
from store.errors import StorageError
from store.memory.layout import Tier
from tests.support.internals import memory_of, wait_for_replicas, wait_for_snapshot


class Moody:
    """Raises on one rank when it is told to."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise StorageError("moody")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state == {}


class Told(logging.Handler):
    """Everything that the library says goes into the results."""

    def __init__(self, results: Results) -> None:
        super().__init__(logging.INFO)
        self._results = results

    def emit(self, record: logging.LogRecord) -> None:
        self._results.tell("said", level=record.levelname, text=record.getMessage())


class Life:
    """One process."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = spec
        self.results = Results(spec["results"])
        self.moody = Moody()
        logging.getLogger("driftpoint").setLevel(logging.INFO)
        logging.getLogger("driftpoint").addHandler(Told(self.results))

    def attach(self, trainee: Trainee) -> monitor.Checkpointer:
        settings = {
            "store": str(Path(self.spec["directory"]) / "store"),
            "every": self.spec.get("every", 100),
            "metrics": {"enabled": False},
            # A rank that has no part to give is waited for so long, and a peer that takes nothing.
            "timeouts": {"commit": self.spec.get("commit_seconds", 600.0), "peer": self.spec.get("peer_seconds", 60.0)},
            "memory": {"enabled": True, "every": 1, "path": self.spec["shared"], "peers": bool(self.spec.get("peers"))},
            **self.spec.get("settings", {}).get(str(rank()), {}),
        }
        ckpt = monitor.attach(trainee.target, settings, state=[*trainee.state, self.moody])
        memory = memory_of(ckpt)
        if memory is not None and self.spec.get("nodes"):  # as on two machines: each rank sees its own memory only
            nodes = self.spec["nodes"]
            own = Path(self.spec["shared"]) / f"node{rank() if nodes == 'own' else nodes[rank()]}"
            own.mkdir(exist_ok=True)
            memory._tier = Tier(own, memory._tier.store_id)
        if memory is not None and str(rank()) in self.spec.get("paths", {}):
            memory._tier = Tier(Path(self.spec["paths"][str(rank())]), memory._tier.store_id)
        if "peer_seconds" in self.spec:
            monitor.memory.replica_client._SILENCE = self.spec["peer_seconds"]
        if memory is not None and rank() == self.spec.get("relayed"):
            self.relay_server(memory._replication)
        return ckpt

    def relay_server(self, peers: Any) -> None:
        """Others reach this rank through a process that can be stopped: a network that falls silent."""
        real = peers._open_server

        def opened() -> Any:
            server, problem = real()
            family, host, port = server.endpoint
            relay = str(Path(__file__).with_name("relay.py"))
            self.relay = subprocess.Popen([sys.executable, relay, host, str(port)], stdout=subprocess.PIPE)
            assert self.relay.stdout is not None
            server.endpoint = (family, host, int(self.relay.stdout.readline()))
            return server, problem

        peers._open_server = opened

    def train(self, trainee: Trainee, ckpt: monitor.Checkpointer, steps: range) -> None:
        for step in steps:
            self.moody.fails = rank() == self.spec.get("moody") and step in self.spec["fails"]
            if rank() == self.spec.get("dies") and step == self.spec["dies_at"]:
                self.dies_while_keeping(self.spec["dies_when"])
            silent = step >= self.spec.get("silent_from", 10**9)
            if silent and rank() == self.spec["relayed"]:
                os.kill(self.relay.pid, signal.SIGSTOP)
            losses = trainee.step()
            self.results.tell("state", step=step, hashes=hashes(trainee), losses=losses)
            ckpt.step()
            self.results.tell("kept", step=step, newest=self.newest(ckpt), off=self.off(ckpt))
            ckpt.flush()
            memory = memory_of(ckpt)
            if memory is not None:
                wait_for_snapshot(ckpt)
                if not silent:
                    wait_for_replicas(ckpt)
                self.results.tell("sent", step=step, busy=self.sending(memory))
            dist.barrier()  # what is known at a step must not hang on the speed of a disk

    def sending(self, memory: monitor.memory.tier.MemoryTier) -> bool:
        sender = memory._replication._sender
        return sender is not None and sender.busy

    def dies_while_keeping(self, when: str) -> None:
        real = monitor.memory.tier.seal_snapshot

        def remember(version: Any) -> float:
            if when == "after":
                real(version)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        monitor.memory.tier.seal_snapshot = remember

    def newest(self, ckpt: monitor.Checkpointer) -> int | None:
        memory = memory_of(ckpt)
        found = None if memory is None else memory.newest
        return None if found is None else found.step

    def off(self, ckpt: monitor.Checkpointer) -> bool:
        memory = memory_of(ckpt)
        return memory is None or memory._disabled or memory._buffers.arena is None


def without_agreement() -> None:
    """A mutant, to test the tests: what failed on another rank is taken for whole on this one."""
    real = monitor.memory.tier.MemoryTier._finish

    def finish(tier: Any, pending: Any, outcome: Any, _: bool) -> None:
        real(tier, pending, outcome, False)

    monitor.memory.tier.MemoryTier._finish = finish  # type: ignore[method-assign]


def first(life: Life) -> None:
    """Trains, and is killed by nobody but itself."""
    if life.spec.get("mutant"):
        without_agreement()
    trainee = build(life.spec["case"], seed=1)
    ckpt = life.attach(trainee)
    assert ckpt.resume() == 0
    life.train(trainee, ckpt, range(1, life.spec["steps"] + 1))
    ckpt.flush()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def second(life: Life) -> None:
    """Resumes, tells, trains on and ends as it is meant to."""
    trainee = build(life.spec["case"], seed=2)
    ckpt = life.attach(trainee)
    step = ckpt.resume()
    found = ckpt.certificate
    life.results.tell(
        "resumed",
        step=step,
        exact=found is None or found.exact,
        sources=sorted({unit.source for unit in found.units}) if found else [],
        hashes=hashes(trainee),
    )
    if life.spec.get("dump"):
        pieces = [
            (piece.fragment.fqn, piece.fragment.slot, piece.fragment.start, piece.tensor.detach().clone())
            for piece in adapter_for(trainee.target).owned()
        ]
        torch.save(pieces, Path(life.spec["dump"]) / f"rank{rank()}.pt")
    life.train(trainee, ckpt, range(step + 1, step + 5))
    if life.spec.get("back"):
        memory = memory_of(ckpt)
        assert memory is not None
        step = ckpt.resume()
        life.results.tell("back", step=step, hashes=hashes(trainee))
        life.train(trainee, ckpt, range(step + 1, step + 5))
        sender = memory._replication._sender
        life.results.tell("sent_again", save=str(None if sender is None else sender.sent))
    ckpt.save(wait=True)
    ckpt.close(save=False)
    life.results.tell("end")


def main(spec: Mapping[str, Any]) -> None:
    start_group(spec["case"]["kind"] == "zero")
    torch.use_deterministic_algorithms(True)
    {"first": first, "second": second}[spec["life"]](Life(spec))
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
