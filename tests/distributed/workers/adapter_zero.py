"""Under torchrun: every ZeRO stage and variant through its adapter. Prints one RESULT line a check.

Usage: adapter_zero.py DIRECTORY — ``state.pt`` is left there for another world size.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from adapter_files import file_problems
from adapter_model import Tiny, batches, engine
from adapter_state import Saved, differences, engine_steps, leave, put, report, round_trip, take, unequal
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from monitor.adapters import adapter_for
from monitor.adapters.base import Adapter
from store.errors import ModelMismatchError, UnstorableError, UnsupportedError

CPU = {"device": "cpu"}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero0-fp32": (0, "fp32", {}),
    "zero1-bf16": (1, "bf16", {}),
    "zero1-fp32-round-robin": (1, "fp32", {"round_robin_gradients": True}),
    "zero1-bf16-fp32-accumulation": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2-bf16-round-robin": (2, "bf16", {"round_robin_gradients": True}),
    "zero2-bf16-aligned": (2, "bf16", {"parameter_alignment": True}),
    "zero2-fp32": (2, "fp32", {}),
    "zero2-bf16-offload": (2, "bf16", {"offload_optimizer": CPU}),
    "zero3-bf16-sub-groups": (3, "bf16", {"sub_group_size": 300, "stage3_param_persistence_threshold": 50}),
    "zero3-bf16-none-persistent": (3, "bf16", {"stage3_param_persistence_threshold": 0}),
    "zero3-fp32-all-persistent": (3, "fp32", {}),
    "zero3-bf16-offload": (3, "bf16", {"offload_optimizer": CPU, "offload_param": CPU, "sub_group_size": 600}),
}


def build(name: str, seed: int) -> tuple[Adapter, Callable[[range], list[float]]]:
    stage, precision, zero = CASES[name]
    built = engine(seed, stage, precision, **zero)
    return adapter_for(built), functools.partial(engine_steps, built)


def next_losses(adapter: Any, rng: torch.Tensor) -> list[float]:
    """Losses of the next forward passes, dropout on, without a step."""
    torch.set_rng_state(rng)
    with torch.no_grad():
        return [adapter.engine(tokens).item() for tokens in batches(3, dist.get_rank())]


def through(case: str, source: str, via: str) -> None:
    """A state saved in one stage, loaded in another, saved there, and loaded back."""
    start, train = build(source, 0)
    train(range(3))
    saved = take(start)
    expected = next_losses(start, saved.rng)
    other, _ = build(via, 1)
    unplaced = put(other, saved)
    there = take(other)
    report(case, "there", *unplaced, *differences(saved, there))
    report(case, "loss", *([] if next_losses(other, saved.rng) == expected else ["the next forward differs"]))
    back, _ = build(source, 2)
    unplaced = put(back, Saved(there.tensors, there.run_state, saved.rng))
    again = take(back)
    report(case, "back", *unplaced, *differences(saved, again), *unequal(saved.run_state, again.run_state))
    report(case, "loss back", *([] if next_losses(back, saved.rng) == expected else ["the next forward differs"]))


def same_facts(case: str, adapter: Adapter) -> None:
    """Layout facts are JSON, and the same on all ranks; so is the run state."""
    mine = adapter.layout_facts()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (mine, adapter.run_state(), list(adapter.tensors())))
    problems = [] if json.loads(json.dumps(mine)) == mine else ["layout facts are not JSON"]
    if not case.startswith("zero0"):  # those of a save that is being written stay as they are
        groups = adapter.engine.optimizer.optimizer.param_groups  # type: ignore[attr-defined]
        was, groups[0]["lr"] = groups[0]["lr"], 0.125
        rates = [facts["param_groups"][0]["hyper"]["lr"] for facts in (mine, adapter.layout_facts())]
        problems += unequal(rates, [was, 0.125], "lr")
    problems += [
        f"rank {rank}: {found}" for rank, one in enumerate(every) for found in unequal(list(every[0]), list(one))
    ]
    report(case, "facts", *problems)


def another_flat_tensor(case: str, name: str) -> None:
    """The places of parameters are offsets in a flat tensor: one in other memory is not taken for the old one."""
    adapter, train = build(name, 0)
    train(range(2))
    adapter.check_attached()
    zero = adapter.engine.optimizer  # type: ignore[attr-defined]
    flat = getattr(zero, "bf16_groups_flat" if hasattr(zero, "bf16_groups_flat") else "bit16_groups_flat")
    flat[0] = flat[0].clone()
    refused(case, UnsupportedError, "is not a view of its group's flat tensor", adapter.check_attached)


def another_dtype_for_a_while(case: str) -> None:
    """At ZeRO-3 the next step gathers parameters in the dtype of their slices, which is the one that they have."""
    adapter, train = build(case, 0)
    train(range(2))
    expected = {fqn: info.dtype for fqn, info in adapter.tensors().items()}
    adapter.engine.module.float()  # type: ignore[attr-defined]
    report(
        case,
        "dtypes",
        *unequal({fqn: info.dtype for fqn, info in adapter_for(adapter.engine).tensors().items()}, expected),
    )  # type: ignore[attr-defined]


def own_files(case: str, directory: Path) -> None:
    """What DeepSpeed itself would write follows from the layout facts and the state."""
    adapter, train = build(case, 0)
    train(range(2))
    problems = file_problems(adapter.engine, adapter.layout_facts(), take(adapter), directory)  # type: ignore[attr-defined]
    report(case, "files", *problems)


def without_a_moment(case: str, name: str) -> None:
    """One parameter's moment is not in the store: it becomes zero, also where there is one, and nothing else does."""
    adapter, train = build(name, 0)
    train(range(2))
    saved, lost = take(adapter), ("blocks.0.up.weight", "exp_avg")
    put(adapter, Saved({key: saved.tensors[key] for key in saved.tensors if key != lost}, saved.run_state, saved.rng))
    expected = {**saved.tensors, lost: torch.zeros_like(saved.tensors[lost])}
    report(case, "zero", *differences(Saved(expected, {}, saved.rng), take(adapter)))
    train(range(2, 3))


