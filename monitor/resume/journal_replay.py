"""Bring a resumed state forward: repeat the optimizer steps that the journal recorded, with the job's own optimizer.

All ranks read and check each record while the step before it is repeated; at a damaged one, all stop at the step
before, which is whole. The versions of a composite are from several steps: the replay begins at the oldest, and sets
each unit to its version at that step, so it ends with a state of one step. Training thread, in a resume; collective."""

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from monitor.adapters.base import FragmentPlace, Gradient, sample, weights_of
from monitor.adapters.hyperparameters import IMPLEMENTATION
from monitor.context import JobContext
from monitor.distributed import run_on_all_ranks, run_on_rank0
from monitor.memory.recovery import MemoryCandidate
from monitor.observe.units import is_moving
from monitor.resume.read import OpenPayloads, ReadResult, read_fragments
from monitor.resume.resume import LiveState, ResumeResult, resume_memory_or_store, with_own_scalars, with_rank_buffers
from monitor.resume.select import RunStateRead, read_own_run_state, read_tree
from monitor.run_state import StateLoader, capture_rng, restore_rng
from store.catalog import Catalog
from store.certificate import FOUND
from store.errors import CollectiveError, DamagedError, DriftpointError, NothingToResumeError, StorageError
from store.fragments import FragmentIndex, Source
from store.journal import (
    SAMPLE,
    STEPPED,
    Chain,
    JournalStep,
    find_chain,
    fragments_of,
    journal_catalog,
    recorded,
    unreached,
)
from store.names import BUFFER, GRADIENT, WEIGHTS, SaveId, Unit
from store.resolve import RejectedVersion, Resolution, ancestors, left_branches, newest_resumable
from store.text import listed

_log = logging.getLogger("driftpoint")

