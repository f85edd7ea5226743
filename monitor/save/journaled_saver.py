"""Save as :class:`Saver` does, and record the inputs of each optimizer step, so that a resume can repeat the step.

A hook copies the gradients and the hyperparameters just before the optimizer's step, in the training thread. At
``ckpt.step()`` the run state is added, and a background thread writes the record (:mod:`store.journal`). Training waits
for storage a fraction of a second at most; then the record is left out. A record left out interrupts the journal, and
so does a change of the state by anything but the optimizer's step. The journal begins again at the next save."""

import inspect
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from monitor.adapters.base import Piece, sample, weights_of
from monitor.adapters.identity import Hook, version_of
from monitor.background import BackgroundWorker
from monitor.context import JobContext
from monitor.events import BackgroundFailureEvent
from monitor.run_state import CapturedState, begin_tree, capture_rng, capture_run_state
from monitor.save.encode import encode_gradient
from monitor.save.save_task import Finish
from monitor.save.saver import Saver
from monitor.save.store_session import StoreSession
from monitor.types import DecisionResult
from store.certificate import Certificate
from store.errors import UnsupportedError, UsageError
from store.journal import CONTINUES, KIND, SAMPLE, STEPPED, prune_journal
from store.location import free_bytes
from store.names import BUFFER, FROZEN, JOURNAL, SEGMENTS, Fragment, SaveId, segment_dir
from store.schema import digest
from store.segment import SegmentDraft, write_segment
from store.session import require_present
from store.storage.atomic import ensure_dir

_AHEAD, _BYTES = 2, 1 << 28  # records that may be unwritten at a time; more only while they take at most these bytes
_CHANGED = "weights or optimizer state were changed by other means than the optimizer's step"
_PATIENCE = 0.2  # seconds that training waits for a record to be written, before it goes on without the journal


@dataclass
class _Step:
    """Inputs of an optimizer step, copied before it. groups: hyperparameters, as in a run state."""

    members: list[int] = field(default_factory=list)
    groups: list[Mapping[str, Any]] = field(default_factory=list)
    rng: Mapping[str, Any] | None = None
    copies: list[tuple[Fragment, torch.Tensor]] = field(default_factory=list)
    factor: torch.Tensor | float = 1.0  # that the gradients were multiplied by


def kind_with_hooks(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer's module and class, and "with hooks of the script" if such take part in its steps."""
    local = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    shared = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    hooks = (inspect.unwrap(one) for found in (*local, *shared) for one in found.values())
    modules = (getattr(getattr(one, "func", one), "__module__", "") for one in hooks)
    foreign = any(not str(module).startswith("monitor.") for module in modules)
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}{' with hooks of the script' * foreign}"


