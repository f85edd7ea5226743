"""Trains every case of its spec without interruption; trains each again until the process is killed; and, in the
processes that follow, resumes each and trains it to the end. Under torchrun the restart tells which of it.

Usage: resume_train.py SPEC.json
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from resume_jobs import Results, Trainee, build, leave, rank, start_group

import monitor
from monitor.adapters import adapter_for
from monitor.adapters.module_tensors import as_bytes
from monitor.config.schema import StagingSettings


class Run:
    """One process of the spec."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = spec
        self.results = Results(spec["results"])
        self.steps, self.kill_at = spec["steps"], spec["kill_at"]

    def straight(self, case: Mapping[str, Any]) -> None:
        """Without a checkpointer, as if it were not installed."""
        trainee = build(case, seed=1)
        for step in range(self.steps):
            self.results.tell("straight", case=case["name"], step=step, losses=trainee.step())
        self.results.tell("end", case=case["name"], of="straight", hashes=hashes(trainee))

    def killed(self, case: Mapping[str, Any], last: bool) -> None:
        """Up to the step in which the process dies; the checkpointer is never closed."""
        trainee = build(case, seed=1)
        ckpt = self.attach(case, trainee)
        assert ckpt.resume() == 0
        for step in range(self.kill_at):
            self.results.tell("killed", case=case["name"], step=step, losses=trainee.step())
            self.checkpoint(case, trainee, ckpt)
        ckpt.flush()
        if last:
            if dist.is_initialized():
                dist.barrier()  # the commit is rank 0's: what follows expects it
            self.die(trainee)

    def resumed(self, case: Mapping[str, Any]) -> None:
        """Everything starts from other weights and other random states, and must end where the straight run did."""
        trainee = build(case, seed=2)
        ckpt = self.attach(case, trainee)
        first = ckpt.resume()
        certificate = ckpt.certificate
        assert certificate is not None
        self.results.tell(
            "resumed",
            case=case["name"],
            step=first,
            exact=certificate.exact,
            save=certificate.save,
            effective=certificate.effective_step,
            units=[(unit.layer, unit.slot, unit.step) for unit in certificate.units],
            hashes=hashes(trainee),
        )
        for step in range(first, self.steps):
            self.results.tell("continued", case=case["name"], step=step, losses=trainee.step())
            self.checkpoint(case, trainee, ckpt)
        ckpt.close(save=False)
        self.results.tell("end", case=case["name"], of="resumed", hashes=hashes(trainee))

    def attach(self, case: Mapping[str, Any], trainee: Trainee) -> monitor.Checkpointer:
        settings = {
            "store": str(Path(self.spec["directory"]) / case["name"]),
            "every": case["every"],
            "policy": case.get("policy", "full"),
            "staging": case.get("staging", "auto"),
            "metrics": {"enabled": False},
            **case.get("settings", {}),
        }
        if "waves" in case:  # a cap below what the settings allow, for a state as small as this
            settings["staging"] = StagingSettings.model_construct(mode="auto", max_bytes=case["waves"])
        return monitor.attach(trainee.target, settings, state=trainee.state)

    def checkpoint(self, case: Mapping[str, Any], trainee: Trainee, ckpt: monitor.Checkpointer) -> None:
        ckpt.flush()  # so that each decision finds the save before it committed, and writing overlaps training
        report = ckpt.step()
        if report is None:
            return
        assert report.skipped is None, report
        self.results.tell("saved", case=case["name"], step=report.step, hashes=hashes(trainee))

    def die(self, trainee: Trainee) -> None:
        if rank() == (dist.get_world_size() - 1 if dist.is_initialized() else 0):
            self.results.tell("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        trainee.step()  # the others are in the middle of a step


def hashes(trainee: Trainee) -> dict[str, str]:
    """A digest of every fragment that this rank owns."""
    return {
        f"{piece.fragment.fqn}|{piece.fragment.slot}|{piece.fragment.start}|{piece.fragment.numel}": xxhash.xxh3_128(
            as_bytes(piece.tensor.detach().cpu())
        ).hexdigest()
        for piece in adapter_for(trainee.target).owned()
        if piece.fragment.numel
    }


def begin(spec: Mapping[str, Any]) -> int:
    """Set the process group up; how many processes came before this one."""
    if "phase" in spec:
        return int(spec["phase"])
    start_group(any(case["kind"] == "zero" for case in spec["cases"]))
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def main(spec: Mapping[str, Any]) -> None:
    before, run, cases = begin(spec), Run(spec), spec["cases"]
    torch.use_deterministic_algorithms(True)
    if before == 0:
        for case in cases:
            if not case.get("composite"):
                run.straight(case)
        for case in cases:
            run.killed(case, last=case is cases[-1])
    for case in cases:
        run.resumed(case)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