_ELEMENTWISE = frozenset(
    {"SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Lion"}
    | {"FusedAdam", "FusedLion", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"}
)
"""Classes of optimizers that update each element from that element's own gradient and state."""

_ELSEWHERE = (
    "the steps in the journal were taken by other ranks, another partition, or another implementation of the "
    "optimizer (foreach, fused), so last bits may differ"
)

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of mallopt(3)

_Gradients = Sequence[Sequence[Gradient]]


@dataclass(frozen=True)
class _Record:
    """A record for one rank. same: it recorded what it updates now. whole: each rank has all weights, then and now."""

    step: JournalStep
    stepped: Mapping[str, Any]  # see :data:`store.journal.STEPPED`
    values: ReadResult
    after: RunStateRead
    sample: torch.Tensor
    gradients: _Gradients  # of each optimizer, of which :attr:`trained` have values
    trained: Set[str]
    same: bool
    whole: bool
    differs: Sequence[str]  # state that no record holds, found on any rank


def resume_with_journal(
    job: JobContext,
    live: LiveState,
    attempt: Callable[..., ResumeResult | None],
    catalog: Catalog,
    snapshot: MemoryCandidate | None,
    *,
    step: int | None = None,
) -> ResumeResult | None:
    """Resume as :func:`monitor.resume.resume.resume_memory_or_store`, and follow the journal. Collective.

    step: goes back to the state of this step, exactly, or raises NothingToResumeError or DriftpointError."""
    journal = journal_catalog(catalog)
    following = partial(attempt, follow=partial(chain_of, journal=journal, job=job, step=step))
    result = resume_memory_or_store(following, catalog, snapshot)
    if result is None and step is not None:
        raise NothingToResumeError(f"the store holds no commit, so there is no step {step} to go back to")
    if result is not None and result.chain is not None:
        live.mixed = True  # until the last step is taken, or all is loaded once more
        try:
            result = run_on_all_ranks(job.group, partial(Replay, job, journal, result.chain, result)).run()
        except CollectiveError:
            raise
        except Exception as error:  # noqa: BLE001 - the same on all ranks, which resume without the journal instead
            _log.warning("resume: the steps in the journal cannot be taken again: %s", error)
            result = None
        if result is None and step is None:
            return resume_memory_or_store(partial(attempt, follow=lambda *_: None), catalog, snapshot)
    if step is None or (result is not None and result.resume_point.save.step == step):
        live.mixed = live.mixed and result is None
        if step is None or result is None:
            return result
        left = run_on_rank0(job.group, partial(_is_left, catalog, result.resume_point.save))
        note = f"step {step}, {result.resume_point.save}, {'is' if left else 'may be'} of a branch that the job left"
        return result if left is False else replace(result, notes=(*result.notes, note))
    live.mixed = True
    raise DriftpointError(f"step {step} cannot be reached, for a record before it is damaged: call resume() again")


def chain_of(
    catalog: Catalog,
    resolution: Resolution,
    bad: Set[RejectedVersion],
    not_followed: Mapping[SaveId, str],
    *,
    journal: Catalog,
    job: JobContext,
    step: int | None,
) -> Chain | frozenset[SaveId] | None:
    """Return the records that continue a commit, the same on all ranks. Collective.

    Return the commits to pass over instead, if records lead from an older commit to the wanted step and not from this
    one: because slots of it are damaged, it is in ``not_followed`` (commits that the journal cannot continue, and why),
    or ``step`` is before it. Raises NothingToResumeError if no commit leads to ``step``, or only one of a branch that
    the job left, although its newest branch went as far."""
    wanted = resolution.manifest.step if step is None else step

    def find() -> Chain | frozenset[SaveId] | None:
        found, passed = resolution, set[SaveId]()
        left = None if step is None else left_branches(catalog)
        known = () if left is None else {*catalog.saves(), *recorded(journal.files)}
        strict = any(left is not None and save.step >= wanted and left(save) is False for save in known)
        while True:
            chain = None if found.manifest.save in not_followed else _find_chain(journal, job, found, step)
            if step is None and not passed and (chain is not None or not (found.fallbacks or not_followed)):
                return chain
            whole = not found.fallbacks and found.manifest.oldest == found.manifest.save
            reached = chain.steps[-1].save if chain else found.manifest.save
            there = wanted == (found.manifest.step if whole else -1) or (chain and reached.step >= wanted)
            if there and not (strict and left and left(reached)):
                return frozenset(passed) or chain
            passed.add(found.manifest.save)
            if step is None and len(passed) == 1:  # and those of branches that a rollback abandoned
                passed |= set(catalog.saves()) - {one.save for one in ancestors(catalog, found.manifest, [])}
            try:
                found, _ = newest_resumable(catalog, bad, passed)
            except NothingToResumeError:
                if step is None:
                    return None
                why = f"no commit is of step {step}, and the journal does not lead to it"
                why += ", on the branch that the job is on" * strict
                raise NothingToResumeError("; ".join([why, *not_followed.values()])) from None

    return run_on_rank0(job.group, find)


def _is_left(catalog: Catalog, save: SaveId) -> bool | None:
    """Return as :func:`store.resolve.left_branches`; None, too, if that cannot be read: the state is loaded by now."""
    with suppress(DamagedError, StorageError):
        return left_branches(catalog)(save)
    return None


def _find_chain(journal: Catalog, job: JobContext, resolution: Resolution, step: int | None) -> Chain | None:
    """Return the records that continue a commit, up to ``step``. Not collective.

    None for a composite that they cannot bring forward: a layer's weights need the moments of the same step, and an
    optimizer that does not update each element on its own would mix layers of several steps."""
    moving = [(unit, version.save) for unit, version in resolution.versions.items() if is_moving(unit)]
    versions, commit = {save for _, save in moving}, resolution.manifest.save
    of_layer = {unit.layer: save for unit, save in moving}
    one_per_layer = all(of_layer[unit.layer] == save for unit, save in moving)
    elementwise = all(type(one).__name__ in _ELEMENTWISE for one in job.adapter.optimizers())
    if (versions - {commit} and not (one_per_layer and elementwise)) or (step is not None and step < commit.step):
        return None
    try:
        chain = find_chain(journal, commit, versions)
        last = chain.steps[-1].save if chain else commit
        if step is None and (newest := unreached(journal, last)) is not None:
            _log.warning("resume: no whole records lead on from step %d of the journal's %d", last.step, newest)
        steps = () if chain is None else tuple(one for one in chain.steps if step is None or one.save.step <= step)
        return replace(chain, steps=steps) if chain and steps else None
    except StorageError as error:  # the commit can be read, and is enough
        _log.warning("resume: the journal cannot be read: %s", error)
        return None


class Replay:
    """Repeats the steps of a chain of records, from the state of a resume."""

    def __init__(self, job: JobContext, journal: Catalog, chain: Chain, result: ResumeResult) -> None:
        self._job, self._journal, self._chain, self._result = job, journal, chain, result
        self._payloads = OpenPayloads(journal.files)
        self._held = job.adapter.held()
        self._gradients = [self._new_gradients()]  # a record is read into one while the step of another is taken
        self._to_host = all(one.memory.device.type == "cpu" for optimizer in self._gradients[0] for one in optimizer)
        self._gradients += [self._new_gradients()] * self._to_host
        self._owned = {
            piece.fragment._replace(slot=GRADIENT) for piece in job.adapter.owned() if piece.fragment.slot == WEIGHTS
        }
        self._rng = capture_rng()
        trained = {fqn for fqn, info in job.adapter.tensors().items() if info.kind == "trainable"}
        groups = job.adapter.run_state()["param_groups"]
        self._implementations = {fqn: _implementation(one) for one in groups for fqn in trained & {*one["params"]}}

    def run(self) -> ResumeResult | None:
        """Return the result of the last whole step; None if that is before the newest version of a composite."""
        newest, taken, same = max(self._result.resolution.manifest.step, self._result.least), list[_Record](), True
        later = run_on_all_ranks(self._job.group, self._later_versions)
        with self._payloads, _freed_memory_kept(), ThreadPoolExecutor(1, "driftpoint-journal") as pool:
            for reading in self._read_ahead(pool):
                record = run_on_all_ranks(self._job.group, reading.result)
                whole = self._job.group.all_gather(record is not None)  # on each rank
                if record is None or not all(whole):
                    break
                run_on_all_ranks(self._job.group, partial(self._repeat_step, record))
                self._set_versions(later.pop(record.step.save.step, ()))
                same = same and record.same
                taken = [record]
        done = self._chain.oldest if not taken else taken[0].step.save.step
        if done < newest:
            return None
        if not taken:
            return self._result
        run_on_all_ranks(self._job.group, partial(self._check_sample, taken[0], same))
        return self._finish(taken[0], done - self._chain.oldest, same)

    def _read_ahead(self, pool: ThreadPoolExecutor) -> Iterator["Future[_Record | None]"]:
        """Yield the records in order, each while the next one is being read."""
        reading = zip(self._chain.steps, cycle(self._gradients), strict=False)
        waiting = [pool.submit(self._read, *one) for one in islice(reading, 1)]
        for one in reading:
            waiting.append(pool.submit(self._read, *one))
            yield waiting.pop(0)
        yield from waiting

    def _read(self, step: JournalStep, gradients: _Gradients) -> _Record | None:
        """Read and check a record; return None if it is damaged. Not collective; any thread."""
        try:
            after = read_own_run_state(self._journal, step.save, step.record, self._job.group.rank)
            parts = self._journal.group(step.save, step.record).parts
            if after.state is None or len(parts) < step.record.world_size:
                raise DamagedError(after.problem or "parts are missing")
            own_part, index = parts.get(self._job.group.rank), fragments_of(parts)
            tree = read_tree(self._journal, own_part or parts[0])
            stepped, sampled = tree[STEPPED], tree[SAMPLE]
            values = read_fragments(self._payloads, index, self._places(index, gradients))
            if values.bad:
                raise DamagedError("its bytes do not match their hashes")
            recorded = {fqn for fqn, slot in index.names() if slot == GRADIENT}
            before = {fqn: _implementation(one) for one in stepped["groups"] for fqn in recorded & {*one["params"]}}
            if unknown := sorted(before.keys() - self._implementations.keys()):
                raise DamagedError(f"it trains {listed(unknown)}, which the optimizer of this job does not")
        except (DamagedError, StorageError, KeyError) as error:
            _log.warning("the journal is followed up to step %d: that of the next: %s", step.save.step - 1, error)
            return None
        entries = own_part.entries if own_part else ()
        recorded_here = {entry.fragment for entry in entries if entry.slot == GRADIENT}
        replicas = self._job.adapter.framework == stepped.get("framework") == "torch"  # each rank holds all of it
        same = replicas or recorded_here == {one for one in self._owned if one.fqn in recorded}
        same = same and all(self._implementations[fqn] == one for fqn, one in before.items())
        differs = list(dict.fromkeys(f"{FOUND} {text}" for part in parts.values() for text in part.differs))
        return _Record(step, stepped, values, after, sampled, gradients, recorded, same, replicas, differs)

    def _new_gradients(self) -> _Gradients:
        adapter = self._job.adapter
        return [adapter.new_gradients(number) for number in range(len(adapter.optimizers()))]

    def _places(self, index: FragmentIndex[Source], gradients: _Gradients) -> list[FragmentPlace]:
        """Return the places that this rank reads of a record: in the memory of ``gradients``, or in new memory."""
        buffers = ((one, None) for one in self._held if one.fragment.slot == BUFFER)
        pieces = (piece for optimizer in gradients for one in optimizer for piece in one.pieces)
        return [
            FragmentPlace(piece.fragment, piece.tensor.dtype, new=True, memory=memory)
            for piece, memory in (*((one, one.tensor if self._to_host else None) for one in pieces), *buffers)
            if piece.fragment.numel and piece.fragment[:2] in index.names()
        ]

    def _later_versions(self) -> dict[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return (live tensor, its version) of the pieces that the replay reaches later, by step."""
        manifest, by_step = self._result.resolution.manifest, dict[int, list[tuple[torch.Tensor, torch.Tensor]]]()
        for piece in self._held:
            unit = Unit(manifest.tensors[piece.fragment.fqn].layer, piece.fragment.slot)
            version = self._result.resolution.versions.get(unit)
            if version is not None and is_moving(unit) and version.save.step > self._chain.oldest:
                memory = piece.tensor if piece.target is None else piece.target
                by_step.setdefault(version.save.step, []).append((memory, memory.detach().clone()))
        return by_step

    @torch.no_grad()
    def _set_versions(self, versions: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tensor, values in versions:
            tensor.copy_(values)

    def _repeat_step(self, record: _Record) -> None:
        read, groups = record.values.values, record.stepped["groups"]
        if record.stepped["rng"] is not None:
            restore_rng(record.stepped["rng"])
        for number in record.stepped["members"]:
            pieces = [piece for one in record.gradients[number] for piece in one.pieces]
            for piece in pieces:
                if piece.fragment.fqn not in record.trained:
                    piece.tensor.zero_()  # it holds values of another record
            values = {piece.fragment: read[piece.fragment] for piece in pieces if piece.fragment in read}
            replace(record.values, values=values).load(pieces)
            self._job.adapter.repeat_step(number, groups, record.trained, record.gradients[number])

    def _check_sample(self, last: _Record, same: bool) -> None:
        """Raise DamagedError if a sample of the weights differs from that recorded after the last step."""
        # A rank without gradients is ``same``, although it may hold other weights than the rank that recorded them.
        same = same and (last.whole or last.step.record.world_size == self._job.group.world_size)
        if same and not torch.equal(sample(weights_of(self._job.adapter.held())).cpu(), last.sample):
            why = "which were also changed by other means than the optimizer's step, or computed elsewhere"
            raise DamagedError(f"they do not lead to the weights of step {last.step.save.step}, {why}")

    def _finish(self, last: _Record, steps: int, same: bool) -> ResumeResult:
        job, group, result = self._job, self._job.group, self._result
        assert last.after.state is not None
        state, generators = with_own_scalars(last.after.state, job.adapter), last.after.generators
        point = replace(result.resume_point, save=last.step.save, state=state, world_size=last.step.record.world_size)
        point, *_ = run_on_all_ranks(group, partial(result.reconcile, point))
        state = point.state
        loader = run_on_all_ranks(
            group, lambda: StateLoader(state, job.adapter, job.user, generators, before=job.adapter.run_state())
        )
        run_on_all_ranks(group, loader.load)

        def load() -> None:
            places = [FragmentPlace(one.fragment, one.tensor.dtype) for one in self._held]
            buffers = {fragment: value for fragment, value in last.values.values.items() if fragment.slot == BUFFER}
            read = with_rank_buffers(replace(last.values, values=buffers), state, places)
            read.load(self._held)
            job.adapter.load_run_state(state.framework)

        run_on_all_ranks(group, load)
        job.adapter.finish_load()
        restore_rng(state.rng if generators and state.rng is not None else self._rng)
        lost = (*last.differs, *(() if all(group.all_gather(same)) else (_ELSEWHERE,)))
        notes = (*result.notes, *lost)
        return replace(result, resume_point=point, notes=notes, lost=(*result.lost, *lost), replayed=steps)


@contextmanager
def _freed_memory_kept() -> Iterator[None]:
    """Let malloc keep freed memory for reuse: each step's temporaries are as large as the state.

    By default glibc maps such memory anew each time, and page faults take longer than the optimizer's arithmetic."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim") or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        yield
        return
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
    try:
        yield
    finally:  # as glibc's own adjustment leaves them in a process that frees large tensors
        libc.mallopt(_MMAP_MAX, 1 << 16)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 26)
        libc.malloc_trim(0)


def _implementation(group: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: group["hyper"].get(key) for key in IMPLEMENTATION}
