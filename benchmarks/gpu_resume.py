"""Resume bitwise under every framework, one rank: losses and all state, after a resume in a fresh process, and without.

    python benchmarks/gpu_resume.py {torch,deepspeed} --folder DIR [--device cuda] [--json FILE]

``torch``: fused AdamW, fp16 with a gradient scaler, DistributedDataParallel, FSDP2, torch.compile. ``deepspeed``:
ZeRO-1/2/3 in bf16, ZeRO-2 in fp16 with its loss scaler (not on a CPU), ZeRO-2 with the optimizer on the CPU. In both
also copies in waves, and the journal. Each case trains to the end in one process, which saves in the middle; another
process resumes from there, or at the end with the journal. A case that fails does not keep others from running. Exits
1 when one differs or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import monitor
from monitor.adapters import adapter_for
from store.schema import digest

SAVED, STEPS = 4, 7
WIDTH = 192


@dataclass
class Job:
    """What is trained: ``target`` is given to attach, ``step`` takes a batch and returns the loss."""

    target: Any
    step: Callable[[torch.Tensor], torch.Tensor]
    state: list[Any] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


WIDE = 1024
WAVES: dict[str, Any] = {"staging": {"mode": "lazy", "max_bytes": 20_000_000}}  # 50 MB, three waves
JOURNAL: dict[str, Any] = {"journal": {"enabled": True}}


def model(device: str, buffers: bool = True, width: int = WIDTH) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    norm = nn.BatchNorm1d(width) if buffers else nn.LayerNorm(width)
    return nn.Sequential(nn.Linear(32, width), *blocks, norm, nn.Linear(width, 1)).to(device)


def plain(device: str, net: nn.Module, run: nn.Module | None = None, half: bool = False, **options: Any) -> Job:
    """A job of plain PyTorch, or of a wrapper ``run`` around ``net``."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**20, growth_interval=2, enabled=half)
    trained = run or net

    def step(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.float16 if half else torch.bfloat16):
            loss = trained(batch).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        return loss

    return Job((trained, optimizer), step, [schedule, *([scaler] if half else [])])


def ddp(device: str) -> Job:
    net = model(device)
    return plain(device, net, nn.parallel.DistributedDataParallel(net))


def fsdp2(device: str) -> Job:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, mesh = model(device), init_device_mesh(device, (1,))
    for block in net:
        if isinstance(block, nn.Sequential):
            fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return plain(device, net)


def compiled(device: str) -> Job:
    net = model(device)
    return plain(device, net, torch.compile(net))  # type: ignore[arg-type]


