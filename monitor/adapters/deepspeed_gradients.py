"""Tell whether DeepSpeed takes a step with the gradient that a parameter had in an earlier one.

ZeRO-3, and an offloaded optimizer, keep the gradient of a parameter that a step does not use, and apply it again. With
gradient accumulation they add to it the gradients of parameters that the first micro-batch does not use. That gradient
is part of the state, and DeepSpeed does not take it back: in a new process it is zero."""

import logging
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from store.text import listed

_log = logging.getLogger("driftpoint")


class ReusedGradients:
    """Looks for parameters that a step leaves out although an earlier one used them. Training thread.

    parameters: of the optimizer. micro_batches: those whose gradients replace earlier ones, ``first`` or ``any``.
    frozen: whether the gradient of a parameter that was frozen since is applied again, too."""

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter], micro_batches: str, frozen: bool) -> None:
        self._engine, self._any, self._frozen = engine, micro_batches == "any", frozen
        self._names: dict[torch.Tensor, str] = {one: fqn for fqn, one in parameters.items()}
        self._used, self._fresh = set[torch.Tensor](), set[torch.Tensor]()  # in this step; in these micro-batches of it
        self._used_before = set[torch.Tensor]()  # in an earlier step of this process
        self._used_when_saved = frozenset[str]()  # in the process whose state was resumed
        self._step, self._found = -1, tuple[str, ...]()
        for parameter in self._names:
            trained = parameter.requires_grad
            parameter.requires_grad_().register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)

    def found(self) -> tuple[str, ...]:
        """Return why nothing is exact that is saved now; empty if no gradient was applied again."""
        if self._step != self._engine.global_steps:
            self._end_step()
        return self._found

    def unused(self) -> list[str] | None:
        """Return the parameters that no step of this process used: their gradient is zero. None if none is kept."""
        used = self._used_before | self._used
        return [fqn for one, fqn in self._names.items() if one not in used] if self._names else None

    def resumed(self, unused: Iterable[str] | None) -> None:
        """Take what :meth:`unused` gave for the run state that was resumed; None if it has none."""
        self._step, self._used_before = -1, self._used_before | self._used
        self._used.clear()
        self._used_when_saved = frozenset() if unused is None else frozenset(self._names.values()) - frozenset(unused)

    def _note(self, parameter: torch.Tensor) -> None:
        if self._step != self._engine.global_steps:
            self._end_step()
            self._step = self._engine.global_steps
        self._used.add(parameter)
        if self._any or self._engine.optimizer.micro_step_id <= 0:
            self._fresh.add(parameter)

    def _end_step(self) -> None:
        """Compare a step with those before, whether or not the loss scaler skipped it."""
        if self._used and len(self._fresh) < len(self._names):
            self._look_at(self._names.keys() - self._fresh)
        if self._used_when_saved:
            self._used_when_saved -= {self._names[one] for one in self._used}
        self._used_before |= self._used
        self._used.clear()
        self._fresh.clear()

    def _look_at(self, left_out: Set[torch.Tensor]) -> None:
        if not self._found and (names := self._reused(left_out & self._used_before)):
            why = f"DeepSpeed takes steps with the gradient of the last use of {listed(names)}, which no save holds"
            self._found = (why,)
            self._report(f"{why}: no commit is exact from now on")
        if names := self._reused({one for one in left_out if self._names[one] in self._used_when_saved}):
            why = "the resume was not exact: without it, DeepSpeed would take this step with the gradient of the last"
            self._report(f"{why} use of {listed(names)} before")
            self._used_when_saved = frozenset()

    def _report(self, text: str) -> None:
        if dist.get_rank() == 0:
            _log.error("%s; see docs/loops.md", text)

    def _reused(self, left_out: Set[torch.Tensor]) -> list[str]:
        leaves = {_leaf_of(one) for one in self._fresh if left_out} - {None}  # of a leaf, DeepSpeed sets all or none
        found = (one for one in left_out if _leaf_of(one) not in leaves)
        return sorted(self._names[one] for one in found if self._frozen or one.requires_grad)


def _leaf_of(parameter: torch.Tensor) -> nn.Module | None:
    """Return the module of ``set_z3_leaf_modules`` (mixtures of experts) that a parameter is in."""
    return getattr(parameter, "ds_z3_leaf_module", None)
