"""Trains without end, and is to be killed.

Usage: trace_killed.py SPEC.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.jobs import Job

if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[1]).read_text())
    job = Job(Path(spec["directory"]) / "store", width=64)
    job.ckpt.resume()
    while True:
        job.step()
