"""A job whose files may not grow beyond a limit for a while (``ulimit -f``). Usage: faults_file_limit.py SPEC.json"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from resume_jobs import Results

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.jobs import Job


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that the write fails instead, as under most schedulers
    store = Path(spec["directory"]) / "store"
    job = Job(store, width=128)
    job.step()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    for _ in range(3):
        job.step()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    job.step()
    failures = job.metric("driftpoint_failures_total", reason="StorageError")
    job.ckpt.close(save=False)
    commits = sorted(save.step for save in open_catalog(LocalFiles(store)).saves())
    Results(spec["results"]).tell("end", failures=failures, commits=commits)


if __name__ == "__main__":
    main()
