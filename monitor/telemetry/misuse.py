"""Notice a training loop that calls the checkpointer wrongly, and say so once for each case.

A notice is given only where a correct loop cannot look the same: a gradient scaler skips optimizer steps, frameworks
count micro-batches, ranks are late. Where that cannot be told apart, nothing is said (docs/loops.md). A step costs a
few integers and no collective. Training thread."""

import dis
import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from monitor.adapters.base import Adapter
from monitor.adapters.identity import version_of
from monitor.types import StepReport

_log = logging.getLogger("driftpoint")

PATIENCE = 60.0
"""Seconds that the first decision waits for other ranks before it says so."""

FORGOTTEN = 500
"""Optimizer steps without ``ckpt.step()``; more where a loop takes many between two calls, as in PPO."""

_REPEATS = 5  # optimizer steps in a row with equally many calls each

_Gradient = tuple[torch.Tensor, int]  # the smallest gradient, and how often it was written to

_WITHOUT_POSITION = (torch.Generator, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)


class MisuseNotices:
    """Compares the calls of ``ckpt.step()`` with the optimizer steps of a rank; ``updates`` were taken since the last.

    steps: counts optimizer steps for the framework; None if its adapter counts them, or nothing does."""

    def __init__(self, adapter: Adapter, steps: Callable[[], int] | None, rank: int, world_size: int) -> None:
        self.updates = 0
        self._adapter, self._rank = adapter, rank
        self._counted = steps is not None or adapter.completed_steps() is not None
        self._framework_calls = _framework_calls(adapter, steps)
        self._said: set[str] = set()
        self._called, self._most = False, 0
        self._entered: float | None = None  # when ``ckpt.step()`` began to wait for other ranks
        # One of the ranks 0 and 1 has to wait for the other, or for a third. Set once all have decided.
        self._met = threading.Event() if world_size > 1 and rank <= 1 else None
        self.restart()
        adapter.before_update(self._before_update)

    def restart(self) -> None:
        """Begin anew after a resume."""
        self.updates = self._calls = self._before = self._alike = 0
        self._first = True
        self._suspect: tuple[_Gradient | None] | None = None  # of a first call before any optimizer step
        self._repeated: tuple[_Gradient | None] | None = None  # of an optimizer step after equally many calls as before
        self._calls_before = None if self._framework_calls is None else self._framework_calls()

    def stepped(self) -> None:
        """Record a call of ``ckpt.step()``."""
        if not self.updates:
            self._called_without_update()
        self._first, self._called = False, True
        self._calls += 1
        self._most, self.updates = max(self._most, self.updates), 0

    def watched(self, action: Callable[[], StepReport | None]) -> StepReport | None:
        """Run the collective part of ``ckpt.step()``. Until all ranks have decided once, tell if it waits for long."""
        if self._met is None:
            return action()
        if self._entered is None:
            threading.Thread(target=self._watch, args=(self._met,), name="driftpoint-watch", daemon=True).start()
        self._entered = time.monotonic()
        try:
            report = action()
        finally:
            self._entered = math.inf
        if report is not None and report.skipped != "unreachable":
            self._end_watch()
        return report

    def resumed(self, caller: FrameType | None, objects: Sequence[Any]) -> None:
        """Record a call of ``resume()`` in the frame ``caller``. objects: the user's, which may hold the step."""
        if not self._counted and all(isinstance(one, _WITHOUT_POSITION) for one in objects) and is_discarded(caller):
            self._say(
                "the step that ckpt.resume() returns is not used: a job that resumes would count from 0 again and "
                "train on data that it has had. Begin the loop with `range(ckpt.resume(), total_steps)`"
            )

    def close(self) -> None:
        """End the watch. Tell of a rank that never called ``ckpt.step()`` although it trained."""
        self._end_watch()
        if not self._called and self.updates > 1 and self._rank:
            text = "rank %d took %d optimizer steps without ckpt.step(): call it on every rank"
            _log.warning(text, self._rank, self.updates)

    def _called_without_update(self) -> None:
        """Look at a call before the first optimizer step, or one of several between two of them.

        A gradient scaler may have skipped the step. A loop may count something else, such as steps of an environment:
        then gradients do not change from call to call."""
        if self._first and self._framework_calls is not None and self._framework_calls() == self._calls_before:
            self._say_before()
        elif self._first and self._framework_calls is None and not self._counted:
            self._suspect = (_gradient(self._adapter.module),)
        if self._repeated is not None:
            (stepped,), self._repeated = self._repeated, None
            now = _gradient(self._adapter.module)
            if now is not None and not _is_same(now, stepped) and _local(now[0]).any():
                self._say(
                    f"ckpt.step() is called {self._before} times for each optimizer step: call it once, after "
                    "optimizer.step(). Otherwise it counts micro-batches, and saves between two of them lack the "
                    "gradients accumulated so far"
                )

    def _before_update(self) -> None:
        if self._suspect is not None:
            (called,), self._suspect = self._suspect, None
            same = _is_same(called, _gradient(self._adapter.module))
            # The gradient of the call is stepped with; or there was none, and nothing that skips a step.
            if same or (called is None and self._calls == 1 and not _has_scaler()):
                self._say_before()
        if not self.updates:
            self._alike = self._alike + 1 if self._calls == self._before else 1
            self._before, self._calls = self._calls, 0
            if self._alike == _REPEATS and self._before > 1 and not self._counted:
                self._repeated = (_gradient(self._adapter.module),)
        self.updates += 1
        if self.updates == max(FORGOTTEN, 10 * self._most):
            since = "since the last ckpt.step()" if self._called else "and ckpt.step() was never called"
            self._say(f"{self.updates} optimizer steps {since}: nothing is saved. Call it after every optimizer.step()")

    def _say_before(self) -> None:
        self._say(
            "ckpt.step() is called before the optimizer step: a save then lacks the update that it is counted with, "
            "and a resume loses it. Call it after optimizer.step() or engine.step()"
        )

    def _say(self, text: str) -> None:
        if self._rank == 0 and text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)

    def _end_watch(self) -> None:
        met, self._met = self._met, None
        if met is not None:
            met.set()

    def _watch(self, met: threading.Event) -> None:
        while not met.wait(PATIENCE / 10):
            if self._entered is not None and time.monotonic() - self._entered > PATIENCE:
                text = (
                    "rank %d waits in ckpt.step() for other ranks, for %.0f s by now: all ranks must call it after the "
                )
                text += "same optimizer steps, not rank 0 alone"
                _log.warning(text, self._rank, PATIENCE)
                return


