"""A small job that is told of its end, by real signals to itself at chosen steps, in one of several situations.

Usage: preempt.py SPEC.json. ``signals``: rank -> step after whose update it signals itself. ``situation``: a function
below, which may set things up before the training and before each step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resume_jobs import Results, leave, rank, start_group

from tests.support.hooked import HookedFiles
from tests.support.internals import replace_files
from tests.support.jobs import Job

NOW: dict[str, Any] = {}


def plain(job: Job, step: int) -> None:
    """Nothing happens but the signal."""


def announce() -> None:
    os.kill(os.getpid(), NOW["number"])


def hanging(job: Job, step: int) -> None:
    """From the step of the signal on the storage does not answer."""
    if step == NOW["signal"]:
        job.hook().before = lambda operation, path: threading.Event().wait()


class Slow(HookedFiles):
    """Real files that take 40 kB of payload a second."""

    def create(self, path: str) -> Any:
        file = super().create(path)
        if "safetensors" in path:
            write = file.write
            file.write = lambda data: (time.sleep(memoryview(data).nbytes / 4e4), write(data))  # type: ignore[method-assign]
        return file


def slow(job: Job, step: int) -> None:
    """The storage is slow from the beginning on."""
    if step == 1:
        replace_files(job.ckpt, Slow)


def held(event: threading.Event) -> None:
    assert event.wait(180)


def under_way(job: Job, step: int) -> None:
    """The save of the step before is under way when the signal comes, and goes on a little later."""
    if step == NOW["signal"] - 1:
        go_on = threading.Event()
        job.hook().before = lambda operation, path: held(go_on)
        NOW["go_on"] = go_on
    if step == NOW["signal"]:
        threading.Timer(0.3, NOW["go_on"].set).start()


def twice(job: Job, step: int) -> None:
    """The save of the step before does not get on, and neither does this step; signals go on coming."""
    if step == NOW["signal"] - 1:
        job.hook().before = lambda operation, path: threading.Event().wait() if "manifests" in path else None
    if step == NOW["signal"]:
        while True:
            announce()
            time.sleep(0.02)


def forked(job: Job, step: int) -> None:
    """A child process is signalled, not this one."""
    if step == 3:
        child = get_context("fork").Process(target=announce)
        child.start()
        child.join(180)
        NOW["tell"]("child", code=child.exitcode)


def first_thing(job: Job, step: int) -> None:
    """The signal came before the first step, and before ``resume()``."""


class Stuck:
    """An object whose state cannot be taken any more."""

    def __init__(self) -> None:
        self.stuck = self.fails = False

    def state_dict(self) -> dict[str, int]:
        if self.stuck:
            threading.Event().wait()
        if self.fails:
            self.fails = False
            raise RuntimeError("boom")
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        assert not state


STUCK = Stuck()


def stuck(job: Job, step: int) -> None:
    """At the last save the training thread itself does not get on."""
    STUCK.stuck = step == NOW["signal"]


def fails_once(job: Job, step: int) -> None:
    """At the last save the state of rank 1 cannot be taken; the next moment it can."""
    if step == 3 and rank() == 1:
        STUCK.fails = True


def raises(job: Job, step: int) -> None:
    """Rank 1 fails, and the other waits for it, as in a collective on GPUs: no step boundary comes any more."""
    if step == 5 and rank() == 1:
        raise RuntimeError("rank 1 fails")
    if step == 5:
        threading.Event().wait()


def own_handler(job: Job, step: int) -> None:
    """The script has a handler of its own; see :func:`main`."""


def own_handler_announces(job: Job, step: int) -> None:
    """As above, and it tells the checkpointer."""


SITUATIONS: Mapping[str, Callable[[Job, int], None]] = {
    one.__name__: one
    for one in (
        plain, hanging, slow, under_way, twice, forked, first_thing, stuck, fails_once, raises, own_handler,
        own_handler_announces,
    )
}  # fmt: skip


def digest(job: Job) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(job.weights().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def main(spec: Mapping[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO)
    os.environ |= spec.get("environment", {})
    NOW["number"] = signal.Signals[spec.get("number", "SIGUSR1")]
    if "RANK" in os.environ:
        start_group(False)
    results = Results(spec["results"])
    name = spec.get("situation", "plain")
    situation = SITUATIONS[name]
    NOW["tell"], NOW["signal"] = results.tell, spec.get("signals", {}).get(str(rank()))
    if name.startswith("own_handler"):
        signal.signal(signal.SIGUSR1, lambda number, frame: own(job))

    def own(job: Job) -> None:
        results.tell("own handler")
        if name.endswith("announces"):
            job.ckpt.preempt()

    torch.manual_seed(3)
    state = [STUCK] if name in ("stuck", "fails_once") else []
    job = Job(Path(spec["directory"]) / "store", state, spec.get("width", 8), **spec.get("settings", {}))
    if name == "first_thing":
        announce()
    first = job.ckpt.resume()
    if first == 0:
        torch.manual_seed(rank())
    results.tell("resumed", step=first, digest=digest(job), exact=job.ckpt.certificate and job.ckpt.certificate.exact)
    for step in range(first + 1, spec["steps"] + 1):
        job.update()
        situation(job, step)
        if step == NOW["signal"] and name != "first_thing":
            announce()
        results.tell("state", step=step, digest=digest(job))
        try:
            report = job.ckpt.step()
        except SystemExit as error:
            told = error.report  # type: ignore[attr-defined]
            results.tell("left", step=step, code=error.code, skipped=told.skipped, saved=len(told.saved))
            if dist.is_initialized():
                dist.barrier()  # torchrun ends the other ranks once one has left
            raise
        if job.ckpt.preempted:
            assert report is not None
            results.tell("told", step=step, preempted=report.preempted, skipped=report.skipped)
            break
        if NOW["signal"] is not None and step < NOW["signal"] - (name in ("under_way", "twice")):
            job.ckpt.flush()
    job.ckpt.close()
    results.tell("finished", restored=signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)
    if dist.is_initialized():
        leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
