"""Train each case of :mod:`tests.support.optimizers`: ``save`` saves at step 3 and goes on, ``resume`` resumes there.

Run as a module, ``python -m tests.support.optimizer_runs save FOLDER``; it writes a JSON file and kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import monitor
from store.errors import DriftpointError
from tests.support.cli import ROOT
from tests.support.optimizers import CASES, Case

SAVED, LAST = 3, 8


def outlined(value: Any) -> Any:
    """Type, dtype, shape, strides of more than one row, and bits of a value, nested or not."""
    kind = type(value).__name__
    if hasattr(value, "__tensor_flatten__") and type(value) is not torch.Tensor:
        names, context = value.__tensor_flatten__()
        return [kind, outlined(context), *(outlined(getattr(value, name)) for name in names)]
    if isinstance(value, torch.Tensor):
        strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
        bits = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return [kind, str(value.dtype), list(value.shape), strides, sha256(bits).hexdigest()]
    if isinstance(value, Mapping):
        return [
            kind,
            [[str(key), outlined(item)] for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))],
        ]
    if isinstance(value, list | tuple | deque):
        return [kind, getattr(value, "maxlen", None), *map(outlined, value)]
    return [kind, value.tobytes().hex() if isinstance(value, np.generic) else repr(value)]


class Run:
    """One case, trained by :meth:`steps`."""

    def __init__(self, case: Case, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.case, self.model = case, case.model()
        made = case.make(self.model)
        self.steppers = made if isinstance(made, list) else [made]
        self.optimizers = [getattr(one, "optimizer", one) for one in self.steppers]
        store = folder / f"{CASES.index(case)}"
        self.ckpt = monitor.attach(
            (self.model, made),
            {"store": str(store), "every": SAVED, "metrics": {"enabled": False}, "trace": {"enabled": False}},
        )

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(step))
        return self.model(x).square().mean()

    def steps(self, steps: range, *, saved: bool) -> list[str]:
        losses = []
        for step in steps:

            def closure(step: int = step) -> torch.Tensor:
                self.model.zero_grad()
                loss = self.loss(step)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            losses.append(float(closure()).hex())
            for optimizer in self.steppers:
                optimizer.step(closure if self.case.closure else None)
            if saved:
                self.ckpt.step()
        return losses

    def state(self) -> Any:
        """All parameters, all optimizer state and all hyperparameters."""
        states = [[outlined(one.state.get(p, {})) for p in self.model.parameters()] for one in self.optimizers]
        groups = [
            outlined({k: v for k, v in g.items() if k != "params"}) for one in self.optimizers for g in one.param_groups
        ]
        return [[outlined(p) for p in self.model.parameters()], states, groups]

    def kinds(self) -> list[str]:
        """The state of the first parameter that has some, as the page shows it."""
        states = ((p, one.state[p]) for one in self.optimizers for p in self.model.parameters() if one.state.get(p))
        found: dict[str, str] = {}
        for parameter, state in states:
            for key, value in state.items():
                found.setdefault(key, _kind(value, parameter))
        found |= {k: "in the group" for one in self.optimizers for k in one.param_groups[0] if k == "k"}
        return [f"`{key}` {kind}".strip() for key, kind in found.items()]


def _kind(value: Any, parameter: torch.Tensor) -> str:
    if not isinstance(value, torch.Tensor):
        return f"({type(value).__name__})"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"({type(value).__name__})"
    odd = "" if value.dtype == parameter.dtype else f"{str(value.dtype).removeprefix('torch.')} "
    return f"({odd}tensor)" if value.shape != parameter.shape else f"({odd.strip()})" if odd else ""


def save(case: Case, folder: Path) -> dict[str, Any]:
    run, at = None, "when attaching"
    try:
        run = Run(case, folder, seed=0)
        at = "at the first decision"
        run.steps(range(SAVED), saved=True)
        run.ckpt.flush()
    except DriftpointError as error:
        return {"refused": f"{type(error).__name__}: {error}", "at": at}
    finally:
        if run is not None:
            run.ckpt.close(save=False)
    resumed_here, kinds = run.state(), run.kinds()
    losses = run.steps(range(SAVED, LAST), saved=False)
    return {"refused": None, "saved": resumed_here, "kinds": kinds, "losses": losses, "end": run.state()}


def resume(case: Case, folder: Path) -> dict[str, Any]:
    run = Run(case, folder, seed=1)
    start, certificate = run.ckpt.resume(), run.ckpt.certificate
    exact = certificate is not None and certificate.exact and start == SAVED
    resumed = run.state()
    run.ckpt.close(save=False)
    losses = run.steps(range(SAVED, LAST), saved=False)
    return {"exact": exact, "saved": resumed, "losses": losses, "end": run.state()}


def main(phase: str, folder: Path) -> None:
    torch.set_num_threads(1)
    cases = [case for case in CASES if case.installed]
    if phase == "resume":
        before = json.loads((folder / "save.json").read_text())
        cases = [case for case in cases if before[case.key]["refused"] is None]
    results = {case.key: (save if phase == "save" else resume)(case, folder) for case in cases}
    (folder / f"{phase}.json").write_text(json.dumps(results))
    os.kill(os.getpid(), signal.SIGKILL)


def outcomes() -> tuple[dict[str, Any], dict[str, Any]]:
    """Run both phases, each in a process of its own, on stores in memory. Return what each found, by case."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        for phase in ("save", "resume"):
            command = [sys.executable, "-m", "tests.support.optimizer_runs", phase, folder]
            environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # torchao compiles its steps, which takes minutes
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == -signal.SIGKILL, done.stderr
        saved, resumed = (json.loads((Path(folder) / f"{phase}.json").read_text()) for phase in ("save", "resume"))
    return saved, resumed


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
