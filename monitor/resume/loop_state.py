"""Save values of the training loop itself: an epoch, a best loss, a batch that was fetched ahead."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from store.errors import ConfigError
from store.text import listed

_log = logging.getLogger("driftpoint")


class LoopState:
    """Holds what a training loop keeps between two steps, as attributes, for ``state=``.

    Values are plain data and tensors, also in lists, tuples and dicts. They are saved per rank, as they are at
    ``ckpt.step()``. A resume sets the attributes anew: tensors on the devices of those they replace, else on the host.

    Example::

        loop = monitor.LoopState(epoch=0, batch=next_batch())
        ckpt = monitor.attach((model, optimizer), state={"loop": loop})
        for step in range(ckpt.resume(), total_steps):
            loss, loop.batch = model(loop.batch), next_batch()
            ...
    """

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise ConfigError(f"LoopState cannot hold a value named {name!r}, which is a method of it: rename it")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"LoopState has no value {name!r}; it has {listed(sorted(vars(self))) or 'none'}")

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the values that were saved. Others keep theirs, and a warning names them."""
        left = sorted(vars(self).keys() - state.keys())
        if left:
            _log.warning("LoopState: the saved run had no value of %s, so the present one stays", listed(left))
        for name, value in state.items():
            setattr(self, name, _placed(value, vars(self).get(name)))


def _placed(value: Any, like: Any) -> Any:
    """Return ``value`` with its tensors on the devices of those in the same place of ``like``."""
    if isinstance(value, torch.Tensor):
        return value.to(like.device) if isinstance(like, torch.Tensor) else value
    if isinstance(value, dict):
        known = like if isinstance(like, dict) else {}
        value.update({key: _placed(one, known.get(key)) for key, one in value.items()})
    elif type(value) in (list, tuple) and isinstance(like, list | tuple) and len(like) == len(value):
        return type(value)(map(_placed, value, like))
    return value