def another_accumulation(case: str, name: str) -> None:
    """The number of micro-batches a step changes: steps stay, and boundaries stay boundaries."""
    adapter, train = build(name, 0)
    train(range(3))
    adapter.engine.micro_steps += 1  # type: ignore[attr-defined]
    stage, precision, zero = CASES[name]
    other: Any = adapter_for(engine(1, stage, precision, accumulation=3, **zero))
    put(other, take(adapter))
    counters = (other.engine.global_steps, other.engine.micro_steps, other.completed_steps())
    report(case, "counters", *unequal(counters, (3, 9, 3), "counters"))


def loss_scaler(case: str) -> None:
    """The state of fp16's dynamic scaler moves, its configuration does not."""

    def with_scaler(window: int) -> Any:
        adapter: Any = build("zero2-fp32", 0)[0]
        scaler = DynamicLossScaler(2.0**16, window, 1.0, 2, False)
        adapter.engine.optimizer.loss_scaler = scaler
        return adapter

    one, other = with_scaler(100), with_scaler(200)
    for overflow in (False, True, True, False):
        one.engine.optimizer.loss_scaler.update_scale(overflow)
    other.load_run_state(one.run_state())
    expected = {**vars(one.engine.optimizer.loss_scaler), "scale_window": 200}
    moved = expected["cur_scale"] == 2.0**15
    found = unequal(expected, vars(other.engine.optimizer.loss_scaler), "scaler")
    report(case, "state", *found, *([] if moved else ["the scale never moved: this proves nothing"]))


