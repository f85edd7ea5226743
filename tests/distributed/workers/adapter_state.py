"""Taking a training state through an adapter and putting it back, in memory: what the checks share."""

from __future__ import annotations

import copy
import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from adapter_model import batches
from torch.distributed.tensor import DTensor

from monitor.adapters.base import Adapter, Piece
from monitor.adapters.module_tensors import dtype_name

Key = tuple[str, str]


@dataclass(frozen=True)
class Saved:
    """Every (fqn, slot) whole, the run state, and this rank's random state."""

    tensors: dict[Key, torch.Tensor]
    run_state: dict[str, Any]
    rng: torch.Tensor


def leave() -> None:
    """End the process when all ranks are done, without tearing gloo's threads down: now and then that aborts
    ("terminate called without an active exception") after all is over."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def report(case: str, check: str, *problems: str) -> None:
    """Rank 0 prints one line of JSON; the check holds if no rank has a problem."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [problem for problem in problems if problem])
    found = [f"rank {rank}: {problem}" for rank, one in enumerate(every) for problem in one]
    if dist.get_rank() == 0:
        line = json.dumps({"case": case, "check": check, "problems": found[:6]})
        sys.stdout.write(f"RESULT {line}\n")
        sys.stdout.flush()


def all_owned(adapter: Adapter) -> list[Piece]:
    """The owned pieces of all ranks, as copies."""
    mine = [Piece(piece.fragment, piece.tensor.clone()) for piece in adapter.owned()]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [piece for one in every for piece in one]


def coverage(adapter: Adapter, pieces: list[Piece], slots: tuple[str, ...]) -> list[str]:
    """What is wrong with the cover: every element of every (fqn, slot) exactly once, and nothing else."""
    expected: dict[Key, int] = {}
    for fqn, info in adapter.tensors().items():
        kinds = {"trainable": ("fp32", *slots), "frozen": ("frozen",), "buffer": ("buffer",)}[info.kind]
        expected |= {(fqn, slot): torch.Size(info.shape).numel() for slot in kinds}
    counts = {key: torch.zeros(numel, dtype=torch.int64) for key, numel in expected.items()}
    problems = []
    for piece in pieces:
        f = piece.fragment
        if (f.fqn, f.slot) not in counts or piece.tensor.numel() != f.numel or piece.tensor.ndim != 1:
            problems.append(f"unexpected {f}")
        else:
            counts[f.fqn, f.slot][f.start : f.stop] += 1
    return problems + [f"{key} covered {count.tolist()[:9]}" for key, count in counts.items() if not (count == 1).all()]


def held_is_live(adapter: Adapter) -> list[str]:
    """What is owned must lie in what is held: the same memory, so that a load reaches what a save reads."""
    spans = [(p.tensor.data_ptr(), p.tensor.data_ptr() + p.tensor.nbytes, p.fragment) for p in adapter.held()]
    problems = []
    for piece in adapter.owned():
        begin, end = piece.tensor.data_ptr(), piece.tensor.data_ptr() + piece.tensor.nbytes
        inside = [f for b, e, f in spans if b <= begin and end <= e]
        if not any(f.fqn == piece.fragment.fqn and f.slot == piece.fragment.slot for f in inside):
            problems.append(f"{piece.fragment} is not in what is held")
    return problems


def take(adapter: Adapter) -> Saved:
    """A copy of the whole state. The run state goes through a file format that holds plain data only."""
    whole: dict[Key, torch.Tensor] = {}
    infos = adapter.tensors()
    for piece in all_owned(adapter):
        f = piece.fragment
        numel = torch.Size(infos[f.fqn].shape).numel()
        full = whole.setdefault((f.fqn, f.slot), torch.empty(numel, dtype=piece.tensor.dtype))
        full[f.start : f.stop] = piece.tensor
    file = io.BytesIO()
    torch.save(adapter.run_state(), file)
    file.seek(0)
    return Saved(whole, torch.load(file, weights_only=True), torch.get_rng_state())


def put(adapter: Adapter, saved: Saved) -> list[str]:
    """Load the state in place. Returns what found no place."""
    slots: dict[str, dict[str, str]] = {}
    for (fqn, slot), tensor in saved.tensors.items():
        slots.setdefault(fqn, {})[slot] = dtype_name(tensor.dtype)
    expected = {(place.fragment, place.dtype) for place in adapter.expected(slots)}
    adapter.check_run_state(saved.run_state)
    for key, item in adapter.objects().items():
        if saved.run_state[key] is not None:
            item.load_state_dict(copy.deepcopy(saved.run_state[key]))
    adapter.prepare_load(slots)
    found = {(piece.fragment, piece.tensor.dtype) for piece in adapter.held()}
    unplanned = [f"{what} was foretold or is held, not both" for what in expected ^ found]
    filled = set()
    for piece in adapter.held():
        f = piece.fragment
        if (f.fqn, f.slot) not in saved.tensors:
            continue  # a moment that was not kept
        piece.tensor.copy_(saved.tensors[f.fqn, f.slot][f.start : f.stop])
        filled.add((f.fqn, f.slot))
    adapter.load_run_state(saved.run_state)
    adapter.finish_load()
    torch.set_rng_state(saved.rng)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, filled)
    unfilled = saved.tensors.keys() - set().union(*every)
    return unplanned + [f"{key} was not filled on any rank" for key in unfilled]


