"""Bring back the powers of beta of DeepSpeed's Adam on the CPU: a C++ object keeps them, and no state dict has them.

A step multiplies the powers of the step before, as floats. With other betas, or after a gap, it computes them anew."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from monitor.adapters.identity import Hook


class BetaPowers:
    """Notes the step at which an optimizer computed its powers last, and with which betas, as long as it lives."""

    def __init__(self, optimizer: Any) -> None:
        groups = [_betas_of(group) for group in optimizer.param_groups]
        self._computed, self._step = 1, _last_step(optimizer)
        # Of the last step; a schedule may have moved them since. DeepSpeed takes one when it is initialized.
        self._betas = groups[-1] if groups[1:] != groups[:-1] else _betas_of(optimizer.defaults)
        if self._step > 1:  # loaded, or trained before anything was noted: which of both is not known
            self.restore(optimizer, [self._step + 1, *groups[-1]])
        optimizer.register_step_pre_hook(Hook([], self._note))

    def state(self) -> list[float]:
        """Return what :meth:`restore` takes."""
        return [self._computed, *self._betas]

    def restore(self, optimizer: Any, saved: Sequence[float] | None) -> None:
        """Repeat the products after the optimizer's state was loaded. saved: None if the save does not have them."""
        groups, last = [_betas_of(group) for group in optimizer.param_groups], _last_step(optimizer)
        # Without a record: groups with betas of their own take turns.
        computed, *self._betas = saved or (1 if groups[1:] == groups[:-1] else last, *groups[-1])
        self._step, self._computed = last, int(computed)
        for step in (last + 2, *range(self._computed, last + 1)):  # after a gap, so that it computes
            _count(optimizer, step, self._betas)

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
    """Whether it is a FusedAdam on the CPU."""
    return getattr(getattr(optimizer, "_dummy_overflow_buf", None), "is_cpu", False)


def _last_step(optimizer: Any) -> int:
    return max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)


def _count(optimizer: Any, step: int, betas: Sequence[float]) -> None:
    """Let the C++ object count an empty step."""
    nothing = torch.empty(0, device="cpu")
    if _is_fused(optimizer):
        call = (0, optimizer._dummy_overflow_buf, [[nothing]] * 4, 0.0, *betas, 1e-8, step)
        optimizer.multi_tensor_adam(*call, optimizer.adam_w_mode, 1, 0.0)
    else:
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, *betas, 1e-8, 0.0, True, *[nothing] * 4)


def _betas_of(group: Mapping[str, Any]) -> list[float]:
    return [float(np.float32(beta)) for beta in group["betas"]]
