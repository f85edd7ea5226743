"""Store the tensors of a run state as leaves of its tree, bit for bit, and return them."""

from typing import Any

import numpy as np
import torch
from torch import nn

from monitor.adapters.module_tensors import dtype_name, memory_order, torch_dtype
from store.state_tree import Leaf


def tensor_leaf(value: Any) -> Leaf | None:
    """Return a tensor, shape or dtype as a leaf; None for any other value, and for tensors of other classes."""
    if type(value) is torch.Size:
        return Leaf("I64", (len(value),), np.array(value, dtype="<i8").tobytes(), "size")
    if type(value) is torch.dtype:
        name = dtype_name(value).encode()
        return Leaf("U8", (len(name),), name, "dtype")
    # Other subclasses (DTensor, quantized tensors) would come back as plain tensors.
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided:
        return None
    like = " ".join(["parameter"] * (type(value) is nn.Parameter) + ["grad"] * value.requires_grad)
    order = () if value.is_contiguous() else memory_order(value) or ()
    return Leaf(dtype_name(value.dtype), tuple(value.shape), bits_of(value).tobytes(), like=like, order=order)


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor's values on the host; a lazily conjugated or negated one is resolved."""
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return host.as_strided((host.numel(),), (1,)).view(torch.uint8).numpy()  # one element may have any stride


def leaf_tensor(leaf: Leaf) -> torch.Tensor | torch.Size | torch.dtype:
    """Return what :func:`tensor_leaf` stored, with tensors in host memory."""
    if leaf.kind == "dtype":
        return torch_dtype(bytes(leaf.data).decode())
    dtype, data = torch_dtype(leaf.dtype), bytearray(leaf.data)
    tensor = torch.frombuffer(data, dtype=dtype).reshape(leaf.shape) if data else torch.empty(leaf.shape, dtype=dtype)
    if leaf.kind == "size":
        return torch.Size(tensor.tolist())
    if leaf.order:
        tensor = tensor.permute(leaf.order).contiguous().permute([leaf.order.index(i) for i in range(tensor.ndim)])
    grad = "grad" in leaf.like
    return nn.Parameter(tensor, grad) if "parameter" in leaf.like else tensor.requires_grad_(grad)
