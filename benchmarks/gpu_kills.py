"""A real model, killed three times or more with SIGKILL while it trains, under policies that do not save everything.

    python benchmarks/gpu_kills.py --folder DIR [--device cuda] [--steps 240] [--policies budget compact] [--json FILE]
    python benchmarks/gpu_kills.py --folder DIR --device cpu --steps 2100 --policies auto --kills 20 --seeds 5

A Llama of 110 million parameters (fewer on a CPU) learns the standard library's sources, byte by byte: once
undisturbed, and once under each policy, where it is killed at evenly spaced steps, once something is committed, and
resumes in a fresh process. The losses of both are in the JSON. Exits 1 when the last ones differ by more than the goal:
a share, or with several ``--seeds`` of undisturbed runs the largest difference between those.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import monitor
from benchmarks.figures import Figure, report
from examples.stdlib_text import Batches, standard_library

EVERY = 20
LAST = 10  # steps whose mean loss is compared
GOAL = 1.05
POLICIES: dict[str, dict[str, Any]] = {
    "budget": {
        "policy": "budget",
        "encoding": "compact",
        "budget": {"storage_share": 0.5, "stall_share": 0.05},
        "bounds": {"max_staleness": 1000},
    },
    "compact": {"encoding": "compact", "encode": "staging"},
    "auto": {"policy": "auto", "encoding": "compact", "packing": 1, "differences": True, "every": 5},
}
AUTO_BUDGET = {
    "cpu": {"bytes_per_hour": 4e9, "burst_seconds": 60},  # 1.1 MB/s; a compact save has about 0.6 MB
    "cuda": {"bytes_per_hour": 4e11, "burst_seconds": 5},  # 111 MB/s; a compact save has 456 MB
}


def train(store: Path | None, policy: str, device: str, steps: int, seed: int, log: Path) -> None:
    """Train to the end from the newest commit, or without a store, and log a line for each step."""
    torch.manual_seed(seed)
    cuda = device == "cuda"
    hidden, layers, heads = (768, 12, 12) if cuda else (64, 2, 2)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=256,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=cuda)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    batches = Batches(standard_library(1 << 22), length=256 if cuda else 32, size=32 if cuda else 4, seed=seed)
    ckpt, first = None, 0
    if store is not None:
        settings = {"store": str(store), "every": EVERY, "metrics": {"enabled": False}, **POLICIES[policy]}
        if policy == "auto":
            settings["budget"] = AUTO_BUDGET[device]
        ckpt = monitor.attach((model, optimizer), settings, state=[schedule, batches])
        first = ckpt.resume()
    with log.open("a") as lines:
        for step in range(first, steps):
            tokens = next(batches).to(device)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            lines.write(json.dumps([step, float(loss.detach())]) + "\n")
            lines.flush()
            if ckpt is not None:
                ckpt.step()
    if ckpt is not None:
        ckpt.close()


def killed(command: list[str], store: Path, log: Path, steps: int, kills: int) -> list[int]:
    """Run ``command`` to its end, killing it so many times. Return the steps at which it resumed."""
    resumed = []
    for at in (*((number + 1) * steps // (kills + 1) for number in range(kills)), None):
        before = len(_lines(log))
        process = subprocess.Popen(command, start_new_session=True)
        while process.poll() is None:
            found = _lines(log)[before:]
            if at is not None and found and found[-1][0] >= at and any((store / "manifests").glob("*.json")):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(0.02)
        if at is None and process.returncode:
            raise RuntimeError(f"training failed with {process.returncode}")
        if at is not None and process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"training ended with {process.returncode} before it was killed at step {at}")
        resumed.append(_lines(log)[before][0])
    return resumed[1:]


def _lines(log: Path) -> list[tuple[int, float]]:
    """Return the steps and losses logged; a line that a kill cut off does not count."""
    text = log.read_text() if log.exists() else ""
    return [tuple(json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path, required=True, help="for stores and logs; empty")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=1, help="undisturbed runs; the first seed is that of the others")
    parser.add_argument("--seed", type=int, default=0, help="of the process, where it trains")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--train", default=None, help="for the processes it starts: the policy, or none")
    options = parser.parse_args()
    if options.train is not None:
        store = None if options.train == "none" else options.folder / options.train
        log = options.folder / f"{options.train}{options.seed or ''}.log"
        train(store, options.train, options.device, options.steps, options.seed, log)
        return 0
    command = [sys.executable, __file__, f"--folder={options.folder}", f"--device={options.device}"]
    command.append(f"--steps={options.steps}")
    ends = []
    for seed in range(options.seeds):
        subprocess.run([*command, "--train=none", f"--seed={seed}"], check=True)
        run = dict(_lines(options.folder / f"none{seed or ''}.log"))
        ends.append(statistics.fmean(list(run.values())[-LAST:]))
    undisturbed, end = dict(_lines(options.folder / "none.log")), ends[0]
    goal = GOAL if len(ends) == 1 else 1.0 + (max(ends) - min(ends)) / end
    figures = [Figure("undisturbed, first loss", undisturbed[0], "nats"), Figure("undisturbed, last", end, "nats")]
    if len(ends) > 1:
        figures.append(Figure("undisturbed, last, between seeds", max(ends) - min(ends), "nats", f"{len(ends)} seeds"))
    losses = {"undisturbed": undisturbed}

    def resumes(policy: str) -> list[int]:
        log = options.folder / f"{policy}.log"
        return killed([*command, f"--train={policy}"], options.folder / policy, log, options.steps, options.kills)

    with ThreadPoolExecutor() as pool:  # what is compared are losses, not times
        for policy, resumed in zip(options.policies, pool.map(resumes, options.policies), strict=True):
            losses[policy] = dict(sorted(dict(_lines(options.folder / f"{policy}.log")).items()))
            last = statistics.fmean(list(losses[policy].values())[-LAST:])
            figures.append(Figure(f"{policy}, last loss", last / end, "x", f"undisturbed; resumed at {resumed}", goal))
            figures.append(Figure(f"{policy}, resumes from nothing", resumed.count(0), "", f"{options.kills} kills", 0))
    status = report(f"a model killed {options.kills} times, on {options.device}", figures, options.json)
    if options.json is not None:
        options.json.write_text(json.dumps({**json.loads(options.json.read_text()), "losses": losses}, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
