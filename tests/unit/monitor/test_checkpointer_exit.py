"""A process that ends in the middle of a save, and calls ``ckpt.close()`` nowhere, or in vain: no thread of a save may
return to an interpreter that is gone, which aborts the process if an operation of torch is on its stack."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor
from monitor.save.saver import Saver
from store.catalog import open_catalog
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.cli import environment
from tests.support.jobs import Model, committed_steps
from tests.support.s3 import BUCKET, Server

SCRIPT = """
import json, os, sys
import torch
import torch._dynamo  # as the first optimizer of every process does
import monitor.api
from tests.support.jobs import Model

def attach(settings):
    torch.manual_seed(0)
    model = Model(settings.pop("width", 400))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, monitor.attach((model, optimizer), settings)

def train(model, optimizer, ckpt, end):
    for step in range(ckpt.resume(), 2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        ckpt.step()
    exec(end)

def main(settings, end):
    train(*attach(settings), end)

for number, case in enumerate(json.loads(sys.argv[1])):
    if (child := os.fork()) == 0:  # it has a script's end of its own
        os.dup2(os.open(f"{sys.argv[2]}/{number}.err", os.O_WRONLY | os.O_CREAT, 0o644), 2)
        break
    print(number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
if child == 0 and case["local"]:
    main(case["settings"], case["end"])
elif child == 0:
    model, optimizer, ckpt = attach(case["settings"])
    train(model, optimizer, ckpt, case["end"])
"""


def _wait(for_it: threading.Event) -> None:
    assert for_it.wait(60)


def run(tmp_path: Path, cases: list[dict[str, Any]], **more: str) -> list[tuple[int, str]]:
    """Exit codes, and what was written to stderr, of one process for each case, in which a save is under way."""
    fixed = {"every": 1, "metrics": {"enabled": False}, "trace": {"enabled": False}}
    for number, case in enumerate(cases):
        case.setdefault("end", "")
        case["settings"] = {**fixed, "store": str(tmp_path / str(number)), **case["settings"]}
    command = [sys.executable, "-c", SCRIPT, json.dumps(cases), str(tmp_path)]
    where = {**environment(), **more}
    done = subprocess.run(command, check=True, env=where, timeout=600, stdout=subprocess.PIPE, text=True)
    codes = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(codes) == len(cases)
    return [(code, (tmp_path / f"{number}.err").read_text()) for number, code in enumerate(codes)]


@pytest.mark.slow
@pytest.mark.core
def test_the_save_under_way_is_finished_when_the_script_ends(tmp_path: Path) -> None:
    """Whether or not the script still holds the checkpointer then."""
    encodings: list[dict[str, Any]] = [{}, {"encoding": "compact"}, {"packing": 3}]
    cases = [
        {"local": local, "settings": {"staging": staging, **encoding}}
        for local in (True, False)
        for staging in ("eager", "lazy")
        for encoding in encodings
    ]
    waves = {"staging": {"mode": "lazy", "max_bytes": 2.0e7}, "encoding": "compact", "width": 800}
    cases += [{"local": True, "settings": {"journal": {"enabled": True}}}, {"local": True, "settings": waves}]
    for number, (code, text) in enumerate(run(tmp_path, cases)):
        assert (code, "Traceback" in text, "terminate" in text) == (0, False, False), (cases[number], code, text)
        told = r"its step 2 is not committed to .*; the newest commit is that of step (\d)"
        (newest,) = re.findall(told, text) or ["2"]
        assert int(newest) in committed_steps(tmp_path / str(number)), (cases[number], text)
        assert verify(open_catalog(LocalFiles(tmp_path / str(number)))).ok


@pytest.mark.slow
def test_a_save_that_takes_too_long_is_given_up_when_the_script_ends(tmp_path: Path) -> None:
    slow = {"timeouts": {"close": 0.02}, "width": 600}
    given: list[dict[str, Any]] = [{"encoding": "compact"}, {"packing": 6, "staging": "eager"}, {"staging": "lazy"}]
    ends = {"": 0, "ckpt.close(save=False)": 0, "sys.exit(3)": 3, "raise ValueError": 1}
    cases: list[dict[str, Any]] = [
        {"local": number % 2 == 0, "settings": {**slow, **one}, "end": end}
        for number, one in enumerate(given)
        for end in ends
    ]
    for number, (code, text) in enumerate(run(tmp_path, cases)):
        case, store = cases[number], tmp_path / str(number)
        assert (code, "terminate" in text) == (ends[case["end"]], False), (case, code, text)
        assert ("Traceback" in text) is ("ValueError" in case["end"]), (case, text)
        assert "is given up; there is no commit yet" in text or committed_steps(store), (case, text)
        assert verify(open_catalog(LocalFiles(store))).ok


@pytest.mark.slow
def test_a_save_to_a_bucket_ends_as_one_to_a_directory(tmp_path: Path) -> None:
    """With its self-check, which reads many ranges at once as long as a pool of threads can be had."""
    places = [f"s3://{BUCKET}/{number}" for number in range(4)]
    cases: list[dict[str, Any]] = [
        {"local": number % 2 == 0, "settings": {"store": place, "timeouts": {"close": 60 if number < 2 else 0.05}}}
        for number, place in enumerate(places)
    ]
    with Server() as server:
        found = run(tmp_path, cases, **server.environment)
        stored = [[name for name in server.objects(str(number)) if "manifests/" in name] for number in range(4)]
    assert [(code, "Traceback" in text, "terminate" in text) for code, text in found] == [(0, False, False)] * 4, found
    assert all(stored[:2])


LOGGING = """
import logging, time
from monitor.background import BackgroundWorker

class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(1.0)

log = logging.getLogger("slow")
log.addHandler(Slow())
for worker in [BackgroundWorker("one"), BackgroundWorker("other")]:
    worker.submit(lambda: log.warning("a line"))
    time.sleep(0.2)
"""


def test_a_thread_that_waits_to_log_does_not_hold_up_the_end_of_the_script() -> None:
    """Ended where it takes the lock of the handler, it would hold it for ever, and the interpreter asks for it last."""
    done = subprocess.run([sys.executable, "-c", LOGGING], env=environment(), timeout=120, check=False)
    assert done.returncode == 0


WAITING = """
import atexit, logging, threading, time

def tell():
    print(ran, [thread.name for thread in threading.enumerate() if thread.name in names], time.monotonic() < end + 1.5)

atexit.register(tell)  # called last
from monitor.background import BackgroundWorker

class Slow(logging.Handler):
    def handle(self, record):
        logging.time.sleep(0.01)

def endless(name):
    ran.append(name)
    while True:
        if name == "logs":
            log.warning("a line")

log, ran, names = logging.getLogger("slow"), [], ["idle", "runs", "logs"]
log.addHandler(Slow())
workers = [BackgroundWorker(name) for name in names]
for worker, name in zip(workers[1:], names[1:]):
    worker.submit(lambda name=name: endless(name))
    worker.submit(lambda: ran.append("what waits"))
    time.sleep(0.2)
end = time.monotonic()
"""


def test_what_waits_is_dropped_when_the_script_ends_and_no_thread_is_left() -> None:
    """An idle thread, one that runs, and one that mostly is where it may take a lock."""
    command = [sys.executable, "-c", WAITING]
    done = subprocess.run(command, env=environment(), timeout=120, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "['runs', 'logs'] [] True\n"


def test_a_checkpointer_that_is_dropped_lives_while_its_save_is_under_way(tmp_path: Path) -> None:
    """And then goes with the model: a process may train many, one after the other, and close none."""
    storage = threading.Event()
    model = Model(200)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"store": str(tmp_path / "s"), "every": 1, "metrics": {"enabled": False}, "preemption": {"signals": []}}
    ckpt = monitor.attach((model, optimizer), settings)
    ckpt.resume()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    assert isinstance(ckpt._saver, Saver)
    ckpt._saver.upkeep(partial(_wait, storage), "waiting for storage")
    ckpt.step()
    held, worker = [weakref.ref(ckpt), weakref.ref(model)], ckpt._saver._writer
    del model, optimizer, ckpt
    gc.collect()
    assert None not in [one() for one in held]
    storage.set()
    assert worker.join(60)
    until = time.monotonic() + 60  # other background work of the save
    while any(one() is not None for one in held) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    assert [one() for one in held] == [None, None]
    assert committed_steps(tmp_path / "s") == [1]
