"""Staging one version for memory: what goes into it, where it lies, and the copies, begun.

Training thread. The room that it writes to is found by the caller, who knows which payload nobody counts on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monitor.heading import Head
from monitor.job import Job
from monitor.opened import OpenedStore
from monitor.remembering import Laid, RunState, Version, fragments_bytes, lay_out
from monitor.run_state import captured, to_tree
from monitor.staging import Copying
from monitor.units import LocalUnit
from store.memory.arena import Arena
from store.names import BUFFER, FROZEN, SaveId, Unit

_MARGIN = 1 << 20
"""Bytes of a payload that are reserved beyond what its first version needs: the run state may grow a little."""


class Keeper:
    """Of one rank. lazy: state is copied beside the next forward and backward."""

    def __init__(self, job: Job, opened: OpenedStore, head: Head, *, lazy: bool) -> None:
        self._job = job
        self._opened = opened
        self._head = head
        self._lazy = lazy
        self._encodings = job.config.memory_encodings()

    def needed(self, local: Mapping[Unit, LocalUnit]) -> int:
        """Bytes that a payload takes."""
        return fragments_bytes(kept_of(local), self._encodings) + _MARGIN

    def staged(
        self, save: SaveId, local: Mapping[Unit, LocalUnit], arena: Arena, slot: int, room: Callable[[int], Any]
    ) -> Version:
        """A version in ``room(bytes)``, which is payload ``slot``. StorageError; whatever the user's objects raise."""
        job, rank = self._job, self._job.group.rank
        tree, leaves = to_tree(captured(job.adapter, job.user, rank))
        run = RunState(tree, leaves)
        laid, end = lay_out(kept_of(local), self._encodings, room, max(run.nbytes, _MARGIN))
        copying = self._begun(laid)
        first, store_id = rank == 0, self._opened.catalog.store_id
        return Version(
            arena=arena,
            slot=slot,
            save=save,
            store_id=store_id,
            claim=self._opened.token,
            rank=rank,
            world_size=job.group.world_size,
            plan=self._head.plan(save),
            laid=laid,
            fragments_end=end,
            run=run,
            facts=job.adapter.layout_facts() if first else {},
            head=self._head.manifest(save, store_id) if first else None,
            copying=copying,
        )

    def _begun(self, laid: Sequence[Laid]) -> Copying:
        """The copies: buffers' at once, since a forward may change them, the others' at once or beside training."""
        copying, now = Copying(), Copying()
        for one in laid:
            if one.encoded is not None:
                copying.add_encoded([one.encoded])
            else:
                (now if one.unit.slot == BUFFER else copying).add([one.source], [one.copy])
        now.start()
        now.finish()
        copying.start()
        if not self._lazy:
            copying.finish()
        return copying


def kept_of(local: Mapping[Unit, LocalUnit]) -> dict[Unit, LocalUnit]:
    """What memory keeps: not what never moves."""
    return {unit: part for unit, part in local.items() if unit.slot != FROZEN}
