"""Define the checkpoint model that every source fills and every layout writes.

Parameters are named by fqn and their state by slot, so neither side knows the other's world size, ZeRO stage or format.
A :class:`Checkpoint` says where bytes lie, a :class:`PlannedTensor` where they will go. Reads and writes no tensor."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from merger.io.blocks import Extent
from merger.tensors import Implausibles, from_leaf, torch_dtype
from store.certificate import IMPORTED_AS_FOUND, Certificate
from store.errors import DamagedError, MergeError, StorageError, UnreachableError, UnsupportedError
from store.fragments import FragmentIndex
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment, group_by_key
from store.schema import LayerRecord, PartRecord, TensorRecord
from store.segment import read_leaves
from store.state_tree import decode, join_stages
from store.storage.local import Files
from store.text import listed

SLOT_OF_KIND = {"trainable": WEIGHTS, "frozen": FROZEN, "buffer": BUFFER}  # slot of the tensor itself, by kind
IMPORTED_WITH = f"{IMPORTED_AS_FOUND}, with "  # begins the reason of units with implausible values; their kinds follow
DEFAULT_CLIPPING = 1.0  # DeepSpeed 0.19's gradient clipping without a configured value (`runtime/constants.py`)


@dataclass(frozen=True)
class RankState:
    """One rank's own run state: its random-number generators and the user's objects."""

    rng: Any
    user: Any
    own: tuple[str, ...] = ()  # names of state that no layout can write: extra state of modules
    objects: Any = None  # [name, class] of each of the user's objects, where known


@dataclass(frozen=True)
class RunStates:
    """Run state of a save."""

    framework: Mapping[str, Any]  # state of the training framework, the same on all ranks
    ranks: Mapping[int, RankState]  # each rank's own state
    client_state: Mapping[str, Any]  # user values of an imported checkpoint
    problems: tuple[str, ...] = ()  # values in which ranks differed, so that no output has all of them


@dataclass(frozen=True)
class Checkpoint:
    """One training state whose bytes still lie in files."""

    origin: str  # name of the checkpoint in messages
    framework: str  # training framework: ``deepspeed``, ``torch``, ``fsdp2`` or ``dtensor``
    step: int
    tensors: Mapping[str, TensorRecord]  # every parameter and buffer, tied ones once, in model order
    layers: tuple[LayerRecord, ...]
    index: FragmentIndex[Extent]  # where the values of each (fqn, slot) lie
    framework_state: Mapping[str, Any]
    """As the adapter in ``monitor`` gives it: ``counters`` (None for plain torch), ``lr_scheduler``, ``loss_scaler``,
    ``param_groups`` [{params: fqns, hyper: {...}}], ``scalars`` {fqn: {name: value}} and ``slots`` {fqn: [name]}."""
    facts: Mapping[str, Any]  # layout facts of the adapter
    run_states: Mapping[int, RankState]  # by rank; empty if the source keeps none
    certificate: Certificate
    files: Path | None = None  # directory with the files beside the state: configuration, tokenizer, trainer state
    client_state: Mapping[str, Any] = field(default_factory=dict)  # user values of a foreign checkpoint
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what was concluded about a foreign checkpoint, or left out of it
    run_steps: Mapping[str, Any] = field(default_factory=dict)
    """In a composite only: the optimizer's ``step`` of a parameter in the run whose counters and schedule are used."""
    unvouched: frozenset[tuple[str, str]] = frozenset()  # (fqn, slot) whose values nothing proves to be of this save
    stored_steps: Mapping[str, float] = field(default_factory=dict)  # ``step`` of moments older than the run state
    weights_only: bool = False  # of a commit whose optimizer state retention deleted

    def record(self, fqn: str) -> TensorRecord:
        """Return the record of a parameter or buffer. MergeError if no tensor has that name."""
        found = self.tensors.get(fqn)
        if found is None:
            raise MergeError(f"{self.origin} has no tensor {fqn}, but its layout facts name it; merge another save")
        return found

    def numel(self, fqn: str) -> int:
        return math.prod(self.record(fqn).shape)

    def has(self, fqn: str, slot: str) -> bool:
        """Return whether any element of the slot is stored for the parameter."""
        return self.index.dtype(fqn, slot) is not None

    def dtype(self, fqn: str, slot: str) -> str:
        """Return the dtype in which the training state held the slot."""
        return self.index.dtype(fqn, slot) or self.record(fqn).dtype

    def slots(self, fqn: str) -> tuple[str, ...]:
        """Return the optimizer's slots for a parameter, in the optimizer's order. MergeError if one is missing."""
        slots = tuple(self.framework_state["slots"].get(fqn, ()))
        for slot in slots:
            if self.numel(fqn) and not self.has(fqn, slot):
                raise MergeError(f"{self.origin} lacks {slot} of {fqn}, which the optimizer had; name a full save")
        return slots


