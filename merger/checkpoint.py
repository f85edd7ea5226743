"""Checkpoint: the exchange model; run states; planned tensors.

The run state that every rank stored with a save: read back as plain values and tensors.

``framework`` is the adapter's and the same on all ranks; ``rng`` and ``user`` are each rank's own. Nothing is
unpickled. It does not know what any framework makes of it.

A complete training state whose bytes still lie in files: what every source gives and every layout takes.

Parameters are named by fqn, state by slot, so neither side knows the other's world size, stage or file format.
Nothing here reads a byte or writes one.

The bound on the gradient's norm, where only DeepSpeed's configuration tells it.

ZeRO-1/2 files hold it and engines take it from them, over their own configuration; ZeRO-3 files do not hold it.

Optimizer steps that a target has one of where the layers bring several: what was chosen, in the certificate.

An optimizer's step count is state like any other, so a checkpoint in which a layer's is another than it had is not
exact. Pure; it does not know which targets share a step, nor why one was chosen.

A tensor of an output file that is only planned: which elements of which parameters it will hold.

Layouts put these where the framework's own files have tensors; :mod:`merger.io.transfer` fills them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from merger.io.blocks import Extent
from merger.tensors import from_leaf, torch_dtype
from store.certificate import Certificate
from store.errors import DamagedError, MergeError, StorageError, UnreachableError
from store.fragments import FragmentIndex
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment
from store.schema import LayerRecord, PartRecord, TensorRecord
from store.segment import read_leaves
from store.state_tree import decode
from store.storage.local import Files

SLOT_OF_KIND = {"trainable": WEIGHTS, "frozen": FROZEN, "buffer": BUFFER}
"""The slot that holds a tensor itself, by the kind that its record names."""

DEFAULT = 1.0
"""What DeepSpeed 0.19 does where the configuration does not say (``runtime/constants.py``)."""


@dataclass(frozen=True)
class RankState:
    """What is one rank's own: its random-number generators and the user's objects."""

    rng: Any
    user: Any


@dataclass(frozen=True)
class RunStates:
    """The run state of a save. framework: the adapter's. ranks: by rank. client_state: of an imported checkpoint."""

    framework: Mapping[str, Any]
    ranks: Mapping[int, RankState]
    client_state: Mapping[str, Any]


def read_run_states(
    files: Files, parts: Mapping[int, PartRecord]
) -> tuple[RunStates | None, DamagedError | StorageError | None]:
    """(run state, None), or (None, what is damaged about it)."""
    trees: dict[int, dict[str, Any]] = {}
    for rank, part in sorted(parts.items()):
        try:
            trees[rank] = decode(_wanted(part, rank), read_leaves(files, part), from_leaf)
        except UnreachableError:
            raise
        except (DamagedError, StorageError) as error:
            return None, error
    framework = trees[0].get("framework")
    if not isinstance(framework, dict):
        raise MergeError(
            f"save {parts[0].save}: its run state names no framework state, so no checkpoint can be laid out from it; "
            "it was written by something else than driftpoint's saver"
        )
    ranks = {rank: RankState(tree.get("rng"), tree.get("user")) for rank, tree in trees.items()}
    return RunStates(framework, ranks, trees[0].get("client_state") or {}), None


def _wanted(part: PartRecord, rank: int) -> dict[str, Any]:
    """A part's run state without the framework's, which is the same on all ranks and large, but on rank 0."""
    tree = part.run_state if isinstance(part.run_state, dict) else {}
    return {key: value for key, value in tree.items() if rank == 0 or key != "framework"}


def portable(value: Any) -> Any:
    """``value`` with numpy's types replaced by torch's and Python's, so that it loads without either of ours.

    Arrays become tensors of their dtype, numpy scalars numbers. Everything that a store can hold is covered.
    """
    if type(value) in (int, float, str, bool, type(None)):
        return value  # by far the most: a generator's state alone is hundreds of numbers
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {portable(key): portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)([portable(item) for item in value])
    return value


@dataclass(frozen=True)
class Checkpoint:
    """One training state.

    origin: what to call it in messages. framework: what was training: ``deepspeed``, ``torch``, ``fsdp2``.
    tensors: every parameter and buffer, tied ones once, in model order. index: where the values of each
    (fqn, slot) lie. framework_state, facts: as the framework's adapter in ``monitor`` gives them as run state and
    as layout facts; ``framework_state`` has ``counters`` (None for plain torch), ``lr_scheduler``,
    ``loss_scaler``, ``param_groups`` [{params: fqns, hyper: {...}}], ``scalars`` {fqn: {name: value}} and
    ``slots`` {fqn: [name]}. run_states: by rank; empty where the source keeps none.
    files: a directory with what belongs beside the state (configuration, tokenizer, trainer state), or None.
    client_state: what the user gave a foreign checkpoint to keep.
    run_steps: in a composite, the optimizer's ``step`` of each parameter in the run whose counters and schedule go on;
    empty where all is of one run, whose scalars have them.
    """

    origin: str
    framework: str
    step: int
    tensors: Mapping[str, TensorRecord]
    layers: tuple[LayerRecord, ...]
    index: FragmentIndex[Extent]
    framework_state: Mapping[str, Any]
    facts: Mapping[str, Any]
    run_states: Mapping[int, RankState]
    certificate: Certificate
    files: Path | None = None
    client_state: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    run_steps: Mapping[str, Any] = field(default_factory=dict)

    def record(self, fqn: str) -> TensorRecord:
        """What is known of a parameter or buffer. MergeError where there is none of that name."""
        found = self.tensors.get(fqn)
        if found is None:
            raise MergeError(f"{self.origin} names no parameter {fqn}: its facts and its tensors disagree")
        return found

    def numel(self, fqn: str) -> int:
        """Elements of a parameter or buffer."""
        return math.prod(self.record(fqn).shape)

    def has(self, fqn: str, slot: str) -> bool:
        """Whether anything of the slot is there for the parameter."""
        return self.index.dtype(fqn, slot) is not None

    def dtype(self, fqn: str, slot: str) -> str:
        """The dtype in which the training state held the slot."""
        return self.index.dtype(fqn, slot) or self.record(fqn).dtype

    def slots(self, fqn: str) -> tuple[str, ...]:
        """The optimizer's own slots for a parameter, in the optimizer's order. MergeError where one is missing."""
        slots = tuple(self.framework_state["slots"].get(fqn, ()))
        for slot in slots:
            if not self.has(fqn, slot):
                raise MergeError(
                    f"the optimizer had {slot} of {fqn}, which {self.origin} does not hold; name a save that does "
                    "(a full one)"
                )
        return slots


