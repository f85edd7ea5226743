"""A Trainer in one process: trains to its end and saves at every step, or resumes from a store.

Usage: source_hf.py SPEC.json: ``role``, ``output``, and ``store`` where it is to resume.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layout_hf_cases import Recording, Sentences, trainer
from resume_jobs import Results

import monitor


def main(spec: Mapping[str, Any]) -> None:
    running = trainer("ddp-fp32", Path(spec["output"]), seed={"save": 0, "resume": 1}[spec["role"]])
    path, config = None, {"store": spec.get("store"), "metrics": {"enabled": False}}
    if spec["role"] == "resume":
        callback = monitor.CheckpointCallback(config)
        running = Recording(running.model, running.args, train_dataset=Sentences(), callbacks=[callback])
        path = monitor.resume_path(config)
        assert path is not None
    for module in running.model.modules():  # random states are not imported
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    running.train(resume_from_checkpoint=path)
    digest = hashlib.sha256()
    for name, tensor in sorted(running.model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    rates = [entry["learning_rate"] for entry in running.state.log_history if "learning_rate" in entry]
    Results(spec["results"]).tell("trained", losses=running.losses, rates=rates, weights=digest.hexdigest())


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
