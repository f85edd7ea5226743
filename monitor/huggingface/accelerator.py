"""What an ``accelerate.Accelerator`` has prepared, as targets and states of :func:`monitor.attach`.

accelerate is not imported: whoever has an Accelerator has done that. Its own ``save_state`` and ``load_state`` stay
what they are: hooks see what it writes, and cannot keep it from writing optimizers, or DeepSpeed's checkpoint.
Training thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from store.errors import UnsupportedError


class Updates:
    """Counts the optimizer's steps: micro-batches of an accumulation are none. One that the gradient scaler skips is
    one, for its data is gone.

    optimizer: as the Accelerator has prepared it."""

    counts_steps = True

    def __init__(self, optimizer: Any) -> None:
        self._taken = 0
        self._optimizer = optimizer
        self._step = optimizer.step
        optimizer.step = self._count

    def __call__(self) -> int:
        """How many there were."""
        return self._taken

    def state_dict(self) -> dict[str, int]:
        """The count."""
        return {"updates": self._taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count on from there."""
        self._taken = int(state["updates"])

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        result = self._step(*args, **kwargs)
        self._taken += self._optimizer.gradient_state.sync_gradients
        return result


@dataclass(frozen=True)
class Prepared:
    """target, state: as for attach. steps: taken so far, None where the engine counts them."""

    target: Any
    state: tuple[Any, ...]
    steps: Updates | None


def is_accelerator(target: Any) -> bool:
    """Whether this is an ``accelerate.Accelerator``."""
    return any(
        base.__name__ == "Accelerator" and base.__module__.partition(".")[0] == "accelerate"
        for base in type(target).__mro__
    )


def prepared(accelerator: Any) -> Prepared:
    """The one model and optimizer that were prepared; schedulers, the scaler, loaders that know their place, and what
    was registered for checkpointing. UnsupportedError where there is not one of each."""
    model = _only(accelerator._models, "model")
    optimizer = _only(accelerator._optimizers, "optimizer")
    inner = getattr(optimizer, "optimizer", optimizer)
    engine = accelerator.distributed_type.value == "DEEPSPEED"
    steps = None if engine else Updates(optimizer)
    kept = [
        *accelerator._schedulers,
        *([] if accelerator.scaler is None else [accelerator.scaler]),
        *[loader for loader in accelerator._dataloaders if getattr(loader, "use_stateful_dataloader", False)],
        *accelerator._custom_objects,
    ]
    return Prepared(model if engine else (model, inner), (*kept, *([] if steps is None else [steps])), steps)


def _only(found: list[Any], what: str) -> Any:
    if len(found) != 1:
        raise UnsupportedError(
            f"the Accelerator has prepared {len(found)} {what}s, and a store holds one: call accelerator.prepare() "
            "before monitor.attach, or attach (model, optimizer) pairs to stores of their own"
        )
    return found[0]
