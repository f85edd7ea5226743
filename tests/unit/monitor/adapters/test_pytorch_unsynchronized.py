"""What DistributedDataParallel leaves unsynchronized: parameters are refused, buffers are compared between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from monitor.adapters import adapter_for, unwrap
from store.errors import UnsupportedError


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(*ignored: str) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(made, list(ignored))
    return made


def test_parameters_that_are_not_synchronized_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"does not synchronize 0\.weight"):
        unwrap(DistributedDataParallel(model("0.weight")))


@pytest.mark.parametrize(
    ("ignored", "broadcast", "follow"), [((), True, True), ((), False, False), (("1.running_mean",), True, False)]
)
def test_buffers_follow_rank_0_only_if_all_are_broadcast(
    ignored: tuple[str, ...], broadcast: bool, follow: bool
) -> None:
    wrapped = DistributedDataParallel(model(*ignored), broadcast_buffers=broadcast)
    assert (unwrap(wrapped).broadcasting is wrapped) is follow


def pair() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(model())
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)


@pytest.mark.parametrize("every", [1, 2, 10, 16])
def test_each_step_probes_another_parameter_that_is_trained(every: int) -> None:
    """Also where only every so many steps decide."""
    first = {"generator": pair(), "critic": pair()}
    first["critic"][0].module[0].requires_grad_(False)
    adapter = adapter_for(first)
    parameters = [one for wrapped, _ in first.values() for one in wrapped.parameters() if one.requires_grad]
    found = [adapter.probe(every * step, wait=False) for step in range(200)]
    assert {id(one) for one in found} == {id(one) for one in parameters}
    assert adapter.probe(7 * every, wait=False) is found[7]


def test_where_reading_waits_a_parameter_is_probed_only_if_gradients_may_not_be_averaged() -> None:
    """On a device that computes behind the host."""
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    adapter = adapter_for((wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)))

    def probed() -> tuple[bool, bool]:
        with patch.object(torch.Tensor, "device", torch.device("cuda")):
            return adapter.probe(1, wait=True) is not None, adapter.probe(1, wait=False) is not None

    assert probed() == (False, False)
    with wrapped.no_sync():
        wrapped(torch.randn(3, 2)).sum().backward()
    assert probed() == (True, False)  # a rank that evaluates alone would not have what others have
    wrapped(torch.randn(3, 2)).sum().backward()
    assert probed() == (False, False)
    wrapped.register_comm_hook(None, noop_hook)
    assert probed() == (True, True)


def test_each_model_leaves_its_own_broadcast_out() -> None:
    first = {"generator": pair(), "critic": pair()}
    with torch.no_grad():
        first["critic"][0](torch.randn(3, 2))
    adapter = adapter_for(first)
    assert not adapter.buffers_follow_rank0
    second = {"critic": pair(), "generator": pair()}
    other = adapter_for(second)
    assert other.buffers_follow_rank0
    other.load_run_state(adapter.run_state())
    assert {name: one.require_forward_param_sync for name, (one, _) in second.items()} == {
        "critic": False,
        "generator": True,
    }
