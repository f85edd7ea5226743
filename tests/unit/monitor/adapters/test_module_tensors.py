"""Names of dtypes, and tensors that a module may not hold."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from monitor.adapters.module_tensors import ModuleTensors, dtype_name, torch_dtype
from store.errors import UnsupportedError


def test_dtypes_both_ways() -> None:
    for name in ("F32", "BF16", "F16", "F64", "I64", "I32", "I16", "I8", "U8", "BOOL"):
        assert dtype_name(torch_dtype(name)) == name
    with pytest.raises(UnsupportedError, match="complex128"):
        dtype_name(torch.complex128)
    with pytest.raises(UnsupportedError, match="F33"):
        torch_dtype("F33")


def test_sharded_parameters_are_refused_by_name() -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = nn.Linear(4, 4)
        mesh = init_device_mesh("cpu", (1,))
        module.weight = nn.Parameter(DTensor.from_local(torch.zeros(4, 4), mesh, [Shard(0)]))
        with pytest.raises(UnsupportedError, match="weight is a DTensor"):
            ModuleTensors(module)
    finally:
        dist.destroy_process_group()