class JournaledSaver(Saver):
    """Saves, and records the steps in between. Training thread, except :meth:`_write`."""

    def __init__(self, job: JobContext, session: StoreSession) -> None:
        super().__init__(job, session)
        self._journal = session.files.below(JOURNAL)
        self._recorder: BackgroundWorker[None] = BackgroundWorker(f"driftpoint-journal-{job.group.rank}")
        self._names: frozenset[str] = frozenset()  # saves and records of the present state; none: journal interrupted
        self._at = -1  # step of the present state; -1 before the first step, save or resume
        self._step = _Step()
        self._changes = self._updates = 0  # calls that change the state, and those of them that are optimizer steps
        self._versions: object = None
        self._free: dict[tuple[Fragment, torch.dtype], list[torch.Tensor]] = {}
        self._recording: dict[int, _Step] = {}  # by task number, records that are not written yet
        self._recorded = False  # whether there are records of this epoch
        self._last = 0  # task number of the last record
        self._told: set[str] = set()  # reasons for interruptions that were logged
        self._reached: tuple[SaveId | None, deque[int]] = None, deque(maxlen=2)  # last commit, oldest versions of two
        self._pinned, self._mine = torch.cuda.is_available(), 0  # bytes of this rank's part of a save
        if any(group.get("capturable") for one in job.adapter.optimizers() for group in one.param_groups):
            raise UnsupportedError("journal: in CUDA graphs, capturable optimizers step unseen: set capturable=False")
        self._weights: tuple[Any, list[torch.Tensor], list[torch.Tensor]] = None, [], []  # layout, all, frozen ones
        for number, optimizer in enumerate(job.adapter.optimizers()):
            hook = optimizer.register_step_pre_hook(Hook(job.adapter.hooks, partial(self._before_step, number)))
            # Run it first: hooks of the script may change gradients, and will do so again in a replay.
            cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks).move_to_end(hook.id, last=False)
            optimizer.register_step_post_hook(Hook(job.adapter.hooks, lambda *_: self._note_versions()))
        job.adapter.before_change(self._changing)

    def stepped(self, step: int) -> None:
        """Record the step that was just made. Collective."""
        super().stepped(step)
        self._collect_records()
        self._prune_records()
        made, self._step = self._step, _Step()
        self._job.rank_buffers.compare()
        follows, names = step == self._at + 1, self._names
        if step <= self._at:  # the job went back: what it does now needs names of its own
            self._renewing = True
        self._at, self._names = step, frozenset()
        continues = bool(names) and follows and not self._renewing and self._is_whole()
        # Record on all ranks or none: state_dict() of an object may be collective.
        (interrupted,) = self._group.all_reduce_max([not continues])
        if not interrupted:
            self._record(SaveId(step, self._session.epoch), made, names)
        else:
            self._give_back(made)
        self._mark()

    def _segment(self, save: SaveId, decided: DecisionResult) -> tuple[SegmentDraft, Finish, UsageError | None]:
        """Build the segment, which is written after the records of earlier steps, because a composite needs them."""
        segment, finish, error = super()._segment(save, decided)
        if self._at in (-1, save.step):
            self._at = save.step
            if not self._names or self._is_whole():  # otherwise a record of that name holds another state
                self._names |= {save.name}
            self._mark()
        last, until = self._last, time.monotonic() + self._job.config.timeouts.commit

        def after_records(draft: SegmentDraft) -> SegmentDraft:
            while not (self.preempted or time.monotonic() > until or self._recorder.wait(last, _PATIENCE)):
                pass
            return finish(draft)

        return segment, after_records, error

    def resumed(self, certificate: Certificate) -> None:
        """Continue the journal from the resumed state, if a save or record holds exactly it; else at the next save."""
        super().resumed(certificate)
        self._names = frozenset({certificate.save}) if certificate.whole else frozenset()
        self._at, self._step = certificate.step, _Step()
        self._renewing = self._renewing or self._recorded  # the records may be of a branch that this resume leaves
        self._mark()

    def abandon(self, step: int, timeout: float) -> None:
        super().abandon(step, timeout)
        self._recorder.join(timeout)
        self._names = frozenset()  # a resume follows, and may take steps again

    def flush(self, timeout: float) -> None:
        super().flush(timeout)
        self._recorder.join(timeout)

    def close(self, timeout: float, clean: bool) -> None:
        super().close(timeout, clean)
        self._names = frozenset()
        self._recorder.join(timeout)
        self._collect_records()
        self._recorder.stop()

    # ---- before an optimizer step

    def _changing(self) -> None:
        self._changes += 1

    def _before_step(self, number: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._updates += 1
        if not self._names:
            return
        try:
            why = self._refusal(optimizer, args, kwargs) or self._copy_step(number)
        except Exception as error:  # noqa: BLE001 - the edge to the optimizer: training goes on without the journal
            why = f"the gradients could not be copied: {error!r}"
        if why is not None:
            self._interrupt(why)

    def _refusal(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> str | None:
        if self._step.rng is None and not self._has_room():
            return "storage takes longer for a record than training for a step"
        if self._step.rng is None and not self._leaves_space():
            return "what is left of the disk is kept for the next two saves"
        if self._is_changed():
            return _CHANGED
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            return "the optimizer's step is given a closure or other arguments, which a repetition does not have"
        if getattr(optimizer, "grad_scale", None) is not None:
            return "a fused optimizer unscales the gradients itself; set fused=False, or use bfloat16"
        return None

    def _has_room(self) -> bool:
        """Return whether another record may begin, after a short wait for the oldest one under way."""
        for patience in (_PATIENCE, 0.0):
            self._collect_records()
            waiting = sum(copy.nbytes for made in self._recording.values() for _, copy in made.copies)
            if len(self._recording) < _AHEAD or waiting <= _BYTES:
                return True
            self._recorder.wait(min(self._recording), patience)
        return False

    def _leaves_space(self) -> bool:
        table, free = self._job.table, free_bytes(self._session.files)
        if not (table.sizes or self._mine):  # before the first save after a resume
            self._mine = sum(part.layout.nbytes for part in table.local().values())
        full = sum(one.nbytes for one in table.sizes.values()) or self._mine * self._group.world_size
        return free is None or free > 2.1 * full + (1 << 17)  # with their records

    def _copy_step(self, number: int) -> str | None:
        step = self._step
        groups, pieces, factor = self._job.adapter.step_inputs(number)
        # Copied now, as the gradients are: reading it from the device later would wait for work that training queued.
        step.factor = torch.as_tensor(factor, dtype=torch.float32).to("cpu", non_blocking=self._pinned)
        if {fqn for group in step.groups for fqn in group["params"]} & {fqn for one in groups for fqn in one["params"]}:
            return "an optimizer took two steps between two calls of ckpt.step()"
        step.rng = step.rng or capture_rng()
        step.members += [number] * (number not in step.members)
        kind = kind_with_hooks(self._job.adapter.optimizers()[number])
        step.groups += ({**one, KIND: kind} for one in groups)
        step.copies += map(self._copied, pieces)
        return None

    def _copied(self, piece: Piece) -> tuple[Fragment, torch.Tensor]:
        fragment, tensor = piece.fragment, piece.tensor
        free = self._free.setdefault((fragment, tensor.dtype), [])
        if not free:
            free.append(torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=self._pinned))
        return fragment, free.pop().copy_(tensor, non_blocking=self._pinned)

    # ---- after it

    def _record(self, save: SaveId, made: _Step, names: frozenset[str]) -> None:
        """Add the present run state, and submit the record to the background thread."""
        job, rank = self._job, self._group.rank
        try:
            # Without an identity, frozen weights may be left out of saves: owned() raises if they changed.
            if job.adapter.identity() is None or any(one.kind == "buffer" for one in job.adapter.tensors().values()):
                made.copies += (self._copied(one) for one in job.adapter.owned() if one.fragment.slot == BUFFER)
            state = capture_run_state(job.adapter, job.user, rank, job.rank_buffers)
            stepped = {"members": made.members, "groups": made.groups, "rng": made.rng}
            stepped["framework"] = job.adapter.framework  # tells how ranks share a tensor
            sampled = sample(self._live_weights()[0])
            copies = lambda: {**state.copies(), SAMPLE: sampled}  # noqa: E731
            encode = begin_tree(CapturedState({**state.live, STEPPED: stepped}, copies))
        except Exception as error:  # noqa: BLE001 - the edge to the user's own objects; a save reports it as well
            self._interrupt(f"the state could not be captured: {error!r}")
            self._give_back(made)
            return
        copied = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        if copied is not None:
            copied.record()
        facts = {CONTINUES: sorted(names)} if rank == 0 else {}
        store_id, size = self._session.catalog.store_id, self._group.world_size
        level = 1 if job.config.packing == "auto" else None if job.config.packing == "none" else job.config.packing
        plan, records = digest(f"journal {self.checker.ranks.mark}".encode()), job.table.tensor_records()
        draft = SegmentDraft(store_id, save, rank, size, plan, (), None, (), facts, tuple(job.adapter.unsaveable()))

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            tree, leaves = encode()
            encode_one = partial(encode_gradient, factor=float(made.factor), level=level)
            fragments = [encode_one(records[one.fqn].layer, one, copy) for one, copy in made.copies]
            self._write(replace(draft, fragments=fragments, run_state=tree, run_leaves=leaves))

        self._last = self._recorder.submit(write)
        self._recording[self._last] = made
        self._names, self._recorded = frozenset({save.name}), True

    def _write(self, draft: SegmentDraft) -> None:
        """Write a record, durable on return. Background thread."""
        require_present(self._session.files, draft.save.epoch)
        ensure_dir(self._session.files, f"{JOURNAL}/{SEGMENTS}")  # a killed job may have made, but not synced them
        write_segment(self._journal, draft)
        self._journal.sync_dir(segment_dir(draft.save))
        self._journal.sync_dir(SEGMENTS)

    def _prune_records(self) -> None:
        """After a commit, remove the records before the oldest version of this commit and the one before."""
        (last, needed), ledger = self._reached, self._job.ledger
        if self._group.rank == 0 and ledger.newest is not None and ledger.newest != last:
            needed.append(min((one.version.step for one in ledger.versions.values() if one.moving), default=0))
            self._reached, least = (ledger.newest, needed), min(needed) if len(needed) > 1 else 0
            prune = partial(prune_journal, self._journal, self._session.files, self._session.epoch, least)
            self.upkeep(prune, "removing records of the journal")

    def _is_whole(self) -> bool:
        """Return whether only optimizer steps changed the state since the last :meth:`_mark`."""
        changed = self._changes != self._updates or self._is_changed()
        if changed:
            self._interrupt(_CHANGED)
        return not changed

    def _is_changed(self) -> bool:
        return self._versions is not None and self._read_versions() != self._versions

    def _note_versions(self) -> None:
        self._versions = self._read_versions() if self._names else None

    def _read_versions(self) -> object:
        with suppress(Exception), self._job.adapter.cache_lookups():  # a tensor cannot be saved: a save reports it
            return self._job.adapter.state_versions(), list(map(version_of, self._live_weights()[1]))
        return object()  # equal to nothing

    def _live_weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the memory of all weights on this rank, and of the frozen ones, which no optimizer may change."""
        identity = self._job.adapter.identity()
        if identity is None or identity.layout is not self._weights[0]:
            held = self._job.adapter.held()
            frozen = [one for one in held if one.fragment.slot == FROZEN]
            self._weights = identity and identity.layout, weights_of(held), weights_of(frozen)
        return self._weights[1:]

    def _mark(self) -> None:
        self._changes = self._updates = 0
        self._note_versions()

    def _interrupt(self, why: str) -> None:
        self._names = frozenset()
        message = "" if why in self._told else f"the journal is interrupted, and goes on from the next save: {why}"
        self._told.add(why)
        self._listeners.on_background_failure(BackgroundFailureEvent("journal", message))

    def _collect_records(self) -> None:
        for done in self._recorder.finished():
            self._give_back(self._recording.pop(done.number, _Step()))
            if done.error is not None:
                self._interrupt(f"a record could not be written: {done.error}")

    def _give_back(self, made: _Step) -> None:
        for fragment, copy in made.copies:
            self._free[fragment, copy.dtype].append(copy)
