"""Fingerprints of a whole training state, to the last bit: to see that something which was refused changed nothing.

Also what is absent counts: an optimizer's state that did not exist before must not exist after.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash


def fingerprint(value: Any) -> Any:
    """Plain data of the same structure, tensors and arrays as dtype, shape and hash of their bytes."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return f"{data.dtype} {tuple(data.shape)} {xxhash.xxh3_128_hexdigest(raw)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {xxhash.xxh3_128_hexdigest(value.tobytes())}"
    if isinstance(value, Mapping):
        return {str(key): fingerprint(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(fingerprint(item) for item in value)]
    return repr(value)


def of_generators() -> dict[str, Any]:
    """Of torch, numpy and python."""
    found = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    return {name: fingerprint(state) for name, state in found.items()}


def of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its param groups, and the state of every tensor that has one, in the order in which they appeared."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    members = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    return {"groups": fingerprint(groups), "members": members, "state": fingerprint(list(optimizer.state.values()))}


def of_job(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *objects: Any) -> dict[str, Any]:
    """Of a plain job: its tensors, gradients, optimizer, the objects' own attributes, and the generators."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "model": fingerprint(model.state_dict()),
        "gradients": fingerprint(gradients),
        "optimizer": of_optimizer(optimizer),
        "objects": [fingerprint(vars(item)) for item in objects],
        "generators": of_generators(),
    }


def differing(one: Any, other: Any, where: str = "") -> list[str]:
    """The places where two fingerprints differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return [found for key in keys for found in differing(one.get(key), other.get(key), f"{where}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, (a, b) in pairs for found in differing(a, b, f"{where}/{index}")]
    return [] if one == other else [f"{where}: {one} -> {other}"]
