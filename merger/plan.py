"""The plan of a merge: which version of every tensor, checked for holes before a byte is written.

Reads records and run state only, no payload. What a plan says stands as long as the payloads are whole; a
reader that finds one that is not asks for another plan with that version in ``bad``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from merger.runstate import RankState, read_run_states
from store.catalog import Catalog
from store.coverage import FragmentIndex, Source
from store.encoding import itemsize
from store.errors import DamagedError, MergeError, StorageError
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment, SaveId
from store.schema import ManifestRecord, TensorRecord
from store.versions import Bad, Resolution, newest_resumable, resolve

SLOT_OF_KIND = {"trainable": WEIGHTS, "frozen": FROZEN, "buffer": BUFFER}
"""The slot that holds a tensor itself, by the kind that its record names."""


@dataclass(frozen=True)
class MergePlan:
    """What a rebuilt checkpoint is made of.

    sources: the stored fragments of each (fqn, slot), by start; together they cover it. run_states: by rank,
    of the manifest's own save. facts: from the framework's adapter, of the same save. problems: what is wrong
    with newer commits and with versions that were passed over.
    """

    resolution: Resolution
    index: FragmentIndex
    run_states: Mapping[int, RankState]
    facts: Mapping[str, Any]
    problems: tuple[str, ...]

    @property
    def manifest(self) -> ManifestRecord:
        """The commit that is rebuilt."""
        return self.resolution.manifest

    @property
    def save(self) -> SaveId:
        """The commit that is rebuilt."""
        return self.manifest.save

    @property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """Every parameter and buffer of the model, in model order."""
        return self.manifest.tensors

    @property
    def sources(self) -> Mapping[tuple[str, str], Sequence[Source]]:
        """Stored fragments by (fqn, slot)."""
        return self.index.names()

    @property
    def framework_state(self) -> Mapping[str, Any]:
        """What the framework's adapter gave as its run state; the same on all ranks."""
        state: Mapping[str, Any] = self.run_states[0].framework
        return state

    @property
    def bytes_to_read(self) -> int:
        """Payload bytes that the plan names, each counted once."""
        return sum(source.entry.nbytes for found in self.sources.values() for source in found)

    @property
    def bytes_to_write(self) -> int:
        """Bytes of all tensors in the dtypes of the training state, without paddings and working copies."""
        return sum(
            source.entry.numel * itemsize(source.entry.dtype) for found in self.sources.values() for source in found
        )


def plan_merge(catalog: Catalog, save: SaveId | None, bad: Set[Bad] = frozenset()) -> MergePlan:
    """The plan for a commit, or for the newest one that can be rebuilt.

    Raises NothingToResumeError where no commit can be, MergeError where ``save`` can not, or where a
    parameter has a hole.
    """
    known = set(bad)
    while True:
        resolution, passed_over = _resolution(catalog, save, known)
        states, damage = read_run_states(catalog.files, resolution.run_parts)
        if damage is None:
            break
        known.add(Bad(resolution.manifest.save))
    index = FragmentIndex(resolution.sources())
    _require_whole(resolution.manifest, index)
    facts = resolution.run_parts[0].facts
    return MergePlan(resolution, index, states, facts, (*passed_over, *resolution.problems))


def sources_of(plan: MergePlan) -> list[Source]:
    """All stored fragments of a plan, in the order in which they lie in the store."""
    found = [source for sources in plan.sources.values() for source in sources]
    return sorted(found, key=lambda source: (source.part.save, source.part.rank, source.entry.offset))


def _resolution(catalog: Catalog, save: SaveId | None, bad: Set[Bad]) -> tuple[Resolution, tuple[str, ...]]:
    if save is None:
        return newest_resumable(catalog, bad)
    saves = catalog.saves()
    if save not in saves:
        there = ", ".join(known.name for known in saves[:5]) or "none at all"
        raise MergeError(f"the store has no commit {save}; the newest are: {there}")
    try:
        return resolve(catalog, save, bad), ()
    except (DamagedError, StorageError) as error:
        raise MergeError(
            f"commit {save} cannot be rebuilt: {error}; name no save to get the newest one that can"
        ) from error


def _require_whole(manifest: ManifestRecord, index: FragmentIndex) -> None:
    slots: dict[str, set[str]] = {}
    for fqn, slot in index.names():
        slots.setdefault(fqn, set()).add(slot)
    for fqn, tensor in manifest.tensors.items():
        numel = 1
        for size in tensor.shape:
            numel *= size
        for slot in sorted(slots.get(fqn, set()) | {SLOT_OF_KIND[tensor.kind]}):
            try:
                index.cover(Fragment(fqn, slot, 0, numel))
            except DamagedError as error:
                raise MergeError(
                    f"commit {manifest.save} has a hole and cannot be rebuilt: {error}; "
                    "name an older save, or run `driftpoint verify` to see which commits are whole"
                ) from error