def is_discarded(caller: FrameType | None) -> bool:
    """Return whether the call under way in a frame is a statement, so that nothing gets its result."""
    if caller is None:
        return False
    after = (one.opname for one in dis.get_instructions(caller.f_code) if one.offset > caller.f_lasti)
    return next(after, "") == "POP_TOP"


def _framework_calls(adapter: Adapter, steps: Callable[[], int] | None) -> Callable[[], int] | None:
    """Return what counts the calls of the framework's own step, on micro-batches too; None if nothing does."""
    engine = getattr(adapter, "engine", None)
    if engine is not None:
        return lambda: int(engine.micro_steps)
    return getattr(steps, "calls", None)


def _gradient(module: torch.nn.Module) -> _Gradient | None:
    found = min((one.grad for one in module.parameters() if one.grad is not None), key=torch.numel, default=None)
    return None if found is None else (found, version_of(_local(found)))


def _is_same(one: _Gradient | None, other: _Gradient | None) -> bool:
    return one is not None and other is not None and one[0] is other[0] and one[1] == other[1]


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)  # of a DTensor, which others write to


def _has_scaler() -> bool:
    """Return whether this process has an enabled gradient scaler. Looks at all objects; called once at most."""
    return any(issubclass(type(one), torch.amp.GradScaler) and one.is_enabled() for one in gc.get_objects())
