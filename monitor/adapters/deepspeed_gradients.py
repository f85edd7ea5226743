"""Tell whether DeepSpeed takes a step with the gradient that a parameter had in an earlier one.

ZeRO-3, and an offloaded optimizer, keep the gradient of a parameter that a step does not use, and apply it again. It is
part of the state, and DeepSpeed does not take it back: in a new process it is zero."""

import logging
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from monitor.adapters.base import Piece, uncompiled
from store.names import BUFFER, FROZEN, WEIGHTS
from store.text import listed

_log = logging.getLogger("driftpoint")


class ReusedGradients:
    """Looks for parameters that a step of the optimizer leaves out although an earlier one did not.

    held: returns the pieces of this rank, whose moments tell whether a parameter ever had a gradient."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, held: Callable[[], list[Piece]]
    ) -> None:
        self._parameters = {fqn: one for fqn, one in parameters.items() if one.requires_grad}
        self._held, self._used, self._unused = held, set[torch.Tensor](), frozenset[str]()
        self.found: tuple[str, ...] = ()  # why nothing is exact; empty if no gradient was applied again
        for parameter in self._parameters.values():
            parameter.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]
        optimizer.register_step_pre_hook(uncompiled(lambda *_: self._compare()))

    def _compare(self) -> None:
        """Called before each step, of ZeRO-3 for each sub-group: gradients are accumulated before the first one."""
        if not self._used:
            return
        unused = frozenset(self._find_unused()) if len(self._used) < len(self._parameters) else frozenset()
        self._used.clear()
        if unused != self._unused and not self.found and (names := self._trained(unused)):
            why = f"DeepSpeed takes steps with the gradient of the last use of {listed(names)}, which no save holds"
            self.found = (why,)
            _log.error("%s: no commit is exact from now on, nor was a resume before; see docs/loops.md", why)
        self._unused = unused

    def _find_unused(self) -> Iterator[str]:
        leaves = {_leaf_of(one) for one in self._used} - {None}  # DeepSpeed sets all gradients of one that is used
        for fqn, one in self._parameters.items():
            if one.requires_grad and one not in self._used and _leaf_of(one) not in leaves:
                yield fqn

    def _trained(self, fqns: frozenset[str]) -> list[str]:
        """Return those that ever had a gradient: any moment of theirs is not zero."""
        moments = (one for one in self._held() if one.fragment.slot not in (WEIGHTS, FROZEN, BUFFER))
        return sorted({one.fragment.fqn for one in moments if one.fragment.fqn in fqns and bool(one.tensor.any())})


def _leaf_of(parameter: torch.Tensor) -> nn.Module | None:
    """Return the module of ``set_z3_leaf_modules`` (mixtures of experts) that a parameter is in."""
    return getattr(parameter, "ds_z3_leaf_module", None)