def require_whole(checkpoint: Checkpoint) -> None:
    """Raise MergeError, naming parameter and elements, unless every tensor and slot is complete."""
    slots = group_by_key(checkpoint.index.names())
    for fqn, tensor in checkpoint.tensors.items():
        for slot in sorted({*slots.get(fqn, ()), SLOT_OF_KIND[tensor.kind]}):
            try:
                checkpoint.index.cover(Fragment(fqn, slot, 0, checkpoint.numel(fqn)))
            except DamagedError as error:
                raise MergeError(
                    f"{checkpoint.origin} is incomplete and cannot be rebuilt: {error}; name an older save, or run "
                    "`driftpoint verify` to list the complete commits"
                ) from error


def refuse_weights_only(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError if retention kept nothing but the weights of the commit."""
    if checkpoint.weights_only:
        raise UnsupportedError(f"{checkpoint.origin} holds weights only: `driftpoint merge --layout hf` writes them")


def implausible_lines(checkpoint: Checkpoint, found: Implausibles) -> list[str]:
    """Return one line for each layer and slot with implausible values. ``found``: their kinds by (fqn, slot)."""
    units: dict[tuple[str, str, str], list[str]] = {}
    for fqn in checkpoint.tensors:
        for slot in sorted(slot for name, slot in found if name == fqn):
            kinds = " and ".join(sorted(found[fqn, slot]))
            units.setdefault((checkpoint.record(fqn).layer, slot, kinds), []).append(fqn)
    return [f"layer {layer}: {kinds} in {slot} of {listed(fqns, 3)}" for (layer, slot, kinds), fqns in units.items()]


def refuse_implausible(checkpoint: Checkpoint, lines: Sequence[str]) -> None:
    """Raise MergeError for values that no healthy training state holds."""
    raise MergeError(
        f"{checkpoint.origin} holds values that training cannot continue from: {listed(lines, 3, '; ')}. Nothing was "
        "written. Name an older checkpoint with --step, or take these values as they are with --allow-nonfinite"
    )


def with_problems(checkpoint: Checkpoint, lines: Sequence[str]) -> Checkpoint:
    """Return the checkpoint with more problems, so that it counts as neither exact nor as found."""
    if not lines:
        return checkpoint
    before = checkpoint.certificate
    certificate = replace(before, exact=False, as_found=False, problems=(*before.problems, *lines))
    return replace(checkpoint, certificate=certificate, problems=(*checkpoint.problems, *lines))


@dataclass(frozen=True)
class Placement:
    """Elements of ``fragment`` go to ``offset`` of a flattened tensor."""

    fragment: Fragment
    offset: int


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """A contiguous tensor to be written, described by its content only. Elements without a source are zeros.

    The same object at two places of a file is one tensor under two names, as tied weights are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placed: tuple[Placement, ...]  # sorted by offset, without overlaps
    stays_finite: bool = False  # fail the merge if a finite value becomes infinite in ``dtype``

    def __post_init__(self) -> None:
        end = 0
        for one in self.placed:
            if one.offset < end:
                raise ValueError("the fragments of a tensor must be sorted and must not overlap")
            end = one.offset + one.fragment.numel
        if end > self.numel:
            raise ValueError(f"{end} elements do not fit into a tensor of {self.numel}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def plan_whole(checkpoint: Checkpoint, fqn: str, slot: str, dtype: torch.dtype | None = None) -> PlannedTensor:
    """Plan all of a (fqn, slot) in its own shape, in ``dtype`` if given, else in the dtype of the training state."""
    shape, numel = checkpoint.record(fqn).shape, checkpoint.numel(fqn)
    placed = (Placement(Fragment(fqn, slot, 0, numel), 0),) if numel else ()
    return PlannedTensor(tuple(shape), dtype or torch_dtype(checkpoint.dtype(fqn, slot)), placed)


def plan_parameter(checkpoint: Checkpoint, fqn: str, dtype: torch.dtype | None = None) -> PlannedTensor:
    """Plan all of a parameter or buffer itself, as :func:`plan_whole`."""
    return plan_whole(checkpoint, fqn, SLOT_OF_KIND[checkpoint.record(fqn).kind], dtype)


def read_run_states(files: Files, parts: Mapping[int, PartRecord]) -> RunStates | None:
    """Return the run state of a save; None if a part of it is damaged or missing."""
    trees: dict[int, dict[str, Any]] = {}
    try:
        for rank, part in sorted(parts.items()):
            tree = part.run_state if isinstance(part.run_state, dict) else {}
            # The framework's state is large and the same on all ranks of a pipeline stage: its first rank's is enough.
            framework = tree.get("framework")
            leads = rank == 0 or (isinstance(framework, dict) and "stages" in framework)
            needed = {key: value for key, value in tree.items() if leads or key != "framework"}
            trees[rank] = decode(needed, read_leaves(files, part), from_leaf)
        framework = join_stages(trees[0], lambda leader: trees[leader]).get("framework")
    except UnreachableError:
        raise
    except (DamagedError, StorageError):
        return None
    if not isinstance(framework, dict):
        raise MergeError(
            f"the run state of save {parts[0].save} has no framework state, so no checkpoint can be written from it. "
            "Another program wrote it; merge a save that Driftpoint wrote"
        )
    differing = dict.fromkeys(name for tree in trees.values() for name in tree.get("rank_buffers") or ())
    problems = (f"ranks had different values of {listed(differing)}: the first rank's are taken",) if differing else ()
    ranks = {}
    for rank, tree in trees.items():
        modules = tuple(f"the extra state of module {name!r}" for name in tree.get("modules") or ())
        ranks[rank] = RankState(tree.get("rng"), tree.get("user"), modules, tree.get("objects"))
    return RunStates(framework, ranks, trees[0].get("client_state") or {}, tuple(problems))


def own_state_notes(checkpoint: Checkpoint) -> list[str]:
    """Return the source's notes, and one on the state of the source that no output holds."""
    left_out = dict.fromkeys(name for state in checkpoint.run_states.values() for name in state.own)
    note = f"left out: {listed(left_out)}; a job that resumes from the store itself gets them back"
    return [*checkpoint.notes, *([note] if left_out else [])]


_PLAIN: dict[type, Any] = {list: list, deque: list, tuple: tuple, torch.Size: tuple, set: set}


def to_portable(value: Any) -> Any:
    """Return ``value`` with numpy arrays as torch tensors and numpy scalars as Python numbers.

    Any process can load the result, with ``weights_only=True``: containers of :mod:`collections` become plain ones.
    Covers every type that a store can hold."""
    if type(value) in (int, float, str, bool, type(None)):
        return value  # the most frequent case: a generator's state alone is hundreds of numbers
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {to_portable(key): to_portable(item) for key, item in value.items()}
    if (plain := _PLAIN.get(type(value))) is not None:
        return plain(to_portable(item) for item in value)
    return bytes(value) if isinstance(value, bytearray) else value


def portable_run_states(checkpoint: Checkpoint, ranks: Iterable[int]) -> dict[int, Any]:
    """Return ``rng``, ``user``, and ``state``, its named objects, of each rank in a form that any process can load."""
    return {rank: _portable(checkpoint.run_states[rank]) for rank in ranks}


def _portable(state: RankState) -> dict[str, Any]:
    user = to_portable(state.user)
    named = {name: value for (name, _), value in zip(state.objects or (), user or (), strict=False) if name}
    return {"rng": to_portable(state.rng), "user": user, "state": named}


def config_section(config: Any, *keys: str) -> Mapping[str, Any]:
    """Return a section of DeepSpeed's configuration; empty if it is missing or no mapping, as some old forms are."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def gradient_clipping(config: Any) -> float:
    """Return the gradient clipping that an engine with this configuration uses; 0 is none.

    ZeRO-1/2 files hold the value, and engines take it from them over their own configuration; ZeRO-3 files do not."""
    value = config_section(config).get("gradient_clipping")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else DEFAULT_CLIPPING


@dataclass(frozen=True)
class HeldSteps:
    """An optimizer step, and the layers whose parameters had it."""

    step: float
    layers: tuple[str, ...]


@dataclass(frozen=True)
class ChosenStep:
    """The one optimizer step written for parameters of a param group, and the steps they had, oldest first."""

    param_group: int
    chosen: float
    had: tuple[HeldSteps, ...]

    @property
    def changes(self) -> bool:
        """Whether any layer gets another step than it had."""
        return any(one.step != self.chosen for one in self.had)


@dataclass(frozen=True)
class StepsCertificate(Certificate):
    """A certificate that also records which optimizer steps are written."""

    optimizer_steps: tuple[ChosenStep, ...] = ()


def with_steps(given: Certificate, found: Iterable[tuple[int, float, Sequence[tuple[str, float]]]]) -> StepsCertificate:
    """Return the certificate with the steps that are written; neither exact nor as found if a layer's step changes.

    ``found``: (param group, step that is written, [(layer, step that it had)] of its parameters). Flat partitions of
    one param group with the same step share one record."""
    had: dict[tuple[int, float], dict[float, dict[str, None]]] = {}
    for group, chosen, held in found:
        layers_of = had.setdefault((group, chosen), {})
        for layer, step in held:
            layers_of.setdefault(step, {})[layer] = None
    steps = tuple(
        ChosenStep(group, chosen, tuple(HeldSteps(step, tuple(layers)) for step, layers in sorted(layers_of.items())))
        for (group, chosen), layers_of in had.items()
    )
    values = {**vars(given), "optimizer_steps": steps}
    if any(one.changes for one in steps):
        values |= {"exact": False, "as_found": False}
    return StepsCertificate(**values)


def changed_steps(certificate: Certificate) -> tuple[ChosenStep, ...]:
    """Return the chosen steps that differ from the step of any of their layers."""
    steps = certificate.optimizer_steps if isinstance(certificate, StepsCertificate) else ()
    return tuple(one for one in steps if one.changes)