def refused(case: str, error: type[Exception], words: str, attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except error as found:
        report(case, "refused", *([] if words in str(found) else [f"the message is: {found}"]))
    else:
        report(case, "refused", "it was accepted")


def joined_groups(state: dict[str, Any]) -> None:
    """Load a state in which one parameter of a group had another weight decay than the rest."""
    first, *rest = state["param_groups"]
    apart = {"params": first["params"][:1], "hyper": {**first["hyper"], "weight_decay": 0.5}}
    build("zero2-fp32", 0)[0].load_run_state(
        {**state, "param_groups": [apart, {**first, "params": first["params"][1:]}, *rest]}
    )


def another_model(state: dict[str, Any]) -> None:
    groups = [{**group, "params": [f"other.{fqn}" for fqn in group["params"]]} for group in state["param_groups"]]
    build("zero3-fp32-all-persistent", 0)[0].load_run_state({**state, "param_groups": groups})


def strided() -> None:
    adapter, _ = build("zero2-fp32", 0)
    frozen = adapter.module.get_parameter("blocks.1.up.weight")
    frozen.data = frozen.data.t().contiguous().t()
    adapter.owned()


def refusals() -> None:
    state = build("zero2-fp32", 0)[0].run_state()
    without, *_ = deepspeed.initialize(model=Tiny(), config={"train_micro_batch_size_per_gpu": 1})
    refused("zero0-bf16", UnsupportedError, "stage 0", lambda: adapter_for(engine(0, 0, "bf16")))
    refused("no-optimizer", UnsupportedError, "no optimizer", lambda: adapter_for(without))
    refused("joined-groups", ModelMismatchError, "weight_decay", lambda: joined_groups(state))
    refused("another-model", ModelMismatchError, "no parameter in the saved state", lambda: another_model(state))
    refused("non-contiguous", UnsupportedError, "blocks.1.up.weight", strided)
    for case in ("zero1-bf16", "zero3-fp32-all-persistent"):
        refused(f"attribute-{case}", UnstorableError, "in its attribute memory", functools.partial(remember, case))


def remember(case: str) -> None:
    """Keep a number in an attribute of the optimizer inside, which is carried, and then a tensor, which is refused."""
    adapter, _ = build(case, 0)
    inner = adapter.engine.optimizer.optimizer  # type: ignore[attr-defined]
    inner.rounds = 7
    (attributes,) = adapter.attributes().values()
    kept = attributes.state_dict()
    inner.rounds = 8
    attributes.load_state_dict(kept)
    adapter.check_attached()
    assert inner.rounds == 7, kept
    inner.memory = torch.ones(2)
    adapter.check_attached()


def rollback(case: str, name: str) -> None:
    """Loading into the engine that went on training, not a fresh one; and before any step was taken."""
    adapter, train = build(name, 0)
    untrained = take(adapter)
    first = train(range(2))
    put(adapter, untrained)
    report(case, "to the start", *([] if train(range(2)) == first else ["the first steps differ"]))


def leave_behind(name: str, path: Path) -> None:
    """The state at step 3 and rank 0's next losses, for other processes."""
    adapter, train = build(name, 0)
    train(range(3))
    saved = take(adapter)
    losses = next_losses(adapter, saved.rng)
    if dist.get_rank() == 0:
        torch.save((saved.tensors, saved.run_state, saved.rng, losses), path)


def main(directory: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for name in CASES:
        round_trip(name, functools.partial(build, name))
        same_facts(name, build(name, 0)[0])
        if not name.startswith("zero0"):
            own_files(name, directory / name)
    leave_behind("zero2-bf16-round-robin", directory / "state.pt")
    through("zero2-zero3", "zero2-bf16-round-robin", "zero3-bf16-sub-groups")
    through("zero3-zero1", "zero3-fp32-all-persistent", "zero1-fp32-round-robin")
    through("zero2-zero0", "zero2-fp32", "zero0-fp32")
    refusals()
    another_flat_tensor("flat-zero2", "zero2-bf16-round-robin")
    another_flat_tensor("flat-bf16-optimizer", "zero1-bf16-fp32-accumulation")
    another_dtype_for_a_while("zero3-bf16-sub-groups")
    another_dtype_for_a_while("zero3-bf16-none-persistent")
    without_a_moment("moment-zero2", "zero2-bf16-round-robin")
    without_a_moment("moment-zero3", "zero3-bf16-sub-groups")
    another_accumulation("accumulation", "zero1-bf16")
    loss_scaler("loss-scaler")
    rollback("rollback-zero2", "zero2-fp32")
    rollback("rollback-zero3", "zero3-bf16-sub-groups")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
