"""Bring back the powers of beta of DeepSpeed's Adam on the CPU: a C++ object keeps them, and no state dict has them.

A step multiplies the powers of the step before, as floats. With other betas, or after a gap, it computes them anew."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from monitor.adapters.identity import Hook


class BetaPowers:
    """Notes the step at which an optimizer computed its powers last, its last one and the betas of that.

    A schedule may have moved betas since. FusedAdams of one process share an object: of two, only one is exact."""

    def __init__(self, optimizer: Any) -> None:
        # It may have loaded its state, or trained: which of both is not known, so it computes at the next step.
        last = _last_step(optimizer)
        self.restore(optimizer, [last + 1, last, *_betas_of(optimizer.param_groups[-1])])
        optimizer.register_step_pre_hook(Hook([], self._note))

    def state(self, optimizer: Any) -> list[float]:
        """Return what :meth:`restore` takes."""
        last = _last_step(optimizer)
        if last - self._step not in (-1, 0):  # loaded since the last step
            return [last + 1, last, *_betas_of(optimizer.param_groups[-1])]
        return [self._computed, self._step, *self._betas]

    def restore(self, optimizer: Any, saved: object) -> None:
        """Repeat the products after the optimizer's state was loaded. saved: None if the save does not have them."""
        if not isinstance(saved, list):  # groups with betas of their own take turns
            last, groups = _last_step(optimizer), [_betas_of(group) for group in optimizer.param_groups]
            saved = [1 if groups[1:] == groups[:-1] else last, last, *groups[-1]]
        computed, step, *betas = saved
        self._betas: list[float] = betas
        self._step, self._computed = int(step), int(min(computed, step + 1))
        for number in (self._step + 2, *range(self._computed, self._step + 1)):  # after a gap, so that it computes
            _count(optimizer, number, self._betas)

    def _note(self, optimizer: Any, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                step = int(optimizer.state.get(parameter, {}).get("step", 0)) + 1
                if (betas := _betas_of(group)) != self._betas or step - self._step not in (0, 1):
                    self._computed = step
                self._step, self._betas = step, betas


def powers_of(optimizer: Any) -> BetaPowers | None:
    """Return the powers of an optimizer; None if it has none."""
    if optimizer not in _known and (_is_fused(optimizer) or hasattr(optimizer, "ds_opt_adam")):
        _known[optimizer] = BetaPowers(optimizer)
    return _known.get(optimizer)


_known = WeakKeyDictionary[Any, BetaPowers]()


def _is_fused(optimizer: Any) -> bool:
    return getattr(getattr(optimizer, "_dummy_overflow_buf", None), "is_cpu", False)


def _last_step(optimizer: Any) -> int:
    return max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)


def _count(optimizer: Any, step: int, betas: Sequence[float]) -> None:
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    if _is_fused(optimizer):
        call = (0, optimizer._dummy_overflow_buf, [[nothing]] * 4, 0.0, *betas, 1e-8, step)
        optimizer.multi_tensor_adam(*call, optimizer.adam_w_mode, 1, 0.0)
    else:
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, *betas, 1e-8, 0.0, True, *[nothing] * 4)


def _betas_of(group: Mapping[str, Any]) -> list[float]:
    return [float(np.float32(beta)) for beta in group["betas"]]
