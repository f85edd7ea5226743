"""Bring a commit of a store forward by the records of its journal, to a step that has no commit.

The steps are repeated with the ``torch.optim`` class that the job used, parameter by parameter, while the merge reads:
all values of a parameter are one block, which a pass computes from the commit's values and the recorded gradients. So
memory holds one parameter per thread. Only for optimizers that update each element by itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from merger.checkpoint import Checkpoint, RunStates, read_run_states, with_problems
from merger.io.blocks import Block, Computed, Extent, ReadExtents, put_together, xxh3
from merger.tensors import from_leaf, memory_of, torch_dtype
from store.catalog import Catalog
from store.certificate import certify_replayed
from store.errors import DamagedError, MergeError, StorageError, UnsupportedError
from store.fragments import FragmentIndex, Source
from store.journal import KIND, STEPPED, Chain, JournalStep, chain_from, fragments_of, recorded
from store.names import BUFFER, GRADIENT, WEIGHTS, SaveId
from store.resolve import RejectedVersion, Resolution, resolve
from store.schema import digest
from store.segment import read_leaves
from store.state_tree import decode
from store.text import listed

_NAMES = ("SGD", "Adam", "AdamW", "Adamax", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop")
_KINDS = {f"{one.__module__}.{one.__name__}": one for one in (getattr(torch.optim, name) for name in _NAMES)}
"""Optimizers that update each element by itself, and keep no other state than a step count."""

_OVERRIDES = {"capturable": False, "differentiable": False}  # hyperparameters that do not change a step's result


@dataclass(frozen=True)
class _Step:
    """A record: param groups by fqn as before the step, and where the gradients and buffers lie."""

    step: int
    groups: Mapping[str, Mapping[str, Any]]
    stored: Mapping[tuple[str, str], Sequence[Extent]]


def records(journal: Catalog, step: int | str) -> list[SaveId]:
    """Return the records of a step, or of a record's name, the newest epoch first. They need not be whole."""
    named = (one for one in recorded(journal.files) if step in (one.step, str(one.step), one.name))
    return sorted(named, reverse=True)


def chain_to(
    catalog: Catalog, journal: Catalog, record: SaveId, bad: Set[RejectedVersion], torn: Set[SaveId]
) -> tuple[Resolution, Chain] | None:
    """Return the newest commit from which the journal leads to ``record``, and the records up to it, if there is one.

    ``bad``: damaged versions of commits; ``torn``: damaged records. Raises MergeError if one of those is on the way."""
    for save in (save for save in catalog.saves() if save.step < record.step):
        try:
            resolution = resolve(catalog, save, bad)
        except (DamagedError, StorageError):
            continue
        chain = None if resolution.fallbacks else chain_from(journal, resolution)
        if chain is None or all(one.save != record for one in chain.steps):
            continue
        steps = tuple(one for one in chain.steps if one.save.step <= record.step)
        if damaged := next((one.save for one in steps if one.save in torn), None):
            raise MergeError(f"step {record.step} cannot be reached: the record of step {damaged.step} is damaged")
        return resolution, replace(chain, steps=steps)
    return None


def replayed(base: Checkpoint, chain: Chain, journal: Catalog, extent: Callable[[Source], Extent]) -> Checkpoint:
    """Return the state of the last step of a chain from ``base``. ``extent``: of a stored fragment of the journal.

    Raises UnsupportedError if the optimizer's steps cannot be taken here, DamagedError, StorageError."""
    last = chain.steps[-1]
    parts = journal.group(last.save, last.record).parts
    after = read_run_states(journal.files, parts)
    if after is None or len(parts) < last.record.world_size:
        raise MergeError(f"step {last.save.step} cannot be reached: its record is damaged")
    steps = [_read_step(journal, one, extent) for one in chain.steps]
    step, names = last.save.step, base.index.names()
    version_steps = {(unit.layer, unit.slot): unit.step for unit in base.certificate.units if unit.moving}
    extents: list[Extent] = []
    for (fqn, slot), stored in names.items():
        if slot == BUFFER:
            extents += steps[-1].stored.get((fqn, slot), stored)
        elif (fqn, WEIGHTS) not in names:  # frozen, perhaps with moments from when it was trained
            extents += stored
        elif slot == WEIGHTS:
            since = version_steps[base.record(fqn).layer, slot]
            extents += _Parameter.of(base, fqn, after, [one for one in steps if one.step > since]).extents()
    trained = {fqn for one in steps for fqn, slot in one.stored if slot == GRADIENT}
    if missing := sorted(fqn for fqn in trained if (fqn, WEIGHTS) not in names):
        raise UnsupportedError(f"{listed(missing)}: trained since {base.origin}, which has no optimizer state of it")
    note = (
        f"the steps after {chain.oldest} were taken again from the journal, on this machine: last bits may differ from "
        f"the job's. ckpt.resume(step={step}) in the job takes them with its own optimizer, and compares samples"
    )
    result = replace(
        base,
        origin=f"step {step} of the journal after {base.origin}",
        step=step,
        index=FragmentIndex(extents),
        framework_state=after.framework,
        run_states=after.ranks,
        client_state=after.client_state,
        certificate=certify_replayed(base.certificate, last.save, as_saved=False),
        stored_steps={},
    )
    return with_problems(result, [*after.problems, note])


