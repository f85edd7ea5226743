"""What every adapter must do, in one process: plain PyTorch, and FSDP2 over a world of one.

Several ranks, and DeepSpeed, go through the same steps in ``tests/distributed/test_adapter_state.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from monitor.adapters import adapter_for
from monitor.adapters.base import Adapter, FragmentPlace
from monitor.adapters.dtensor import sharded_tensors
from monitor.adapters.module_tensors import dtype_name
from monitor.run_state import UserState, begin_tree, capture_run_state, from_tree, to_tree
from monitor.save.self_check import outline
from store.errors import UnsupportedError
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment

Slots = dict[str, dict[str, str]]
State = tuple[dict[Fragment, torch.Tensor], dict[str, Any]]
Job = tuple[nn.Module, torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.down = nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)).tanh())


class Net(nn.Module):
    """Tied and frozen weights, a parameter of one element, buffers that move."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].down.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) * self.gain).square().mean()


def plain(seed: int) -> Job:
    torch.manual_seed(seed)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def fsdp2(seed: int) -> Job:
    torch.manual_seed(seed)
    net = Net()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


JOBS: dict[str, Callable[[int], Job]] = {"plain": plain, "fsdp2": fsdp2}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one, which fully_shard needs."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "group"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=JOBS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Job]:
    return JOBS[request.param]


