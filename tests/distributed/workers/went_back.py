"""A DeepSpeed engine that loads an older checkpoint of its own, and ends at a step that was saved before.

Usage: went_back.py SPEC.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
from resume_jobs import Results, Trainee, build, leave, start_group
from staging_consistency import own

import monitor


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=True)
    results, directory = Results(spec["results"]), Path(spec["directory"])
    settings = {"store": str(directory / "store"), "every": 1000, "metrics": {"enabled": False}, **spec["settings"]}
    one = build(spec["case"], seed=1)
    with monitor.attach(one.target, settings, state=one.state) as ckpt:
        ckpt.resume()
        train(one, ckpt, 2)
        one.target.save_checkpoint(str(directory / "deepspeed"))
        train(one, ckpt, spec["back"])
        ckpt.save(wait=spec["wait"])
        abandoned = own(one.target)
        one.target.load_checkpoint(str(directory / "deepspeed"))
        train(one, ckpt, spec["back"])
        left = own(one.target)
    one.target.destroy()
    deepspeed.comm.barrier()
    two = build(spec["case"], seed=2)
    with monitor.attach(two.target, settings, state=two.state) as ckpt:
        step = ckpt.resume()
        results.tell("ended", step=step, differs=left != abandoned, equal=own(two.target) == left)
    leave()


def train(trainee: Trainee, ckpt: monitor.Checkpointer, steps: int) -> None:
    for _ in range(steps):
        trainee.step()
        ckpt.step()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
