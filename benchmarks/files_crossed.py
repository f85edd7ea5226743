"""Count the product files whose functions run in a save, a resume and a merge of a toy model.

    python benchmarks/files_crossed.py --list

Plain PyTorch, one process, policy full. All threads are profiled. A file counts when one of its functions runs; module
and class bodies, and functions that an import calls, do not. Four figures: ``ckpt.step()`` until its save is
committed, ``ckpt.resume()`` in the training thread and with the background tasks that it starts, and ``driftpoint
merge`` of the store. Exits 1 when there are more files than the goal.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import monitor  # noqa: E402
from benchmarks.figures import Figure, report  # noqa: E402
from deploy.cli.app import run as driftpoint  # noqa: E402
from monitor.background import _workers as workers  # noqa: E402

PACKAGES = ("monitor", "policies", "store", "merger", "deploy")
GOALS = {"step() to commit": 52, "resume()": 36, "resume() and its background": 38, "driftpoint merge": 38}


class FileCounter:
    """Records product files in the order in which their functions first run, in every thread started after it."""

    def __init__(self) -> None:
        self.entered: dict[str, str] = {}
        self._paths: dict[str, str | None] = {}
        self._active = self._everywhere = False
        threading.setprofile(self._called)

    @contextmanager
    def counting(self, *, everywhere: bool = True) -> Iterator[dict[str, str]]:
        """Count while the block runs, in all threads or the main one. Yields file -> name of the thread that entered it
        first."""
        self.entered = {}
        self._active, self._everywhere = True, everywhere
        sys.setprofile(self._called)
        try:
            yield self.entered
        finally:
            sys.setprofile(None)
            self._active = False

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not self._active or not code.co_flags & inspect.CO_OPTIMIZED:  # modules, class bodies
            return
        if not (self._everywhere or threading.current_thread() is threading.main_thread()):
            return
        path = self._product_file(code.co_filename)
        if path is not None and path not in self.entered and not _importing(frame):
            self.entered[path] = threading.current_thread().name

    def _product_file(self, name: str) -> str | None:
        if name not in self._paths:
            path = Path(name)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
            self._paths[name] = str(path.relative_to(ROOT)) if inside else None
        return self._paths[name]


def _importing(frame: FrameType) -> bool:
    current: FrameType | None = frame
    while current is not None:
        if current.f_code.co_name == "<module>" and current.f_globals.get("__name__") != "__main__":
            return True
        current = current.f_back
    return False


def toy() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    return model, torch.optim.AdamW(model.parameters())


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()


def measured(directory: Path) -> dict[str, dict[str, str]]:
    """Return, for each figure, the files and the thread that entered each first."""
    counter, counts = FileCounter(), {}
    config = {"store": str(directory / "store"), "policy": "full", "every": 1, "metrics": {"enabled": False}}
    model, optimizer = toy()
    with monitor.attach((model, optimizer), config) as ckpt:
        ckpt.resume()
        train_step(model, optimizer)
        with counter.counting() as counts["step() to commit"]:
            ckpt.step()
            ckpt.flush()
    model, optimizer = toy()
    with monitor.attach((model, optimizer), config) as ckpt:
        with counter.counting(everywhere=False) as counts["resume()"]:
            step = ckpt.resume()
        if step != 1:
            raise RuntimeError(f"resume() returned {step}, not the committed step 1: nothing was measured")
    with monitor.attach(toy(), config) as ckpt:
        settle()
        with counter.counting() as counts["resume() and its background"]:
            ckpt.resume()
            settle()
    merge = ["merge", str(directory / "store"), "--out", str(directory / "merged")]
    with counter.counting() as counts["driftpoint merge"], _quiet():
        status = driftpoint(merge)
    if status:
        raise RuntimeError(f"driftpoint {' '.join(merge)} exited with {status}")
    return counts


def settle() -> None:
    """Wait for what was handed to background threads."""
    for worker in workers():
        worker.join(60)


@contextmanager
def _quiet() -> Iterator[None]:
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files, in the order they are entered")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        counts = measured(Path(directory))
    if options.list:
        for name, files in counts.items():
            print(f"\n{name}: {len(files)} files")
            for file, thread in files.items():
                print(f"  {file:40} {thread}")
        print()
    figures = [Figure(name, len(files), "files", goal=GOALS[name]) for name, files in counts.items()]
    return report("product files crossed", figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