def differences(one: Saved, other: Saved, cast: bool = False) -> list[str]:
    """Where two states are not equal to the last bit (cast: after the first's dtype became the second's)."""
    problems = [f"{key} is only in one" for key in one.tensors.keys() ^ other.tensors.keys()]
    for key in one.tensors.keys() & other.tensors.keys():
        a, b = one.tensors[key], other.tensors[key]
        if not cast and a.dtype != b.dtype:
            problems.append(f"{key}: {a.dtype} and {b.dtype}")
        elif not torch.equal(a.to(b.dtype).view(torch.uint8), b.view(torch.uint8)):
            problems.append(f"{key} differs")
    return problems


def unequal(one: Any, other: Any, where: str = "run state") -> list[str]:
    """Where two run states differ; tensors to the last bit, in value, kind and dtype.

    ``unused`` tells of the process that saved, and is another one's in any other: see ReusedGradients."""
    if type(one) is not type(other):
        return [f"{where}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return [f"{where}: keys {sorted(map(str, one.keys() ^ other.keys()))} are only in one"]
        kept = [key for key in one if key != "unused"]
        return [found for key in kept for found in unequal(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{where}: lengths {len(one)} and {len(other)}"]
        return [
            found for i, (a, b) in enumerate(zip(one, other, strict=True)) for found in unequal(a, b, f"{where}[{i}]")
        ]
    if isinstance(one, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [f"{where}: {one} and {other}"]
    return [] if one == other else [f"{where}: {one} and {other}"]


def engine_steps(engine: Any, steps: range) -> list[float]:
    """Train these steps; the loss of every micro-batch, exactly."""
    losses = []
    for step in steps:
        for tokens in batches(step, dist.get_rank()):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def working(adapter: Adapter) -> dict[str, torch.Tensor]:
    """The working weights that are in memory whole."""
    found = {}
    for fqn, parameter in adapter.module.named_parameters():
        values = parameter.detach()
        if parameter.numel():
            found[fqn] = (values.full_tensor() if isinstance(values, DTensor) else values).clone().view(-1)
    return found


def stale(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """Which working weights a load did not bring back."""
    gone = [f"{fqn} is gathered in one only" for fqn in before.keys() ^ after.keys()]
    return gone + [
        f"{fqn} is stale" for fqn in before.keys() & after.keys() if not torch.equal(before[fqn], after[fqn])
    ]


def same_losses(one: list[float], other: list[float]) -> list[str]:
    return [] if one == other else [f"losses {one} and {other}"]


def layout(adapter: Adapter) -> Any:
    """What the lists of a decision depend on: the same object as long as a job has the same tensors."""
    identity = adapter.identity()
    return None if identity is None else identity.layout


def round_trip(
    case: str,
    build: Callable[[int], tuple[Adapter, Callable[[range], list[float]]]],
    slots: tuple[str, ...] | None = ("exp_avg", "exp_avg_sq"),
) -> Saved:
    """Save at step 3, train on; load into a fresh engine, train on: all of it must be the same to the last bit.

    build: from a seed, a fresh adapter and a function that trains a range of steps. slots: of each trained parameter,
    None where they differ.
    """
    adapter, train = build(0)
    train(range(3))
    uncovered = [] if slots is None else coverage(adapter, all_owned(adapter), slots)
    report(case, "cover", *uncovered, *held_is_live(adapter))
    saved, weights = take(adapter), working(adapter)
    layouts = [layout(adapter)]
    losses, end = train(range(3, 8)), take(adapter)
    layouts += [layout(adapter), train(range(8, 10)) and layout(adapter)]
    changed = [f"at point {at}" for at, one in enumerate(layouts) if one is None or one is not layouts[0]]
    report(case, "listed once", *changed)

    fresh, train_again = build(1)
    unlike = [] if differences(saved, take(fresh)) else ["the fresh model is the trained one: this proves nothing"]
    unplaced = put(fresh, saved)
    loaded = take(fresh)
    report(case, "load", *unlike, *unplaced, *differences(saved, loaded), *unequal(saved.run_state, loaded.run_state))
    report(case, "working", *stale(weights, working(fresh)))
    losses_again, end_again = train_again(range(3, 8)), take(fresh)
    report(case, "losses", *same_losses(losses, losses_again))
    report(case, "end", *differences(end, end_again), *unequal(end.run_state, end_again.run_state))
    return saved