def require_whole(checkpoint: Checkpoint) -> None:
    """MergeError, naming the parameter and the elements, unless every tensor and slot is there completely."""
    slots: dict[str, set[str]] = {}
    for fqn, slot in checkpoint.index.names():
        slots.setdefault(fqn, set()).add(slot)
    for fqn, tensor in checkpoint.tensors.items():
        for slot in sorted(slots.get(fqn, set()) | {SLOT_OF_KIND[tensor.kind]}):
            try:
                checkpoint.index.cover(Fragment(fqn, slot, 0, checkpoint.numel(fqn)))
            except DamagedError as error:
                raise MergeError(
                    f"{checkpoint.origin} has a hole and cannot be rebuilt: {error}; name an older save, or run "
                    "`driftpoint verify` to see which commits are whole"
                ) from error


def gradient_clipping(config: Any) -> float:
    """The bound that an engine with this configuration uses; 0 is none."""
    value = config.get("gradient_clipping") if isinstance(config, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else DEFAULT


@dataclass(frozen=True)
class HeldSteps:
    """A step, and the layers that brought parameters with it."""

    step: float
    layers: tuple[str, ...]


@dataclass(frozen=True)
class ChosenStep:
    """The one step that is written for parameters of a param group, and what there was. had: oldest first."""

    param_group: int
    chosen: float
    had: tuple[HeldSteps, ...]

    @property
    def changes(self) -> bool:
        """Whether any layer had another step than it gets."""
        return any(one.step != self.chosen for one in self.had)


@dataclass(frozen=True)
class StepsCertificate(Certificate):
    """A certificate that also says which optimizer steps are written."""

    optimizer_steps: tuple[ChosenStep, ...] = ()


def chosen_steps(found: Iterable[tuple[int, float, Sequence[tuple[str, float]]]]) -> tuple[ChosenStep, ...]:
    """For the records: flat partitions of one param group that get the same step are told as one.

    found: (param group, step that is written, (layer, the step that it had) of each parameter).
    """
    had: dict[tuple[int, float], dict[float, dict[str, None]]] = {}
    for group, chosen, steps in found:
        theirs = had.setdefault((group, chosen), {})
        for layer, step in steps:
            theirs.setdefault(step, {})[layer] = None
    return tuple(
        ChosenStep(group, chosen, tuple(HeldSteps(step, tuple(layers)) for step, layers in sorted(theirs.items())))
        for (group, chosen), theirs in had.items()
    )


def with_steps(certificate: Certificate, steps: tuple[ChosenStep, ...]) -> StepsCertificate:
    """The certificate of a checkpoint in which these steps are written; not exact where any layer's is changed."""
    values = {one.name: getattr(certificate, one.name) for one in fields(Certificate)}
    values["exact"] = certificate.exact and not any(one.changes for one in steps)
    return StepsCertificate(**values, optimizer_steps=steps)


def changed_steps(certificate: Certificate) -> tuple[ChosenStep, ...]:
    """Where a layer gets another optimizer step than it had."""
    steps = certificate.optimizer_steps if isinstance(certificate, StepsCertificate) else ()
    return tuple(one for one in steps if one.changes)


@dataclass(frozen=True)
class Placed:
    """``fragment`` goes to the elements from ``offset`` of a flattened tensor."""

    fragment: Fragment
    offset: int


@dataclass(frozen=True, eq=False)
class Stored:
    """A contiguous tensor to be written, by its place in the file only. Zeros wherever nothing is placed.

    The same object at two places of a file is one tensor under two names, as tied weights are.
    stays_finite: a finite value that ``dtype`` cannot hold ends the merge, in place of becoming infinite.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    placed: tuple[Placed, ...]
    stays_finite: bool = False

    def __post_init__(self) -> None:
        end = 0
        for one in self.placed:
            if one.offset < end:
                raise ValueError("what is placed in a tensor must be sorted and must not overlap")
            end = one.offset + one.fragment.numel
        if end > self.numel:
            raise ValueError(f"{end} elements do not fit into a tensor of {self.numel}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


def whole(checkpoint: Checkpoint, fqn: str, slot: str, dtype: torch.dtype | None = None) -> Stored:
    """All of a (fqn, slot) in its own shape; in ``dtype`` if one is given, else as the training state held it."""
    shape, numel = checkpoint.record(fqn).shape, checkpoint.numel(fqn)
    placed = (Placed(Fragment(fqn, slot, 0, numel), 0),) if numel else ()
    return Stored(tuple(shape), dtype or torch_dtype(checkpoint.dtype(fqn, slot)), placed)


def flat(numel: int, dtype: torch.dtype, placed: Iterable[Placed]) -> Stored:
    """A one-dimensional tensor of ``numel`` elements; ``placed`` in any order, empty fragments left out."""
    found = sorted((one for one in placed if one.fragment.numel), key=lambda one: one.offset)
    return Stored((numel,), dtype, tuple(found))