def zero(device: str, stage: int, half: bool = False, offload: bool = False, width: int = WIDTH) -> Job:
    import deepspeed

    scaler = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})},
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        **({"fp16": scaler} if half else {"bf16": {"enabled": True}}),
    }
    engine, *_ = deepspeed.initialize(model=model(device, buffers=False, width=width), config=config)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = engine(batch.to(torch.float16 if half else torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
        return loss

    return Job(engine, step)


CASES: dict[str, dict[str, Callable[[str], Job]]] = {
    "torch": {
        "fused AdamW": lambda device: plain(device, model(device), fused=True),
        "fp16, gradient scaler": lambda device: plain(device, model(device), half=True),
        "DDP": ddp,
        "FSDP2": fsdp2,
        "torch.compile": compiled,
        "copies in waves": lambda device: replace(plain(device, model(device, width=WIDE)), settings=WAVES),
        "journal": lambda device: replace(plain(device, model(device)), settings=JOURNAL),
        "journal, DDP": lambda device: replace(ddp(device), settings=JOURNAL),
        "journal, FSDP2": lambda device: replace(fsdp2(device), settings=JOURNAL),
    },
    "deepspeed": {
        "ZeRO-1": lambda device: zero(device, 1),
        "ZeRO-2": lambda device: zero(device, 2),
        "ZeRO-3": lambda device: zero(device, 3),
        "ZeRO-2, fp16, loss scaler": lambda device: zero(device, 2, half=True),
        "ZeRO-2, optimizer on the CPU": lambda device: zero(device, 2, offload=True),
        "ZeRO-2, copies in waves": lambda device: replace(zero(device, 2, width=WIDE), settings=WAVES),
        "journal, ZeRO-1": lambda device: replace(zero(device, 1), settings=JOURNAL),
        "journal, ZeRO-2": lambda device: replace(zero(device, 2), settings=JOURNAL),
        "journal, ZeRO-3": lambda device: replace(zero(device, 3), settings=JOURNAL),
    },
}


def cases(kind: str, device: str) -> dict[str, Callable[[str], Job]]:
    """Return those that the device can run: DeepSpeed has no fp16 on a CPU."""
    return {
        name: make
        for name, make in CASES[kind].items()
        if device != "cpu" or (kind, "fp16" in name) != ("deepspeed", True)
    }


def train(job: Job, device: str, store: Path, resumed: bool) -> dict[str, Any]:
    """Train from the start, or from the commit in the middle, to the end. Return the losses and the state's hash."""
    settings = {"store": str(store), "every": SAVED, "metrics": {"enabled": False}, **job.settings}
    ckpt = monitor.attach(job.target, settings, state=job.state)
    first = ckpt.resume()
    if first != (0 if not resumed else STEPS if "journal" in job.settings else SAVED):
        raise RuntimeError(f"resumed at step {first}")
    if resumed and not (ckpt.certificate and ckpt.certificate.exact):
        raise RuntimeError(f"the resume was not exact: {ckpt.certificate}")
    losses = {}
    for step in range(first, STEPS):
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(device)
        losses[step] = float(job.step(batch).detach()).hex()
        ckpt.step()
    ckpt.close(save=False)
    pieces = adapter_for(job.target).held()
    held = {str(piece.fragment): digest(_bytes(piece.tensor)) for piece in pieces}
    draws = torch.rand(4, device=device).tolist()
    return {
        "losses": {str(step): loss for step, loss in losses.items() if step >= SAVED},
        "state": held,
        "draws": draws,
    }


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data


def run_all(kind: str, device: str, folder: Path, resumed: bool) -> dict[str, Any]:
    """Return what each case found, or its error."""
    if device == "cuda":
        torch.use_deterministic_algorithms(True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port)}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    found: dict[str, Any] = {}
    for number, (name, make) in enumerate(cases(kind, device).items()):
        torch.manual_seed(7 if not resumed else 8)  # a resume brings the weights and the generators
        try:
            found[name] = train(make(device), device, folder / f"{kind}-{number}", resumed)
        except Exception as error:  # noqa: BLE001 - of one case: the others are tried, and this one is reported
            traceback.print_exc()
            found[name] = {"error": repr(error)[:300]}
    dist.destroy_process_group()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("kind", choices=CASES)
    parser.add_argument("--folder", type=Path, required=True, help="for the stores; empty")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--part", choices=["whole", "resumed"], default=None, help="for the processes it starts")
    options = parser.parse_args()
    if options.part:
        found = run_all(options.kind, options.device, options.folder, options.part == "resumed")
        (options.folder / f"{options.part}.json").write_text(json.dumps(found))
        return 0
    results = {}
    for part in ("whole", "resumed"):
        command = [sys.executable, __file__, options.kind, f"--folder={options.folder}", f"--device={options.device}"]
        subprocess.run([*command, f"--part={part}"], check=True)
        results[part] = json.loads((options.folder / f"{part}.json").read_text())
    rows = [
        _row(name, results["whole"][name], results["resumed"][name]) for name in cases(options.kind, options.device)
    ]
    for row in rows:
        print(f"{row['name']:32} {row['result']}")
    if options.json is not None:
        options.json.write_text(json.dumps({"cases": rows}, indent=2) + "\n")
    return int(any(row["result"] != "equal to the last bit" for row in rows))


def _row(name: str, whole: dict[str, Any], resumed: dict[str, Any]) -> dict[str, str]:
    errors = [found["error"] for found in (whole, resumed) if "error" in found]
    if not errors and not resumed["losses"]:  # of the journal: nothing was left to train
        whole = {**whole, "losses": {}}
    differing = [key for key in whole if not errors and whole[key] != resumed.get(key)]
    result = errors[0] if errors else f"differs: {', '.join(differing)}" if differing else "equal to the last bit"
    return {"name": name, "result": result}


if __name__ == "__main__":
    sys.exit(main())