def train(job: Job, steps: range) -> list[float]:
    net, optimizer = job
    losses = []
    for step in steps:
        loss = net(torch.randn(4, 6, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def taken(adapter: Adapter) -> State:
    return {piece.fragment: piece.tensor.clone() for piece in adapter.owned()}, adapter.run_state()


def weights(adapter: Adapter) -> dict[Fragment, torch.Tensor]:
    """Forwards move buffers; these only the optimizer does."""
    return {fragment: tensor for fragment, tensor in taken(adapter)[0].items() if fragment.slot == WEIGHTS}


def slots_in(state: State) -> Slots:
    slots: Slots = {}
    for fragment, tensor in state[0].items():
        slots.setdefault(fragment.fqn, {})[fragment.slot] = dtype_name(tensor.dtype)
    return slots


def put(adapter: Adapter, state: State) -> None:
    """Load in the order that the protocol says."""
    slots = slots_in(state)
    foretold = set(adapter.expected(slots))
    adapter.check_run_state(state[1])
    adapter.prepare_load(slots)
    held = adapter.held()
    assert {FragmentPlace(piece.fragment, piece.tensor.dtype) for piece in held} == foretold
    with torch.no_grad():
        for piece in held:
            piece.tensor.copy_(state[0][piece.fragment])
    adapter.load_run_state(state[1])
    adapter.finish_load()


def same(one: Mapping[Fragment, torch.Tensor], other: Mapping[Fragment, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_every_element_of_every_slot_is_owned_once(make: Callable[[int], Job]) -> None:
    job = make(0)
    train(job, range(2))
    adapter, counts = adapter_for(job), dict[tuple[str, str], torch.Tensor]()
    for fqn, info in adapter.tensors().items():
        slots = {"trainable": (WEIGHTS, "exp_avg", "exp_avg_sq"), "frozen": (FROZEN,), "buffer": (BUFFER,)}[info.kind]
        counts |= {(fqn, slot): torch.zeros(torch.Size(info.shape).numel()) for slot in slots}
    for piece in adapter.owned():
        fragment = piece.fragment
        assert (piece.tensor.ndim, piece.tensor.numel()) == (1, fragment.numel)
        counts[fragment.fqn, fragment.slot][fragment.start : fragment.stop] += 1
    assert all(bool((count == 1).all()) for count in counts.values())


def test_names_shapes_ties_and_kinds(make: Callable[[int], Job]) -> None:
    infos, expected = adapter_for(make(0)).tensors(), Net()
    shapes = {name: tuple(tensor.shape) for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]}
    assert {fqn: info.shape for fqn, info in infos.items()} == shapes
    assert infos["embed.weight"].aliases == ("head.weight",)
    assert infos["blocks.1.down.weight"].kind == "frozen"
    assert infos["blocks.0.norm.num_batches_tracked"].kind == "buffer"


def test_pieces_are_the_live_memory(make: Callable[[int], Job]) -> None:
    job = make(0)
    adapter = adapter_for(job)
    with torch.no_grad():
        for piece in adapter.held():
            if piece.fragment.slot == WEIGHTS:
                piece.tensor.fill_(0.0)
    assert job[0](torch.ones(4, 6)).item() == 0.0


def test_a_resume_is_bitwise(make: Callable[[int], Job]) -> None:
    job = make(0)
    train(job, range(3))
    state = taken(adapter_for(job))
    losses, end = train(job, range(3, 7)), taken(adapter_for(job))
    fresh = make(1)
    train(fresh, range(1))
    assert not same(taken(adapter_for(fresh))[0], state[0])
    put(adapter_for(fresh), state)
    assert same(taken(adapter_for(fresh))[0], state[0])
    assert train(fresh, range(3, 7)) == losses
    assert same(taken(adapter_for(fresh))[0], end[0])


def test_what_is_encoded_later_is_the_state_of_the_capture(make: Callable[[int], Job]) -> None:
    """Training continues before the rest of the run state is encoded; the result is the state at the capture."""
    job = make(0)
    train(job, range(2))
    state = capture_run_state(adapter_for(job), UserState([]), rank=0)
    expected, leaves = to_tree(state.whole())
    finish = begin_tree(state)
    job[1].param_groups[0]["lr"] *= 0.5
    train(job, range(2, 4))
    for one in job[1].state.values():
        one["step"] += 7
    tree, found = finish()
    assert outline(from_tree(tree, found), "") == outline(from_tree(expected, leaves), "")
    now = capture_run_state(adapter_for(job), UserState([]), rank=0).whole()
    assert outline(now["framework"], "") != outline(state.whole()["framework"], "")


def test_back_to_before_the_first_step(make: Callable[[int], Job]) -> None:
    job = make(0)
    untrained = taken(adapter_for(job))
    losses = train(job, range(2))
    put(adapter_for(job), untrained)
    assert not job[1].state or all(not state for state in job[1].state.values())
    assert train(job, range(2)) == losses


def test_foretelling_a_load_changes_nothing(make: Callable[[int], Job]) -> None:
    trained = make(0)
    train(trained, range(1))
    state = taken(adapter_for(trained))
    fresh = make(1)
    before = taken(adapter_for(fresh))
    adapter_for(fresh).expected(slots_in(state))
    adapter_for(fresh).check_run_state(state[1])
    assert same(taken(adapter_for(fresh))[0], before[0])
    assert not fresh[1].state


@pytest.mark.parametrize("source", JOBS)
@pytest.mark.parametrize("target", JOBS)
def test_state_of_one_fits_any_other(source: str, target: str) -> None:
    job = JOBS[source](0)
    train(job, range(3))
    state = taken(adapter_for(job))
    losses = train(job, range(3, 6))
    other = JOBS[target](1)
    put(adapter_for(other), state)
    assert same(taken(adapter_for(other))[0], state[0])
    assert train(other, range(3, 6)) == losses


def test_a_module_put_in_later_is_seen_sharded_too() -> None:
    """What is gathered is rounded to the dtype of computing."""
    net = fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    inventory = sharded_tensors(net)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    net[1] = fully_shard(nn.Linear(6, 6), mp_policy=policy, reshard_after_forward=False)
    with torch.no_grad():
        net(torch.ones(4, 6))
    assert net[1].weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in inventory.parameters().values()} == {torch.float32}


def test_a_second_sharded_optimizer_is_no_plain_state() -> None:
    """Which rank has which part of it nobody would know: told by name, not by what numpy cannot do."""
    net, _ = fsdp2(0)
    second = torch.optim.AdamW(net.blocks[0].parameters(), lr=0.01)
    train((net, second), range(1))
    with pytest.raises(UnsupportedError, match=r"state\['user'\]\[0\]\['state'\]\[0\]\['exp_avg'\]"):
        to_tree({"user": UserState([second]).capture()})


def test_the_hook_comes_before_the_state_changes(make: Callable[[int], Job]) -> None:
    job = make(0)
    adapter = adapter_for(job)
    before, seen = weights(adapter), list[bool]()
    adapter.before_update(lambda: seen.append(same(weights(adapter), before)))
    train(job, range(1))
    assert seen == [True]
    assert not same(weights(adapter), before)


def test_a_step_leaves_a_trail_and_a_look_does_not(make: Callable[[int], Job]) -> None:
    job = make(0)
    train(job, range(1))
    adapter = adapter_for(job)
    before = adapter.state_versions()
    taken(adapter)
    assert adapter.state_versions() == before
    train(job, range(1, 2))
    assert adapter.state_versions() != before
