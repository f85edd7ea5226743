"""Tensors of a device without values, where there is no GPU, and a count of what is asked of the device.

Torch's own ``meta`` device runs every operator without data. Copies to the host, which it refuses, are zeros here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
_VIEWS = {"view", "slice", "detach", "split", "split_with_sizes", "unsqueeze", "select", "as_strided", "alias", "t"}


class DeviceCalls(TorchDispatchMode):
    """Counts operators that launch work on the device (``launched``), and how often the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        on_device = any(one.device == DEVICE for one in tree_leaves(args) if isinstance(one, torch.Tensor))
        if name == "_local_scalar_dense":
            self.waits += 1
            return 0 if on_device else func(*args, **kwargs)
        if name in ("_to_copy", "to") and on_device and kwargs.get("device", DEVICE) != DEVICE:
            self.waits += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype", args[0].dtype))
        if name == "copy_" and args[0].device != DEVICE and args[1].device == DEVICE:
            self.launched[name] += 1
            self.waits += not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            return args[0]
        if name not in _VIEWS:
            self.launched[name] += on_device
        return func(*args, **kwargs)
