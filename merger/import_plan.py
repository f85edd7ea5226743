"""What an import would write: the run state of every rank, facts, fragments; before a byte of a tensor is read.

Pure, but for opening the source. It does not know the store that it is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from merger.blocks import Progress
from merger.checkpoint import Checkpoint
from merger.runstate import RankState
from merger.sources.select import open_source
from merger.stream import bytes_to_read, flows
from merger.tensors import to_leaf
from store.certificate import is_lossy
from store.encoding import itemsize
from store.errors import UnsupportedError, UsageError
from store.names import RAW
from store.record import as_json
from store.segments import StagedFragment
from store.text import counted
from store.tree import Leaf, encode


@dataclass(frozen=True)
class ImportPlan:
    """A checkpoint ready to be imported.

    kind: of the source. run_states: by rank, as a store keeps them: (JSON tree, leaves). facts: JSON values.
    notes: what the checkpoint does not hold, or a store does not keep.
    """

    source: Path
    kind: str
    checkpoint: Checkpoint
    run_states: tuple[tuple[Any, Sequence[Leaf]], ...]
    facts: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def bytes_of_values(self) -> int:
        """What the tensors take when a store keeps them as they are."""
        return sum((extent.stop - extent.start) * itemsize(extent.dtype) for extent in self._extents())

    @cached_property
    def bytes_to_read(self) -> int:
        """Of the source: every block once, mostly."""
        return bytes_to_read(flows(self._extents(), lambda _: None))

    def fragments(self, progress: Progress) -> list[StagedFragment]:
        """All tensors, in the order in which they have to be written."""
        return [
            StagedFragment(
                layer=self.checkpoint.record(flow.extent.fqn).layer,
                slot=flow.extent.slot,
                fqn=flow.extent.fqn,
                start=flow.extent.start,
                numel=flow.extent.stop - flow.extent.start,
                dtype=flow.extent.dtype,
                encoding=RAW,
                data=flow,
            )
            for flow in flows(self._extents(), progress)
        ]

    def _extents(self) -> list[Any]:
        return [extent for extents in self.checkpoint.index.names().values() for extent in extents]


def plan_import(source: Path, step: str | None = None) -> ImportPlan:
    """The plan for the newest checkpoint of a source, or that of ``step``: a step, a save's name or a tag.

    Reads no tensor. Raises what sources raise; UsageError for a composite, UnsupportedError for a run state that a
    store cannot hold.
    """
    opened = open_source(source)
    checkpoint = opened.checkpoint(step, frozenset())
    _require_exact(checkpoint)
    notes: list[str] = []
    client_state = _storable(checkpoint.client_state, notes)
    states = []
    for rank, state in enumerate(_ranks(checkpoint)):
        tree: dict[str, Any] = {"framework": checkpoint.framework_state, "rng": state.rng, "user": state.user}
        if rank == 0 and client_state:
            tree["client_state"] = client_state
        states.append(encode(tree, to_leaf))
    if all(state.rng is None for state in checkpoint.run_states.values()):
        notes.append(
            "the checkpoint holds no random states: a job that resumes from it starts dropout and shuffling afresh, "
            "and what it gives as state=[...] too"
        )
    if checkpoint.files is not None:
        notes.append(f"a store keeps no files beside the state: configuration and tokenizer stay in {checkpoint.files}")
    return ImportPlan(source, opened.kind, checkpoint, tuple(states), as_json(checkpoint.facts), tuple(notes))


def _require_exact(checkpoint: Checkpoint) -> None:
    """The first commit of a store has no past: it could not say that parts of it are older, or stand in for others."""
    if checkpoint.certificate.exact:
        return
    older, lossy = checkpoint.certificate.max_staleness, checkpoint.certificate.lossy
    if older:
        why = f"is a composite: layers of it are up to {counted(older, 'step')} older than others"
    elif lossy:
        rounded = ", ".join(_rounded(checkpoint))
        why = f"is not exact: values were rounded when they were stored ({rounded}), and what was rounded off is lost"
    else:
        why = "is not exact: " + "; ".join(checkpoint.problems[:1] or ("parts of it stand in for damaged ones",))
    raise UsageError(
        f"{checkpoint.origin} {why}. Imported it would pass for exact. Name an exact one with --step "
        "(`driftpoint show` tells of a store), or copy a store as it is"
    )


def _rounded(checkpoint: Checkpoint) -> list[str]:
    """Lossy encodings with the slots that they hold."""
    slots: dict[str, list[str]] = {}
    for unit in checkpoint.certificate.units:
        if is_lossy(unit.encoding) and unit.slot not in slots.setdefault(unit.encoding, []):
            slots[unit.encoding].append(unit.slot)
    return [f"{' and '.join(names)} as {encoding}" for encoding, names in slots.items()]


def _ranks(checkpoint: Checkpoint) -> list[RankState]:
    """Every rank's own state, none where the source has none of that rank; at least one rank."""
    count = max(checkpoint.run_states, default=0) + 1
    return [checkpoint.run_states.get(rank, RankState(None, None)) for rank in range(count)]


def _storable(client_state: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """What of the client state can be kept without pickling; the rest is told."""
    kept = {}
    for key, value in client_state.items():
        try:
            encode(value, to_leaf)
        except UnsupportedError as error:
            notes.append(f"{key!r} of the client state is not imported: {error}")
        else:
            kept[key] = value
    return kept
