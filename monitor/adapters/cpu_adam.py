"""Bring back the powers of beta of DeepSpeed's Adam on the CPU: a C++ object keeps them, and no state dict has them.

A step multiplies the powers of the step before, as floats. With other betas, or after a gap, it computes them anew."""

from typing import Any

import numpy as np
import torch

from monitor.adapters.identity import Hook


class BetaPowers:
    """Notes at which step of an optimizer its powers were computed last."""

    def __init__(self, optimizer: Any, hooks: list[Hook]) -> None:
        self._optimizer = optimizer
        self._fused = getattr(getattr(optimizer, "_dummy_overflow_buf", None), "is_cpu", False)  # FusedAdam
        self.computed: int | None = None  # the step; None of other optimizers
        self._betas: tuple[np.float32, np.float32] | None = None  # of the last call, if one was seen
        self._step = 0  # of it
        if self._fused or hasattr(optimizer, "ds_opt_adam"):
            self.computed = 1
            optimizer.register_step_pre_hook(Hook(hooks, self._note))

    def restore(self, computed: int | None) -> None:
        """Repeat the products after the optimizer's state was loaded. computed: None if the save does not have it."""
        steps = [int(state.get("step", 0)) for state in self._optimizer.state.values()]
        last, betas = max(steps, default=0), [tuple(group["betas"]) for group in self._groups()]
        if not last or not betas:
            return
        if computed is None:  # if groups have betas of their own, they take turns
            computed = 1 if len(set(betas)) == 1 else last
        self.computed, self._step, self._betas = computed, last, _rounded(betas[-1])
        for step in (last + 2, *range(computed, last + 1)):  # after a gap, so that it computes
            self._count(step, betas[-1])

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.computed is None else self._optimizer.param_groups

    def _note(self, *_: object) -> None:
        for group in self._groups():
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                step = int(self._optimizer.state.get(parameter, {}).get("step", 0)) + 1
                betas = _rounded(group["betas"])
                if self._betas is not None and (betas != self._betas or step - self._step not in (0, 1)):
                    self.computed = step
                self._step, self._betas = step, betas

    def _count(self, step: int, betas: tuple[float, float]) -> None:
        """Let an empty step count."""
        optimizer, nothing = self._optimizer, torch.empty(0, device="cpu")
        if self._fused:
            call = (0, optimizer._dummy_overflow_buf, [[nothing]] * 4, 0.0, *betas, 1e-8, step)
            optimizer.multi_tensor_adam(*call, optimizer.adam_w_mode, 1, 0.0)
        else:
            optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, *betas, 1e-8, 0.0, True, *[nothing] * 4)


def _rounded(betas: tuple[float, float]) -> tuple[np.float32, np.float32]:
    return np.float32(betas[0]), np.float32(betas[1])