def _read_step(journal: Catalog, one: JournalStep, extent: Callable[[Source], Extent]) -> _Step:
    parts, groups = journal.group(one.save, one.record).parts, dict[str, Mapping[str, Any]]()
    try:
        if len(parts) < one.record.world_size:
            raise DamagedError("parts are missing")
        for part in parts.values():  # the stages of a pipeline have groups of their own
            tree = part.run_state if isinstance(part.run_state, dict) else {}
            recorded_groups = decode(tree[STEPPED], read_leaves(journal.files, part), from_leaf)["groups"]
            groups |= {fqn: group for group in recorded_groups for fqn in group["params"]}
        stored = {name: put_together([*map(extent, sources)]) for name, sources in fragments_of(parts).names().items()}
    except (DamagedError, KeyError) as error:
        raise MergeError(f"the record of step {one.save.step} is damaged: {error}") from error
    return _Step(one.save.step, groups, stored)


@dataclass(frozen=True)
class _Parameter:
    """A trained parameter: its values in the commit by slot, the steps to take, and the step count before them."""

    fqn: str
    shape: tuple[int, ...]
    slots: Mapping[str, Sequence[Extent]]  # the weights first
    steps: Sequence[_Step]  # those that update it
    count: float | None  # of the optimizer; None if it counts no steps
    kind: str  # class of the optimizer, "" if no step updates it

    @classmethod
    def of(cls, base: Checkpoint, fqn: str, after: RunStates, steps: Sequence[_Step]) -> "_Parameter":
        taken = [one for one in steps if (fqn, GRADIENT) in one.stored]
        kinds = {str(one.groups[fqn].get(KIND, "an optimizer that an older release recorded")) for one in taken}
        if refused := kinds - _KINDS.keys():
            raise UnsupportedError(
                f"the journal's steps of {listed(sorted(refused))} cannot be taken here, only those of optimizers of "
                f"torch that update each element by itself: ckpt.resume(step={steps[-1].step}) in the job takes them"
            )
        slots = tuple(after.framework["slots"].get(fqn, ()))
        if slots != base.slots(fqn) or len(kinds) > 1:
            raise UnsupportedError(
                f"the optimizer of {fqn} changed between {base.origin} and step {steps[-1].step}, or had no state there"
            )
        scalars = after.framework["scalars"].get(fqn) or {}
        if scalars.keys() - {"step"}:
            raise UnsupportedError(f"the optimizer keeps {listed(sorted(scalars))} of {fqn}, which are not in records")
        count = float(scalars["step"]) - len(taken) if "step" in scalars else None
        before = (base.framework_state["scalars"].get(fqn) or {}).get("step")
        same = count is None or (before is not None and count == float(before))
        if not same and fqn not in base.stored_steps:  # those are estimates: a step may leave a parameter out
            raise MergeError(f"the steps of {fqn} in the journal do not lead from {base.origin} to {steps[-1].step}")
        names = base.index.names()
        stored = {slot: names[fqn, slot] for slot in (WEIGHTS, *slots) if (fqn, slot) in names}
        return cls(fqn, tuple(base.record(fqn).shape), stored, taken, count, kinds.pop() if kinds else "")

    def extents(self) -> list[Extent]:
        """Return where the values lie after the steps: one after another in a block that a pass computes."""
        if not self.steps:
            return [one for stored in self.slots.values() for one in stored]
        sources = [*self.slots.values(), *(one.stored[self.fqn, GRADIENT] for one in self.steps)]
        sizes = [sum(one.nbytes for one in stored) for stored in self.slots.values()]
        read = [one.block for stored in sources for one in stored]
        coded = Computed(
            self.values,
            sum(block.stored_bytes for block in read),
            4 * sum(sizes) + max(0 if block.coded is None else block.coded.memory for block in read),
        )
        name = f"{self.fqn} after step {self.steps[-1].step}"
        known = digest("".join(one.digest for one in read).encode())
        block = Block(read[0].files, self.fqn, 0, sum(sizes), xxh3, known, name, None, coded)
        out, offset = [], 0
        for (slot, stored), size in zip(self.slots.items(), sizes, strict=True):
            numel = sum(one.stop - one.start for one in stored)
            out.append(Extent(self.fqn, slot, 0, numel, stored[0].dtype, block, offset))
            offset += size
        return out

    def values(self, read: ReadExtents) -> Iterator[memoryview]:
        """Yield the values of each slot after the steps. ``read``: reads the extents of a tensor."""
        state = {slot: self._tensor(read, stored) for slot, stored in self.slots.items()}
        weights = state.pop(WEIGHTS).requires_grad_()
        optimizer = _KINDS[self.kind]([weights])
        if self.count is not None:
            state = {"step": torch.tensor(self.count, dtype=torch.float32, device="cpu"), **state}
        optimizer.state[weights] = state
        for one in self.steps:
            optimizer.param_groups[0].update({**one.groups[self.fqn]["hyper"], **_OVERRIDES})
            gradient = self._tensor(read, one.stored[self.fqn, GRADIENT])
            try:
                weights.grad = gradient
                optimizer.step()
            except (KeyError, RuntimeError, TypeError, ValueError) as error:  # of torch, of another release
                raise MergeError(f"step {one.step} of {self.fqn} cannot be taken again: {error}") from error
        for slot in self.slots:
            yield memory_of(weights if slot == WEIGHTS else optimizer.state[weights][slot])

    def _tensor(self, read: ReadExtents, stored: Sequence[Extent]) -> torch.Tensor:
        if sum(one.stop - one.start for one in stored) != prod(self.shape):
            raise MergeError(f"a record holds only a part of {self.fqn}")
        return torch.frombuffer(read(stored), dtype=torch_dtype(stored[0].dtype)).view(self.shape)
