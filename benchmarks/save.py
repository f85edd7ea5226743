"""What a full-state save costs: stall, bytes, time to durable, and the training beside it.

Against ``engine.save_checkpoint`` and DCP ``async_save`` (its default stager and its best), on the same state of
the same engine, taken in turns within one run. Two ranks, gloo, CPU or whatever DeepSpeed's accelerator is.

    python benchmarks/save.py [--stages 2 3] [--ranks 2] [--rounds 4] [--layers 12] [--rows 2] [--json FILE]

The floor of a stall is one copy of the state in memory; the floor of the time to durable is an fsync'ed write of
the same bytes. Both are measured here too. Lazy copies are measured beside a short step. Copies of the default, for
saves and versions in memory, are measured beside a long one (``--rows`` sequences a rank), whose forward and backward
take many times as long as the copies: what is left of the stall there is what cannot be hidden.

Exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.figures import Figure, report
from benchmarks.ranks import torchrun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--ranks", type=int, default=2, help="each needs a device of its own, unless that is a CPU")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12, help="12 make 110 million parameters")
    parser.add_argument(
        "--rows", type=int, default=2, help="sequences a rank in the long step, which takes 1 s or more"
    )
    parser.add_argument("--dir", type=Path, default=None, help="where to write; needs about 10 GB")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    figures = []
    for stage in options.stages:
        with (
            tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir=options.dir) as folder,
            tempfile.TemporaryDirectory(prefix="driftpoint-bench-", dir="/dev/shm") as shared,
        ):
            arguments = [f"--{name}={getattr(options, name)}" for name in ("rounds", "layers", "rows")]
            arguments += [f"--stage={stage}", f"--folder={folder}", f"--shared={shared}"]
            figures += _figures(
                stage, torchrun("save_worker.py", arguments, Path(folder) / "result.json", options.ranks)
            )
    return report(f"cost of a full-state save, {options.ranks} ranks", figures, options.json)


def _figures(stage: int, seen: dict[str, list[float]]) -> list[Figure]:
    def middle(name: str) -> float:
        return statistics.median(seen[name])

    def ratio(name: str, against: str) -> float:
        return statistics.median(a / b for a, b in zip(seen[name], seen[against], strict=True))

    z = f"ZeRO-{stage}"
    stagers = {"default": "default", "cached": "cached stager", "async": "asynchronous stager"}
    stagers = {f"dcp_{name}_stall": told for name, told in stagers.items() if f"dcp_{name}_stall" in seen}
    dcp = min(stagers, key=middle)
    return [
        Figure(f"{z} parameters", middle("parameters") / 1e6, "million"),
        Figure(f"{z} copy of the state in memory", middle("copy"), "s"),
        Figure(f"{z} stall", middle("stall"), "s"),
        Figure(f"{z} first stall", seen["first_stall"][0], "s"),
        Figure(f"{z} stall of engine.save_checkpoint", middle("deepspeed_stall"), "s"),
        *(Figure(f"{z} stall of DCP async_save, {told}", middle(name), "s") for name, told in stagers.items()),
        Figure(f"{z} stall ratio, plain copy", ratio("stall", "deepspeed_stall"), "x", "engine.save_checkpoint"),
        Figure(
            f"{z} stall ratio, drift measured before",
            ratio("aware_stall", "deepspeed_stall"),
            "x",
            "engine.save_checkpoint",
        ),
        Figure(f"{z} stall ratio, plain copy", ratio("stall", dcp), "x", "DCP async_save, its best"),
        Figure(
            f"{z} stall ratio, staging lazy",
            ratio("lazy_stall", "deepspeed_stall"),
            "x",
            "engine.save_checkpoint",
            1 / 15,
        ),
        Figure(f"{z} stall ratio, staging lazy", ratio("lazy_stall", dcp), "x", "DCP async_save, its best", 1 / 3),
        Figure(f"{z} long step", middle("long_step"), "s"),
        Figure(f"{z} forward and backward of a long step, a save beside", middle("hidden_beside"), "s"),
        Figure(f"{z} stall beside a long step", middle("hidden_stall"), "s"),
        Figure(
            f"{z} stall ratio beside a long step",
            ratio("hidden_stall", "deepspeed_stall"),
            "x",
            "engine.save_checkpoint",
            1 / 600,
        ),
        Figure(f"{z} forward and backward of a long step, a version beside", middle("kept_beside"), "s"),
        Figure(f"{z} stall, a version in memory beside a long step", middle("kept_stall"), "s"),
        Figure(
            f"{z} stall ratio, a version in memory beside a long step",
            ratio("kept_stall", "deepspeed_stall"),
            "x",
            "engine.save_checkpoint",
            1 / 60,
        ),
        Figure(f"{z} bytes", middle("bytes") / 1e6, "MB"),
        Figure(
            f"{z} bytes ratio", ratio("bytes", "deepspeed_bytes"), "x", "DeepSpeed's files", 0.87 if stage < 3 else None
        ),
        Figure(f"{z} time to durable", middle("durable"), "s"),
        Figure(
            f"{z} time to durable ratio", ratio("durable", "write_floor"), "x", "fsync'ed write of the same bytes", 1.25
        ),
        Figure(f"{z} time to durable of DCP ratio", ratio("dcp_default_durable", "write_floor"), "x", "the same write"),
        Figure(f"{z} step", middle("step"), "s"),
        Figure(f"{z} step while a save is copied and written", ratio("lazy_step", "step"), "x", "step without"),
        Figure(f"{z} step while a save is written", ratio("step_beside", "step"), "x", "step without"),
    ]


if __name__ == "__main__":
    sys.exit(main())
