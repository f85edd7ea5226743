"""Convert an ``accelerate.Accelerator`` to the target and states of :func:`monitor.attach`.

accelerate is not imported here. Its own ``save_state`` and ``load_state`` are left alone: hooks see what it writes, and
cannot keep it from writing optimizers, or DeepSpeed's checkpoint. Training thread."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from store.errors import UnsupportedError


class StepCounter:
    """Counts the steps of a prepared optimizer, not the micro-batches of an accumulation.

    A step that the gradient scaler skips counts, since its data is consumed."""

    counts_steps = True

    def __init__(self, optimizer: Any) -> None:
        self._steps = self._calls = 0
        self._optimizer = optimizer
        self._step = optimizer.step
        optimizer.step = self._count

    def __call__(self) -> int:
        return self._steps

    def calls(self) -> int:
        """Return the calls of ``optimizer.step()`` in this process, plus 1 during an accumulation, which needs none."""
        return self._calls + (not self._optimizer.gradient_state.sync_gradients)

    def state_dict(self) -> dict[str, int]:
        return {"updates": self._steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._steps = int(state["updates"])

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        result = self._step(*args, **kwargs)
        self._calls += 1
        self._steps += self._optimizer.gradient_state.sync_gradients
        return result


@dataclass(frozen=True)
class PreparedObjects:
    """The objects of an Accelerator that a checkpoint covers."""

    target: Any  # engine or (model, optimizer), as for attach
    state: tuple[Any, ...]  # objects with state, as for attach
    steps: StepCounter | None  # None if the engine counts steps


def is_accelerator(target: Any) -> bool:
    """Return whether ``target`` is an ``accelerate.Accelerator``."""
    return any(
        base.__name__ == "Accelerator" and base.__module__.partition(".")[0] == "accelerate"
        for base in type(target).__mro__
    )


def prepared_objects(accelerator: Any) -> PreparedObjects:
    """Return the prepared model and optimizer, and the objects with state.

    Those are schedulers, the scaler, stateful data loaders and objects registered for checkpointing. Raise
    UnsupportedError unless exactly one model and one optimizer were prepared."""
    model = _only(accelerator._models, "model")
    optimizer = _only(accelerator._optimizers, "optimizer")
    inner = getattr(optimizer, "optimizer", optimizer)
    engine = accelerator.distributed_type.value == "DEEPSPEED"
    steps = None if engine else StepCounter(optimizer)
    state = [
        *accelerator._schedulers,
        *([] if accelerator.scaler is None else [accelerator.scaler]),
        *[loader for loader in accelerator._dataloaders if getattr(loader, "use_stateful_dataloader", False)],
        *accelerator._custom_objects,
        *([] if steps is None else [steps]),
    ]
    return PreparedObjects(model if engine else (model, inner), tuple(state), steps)


def _only(objects: list[Any], kind: str) -> Any:
    if len(objects) != 1:
        raise UnsupportedError(
            f"the Accelerator has prepared {len(objects)} {kind}s: call accelerator.prepare() before monitor.attach; "
            'attach several as it returns them, attach({"generator": (model, optimizer), ...}, state={...})'
        )
    return objects[0]
