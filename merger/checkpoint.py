"""A complete training state whose bytes still lie in files: what every source gives and every layout takes.

Parameters are named by fqn, state by slot, so neither side knows the other's world size, stage or file format.
Nothing here reads a byte or writes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merger.blocks import Extent
from merger.runstate import RankState
from store.certificate import Certificate
from store.coverage import FragmentIndex
from store.errors import DamagedError, MergeError
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment
from store.schema import LayerRecord, TensorRecord

SLOT_OF_KIND = {"trainable": WEIGHTS, "frozen": FROZEN, "buffer": BUFFER}
"""The slot that holds a tensor itself, by the kind that its record names."""


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
