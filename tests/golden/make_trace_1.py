"""Records the golden trace: a real job under ``budget``, interrupted once, and what a simulation of it says.

    python -m tests.golden.make_trace_1

Run once; traces of past releases have to be read, and replayed alike, for ever."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from tests.golden.test_trace_1 import FOLDER, summary
from tests.support.jobs import job

SETTINGS = {
    "policy": "budget",
    "budget": {"bytes_per_hour": 1e8, "burst_seconds": 0.3},
    "encoding": "compact",
    "packing": 1,
}


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        for _ in range(2):
            with job(store, **SETTINGS) as one:  # type: ignore[arg-type]
                one.ckpt.resume()
                for _ in range(8):
                    one.step()
        text = store.with_name("store.trace.jsonl").read_text().replace(folder, "/folder")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "trace.jsonl").write_text(text + '{"kind":"decis')
    (FOLDER / "expected.json").write_text(json.dumps(summary(), indent=1) + "\n")


if __name__ == "__main__":
    main()
