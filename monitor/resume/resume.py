"""Resume in place: agree on a commit, read and check everything on all ranks, then change the live state.

All checks run before the first change, so a refused resume leaves the job unchanged. A unit whose bytes do not match
their hash falls back to its previous version on all ranks alike. Training thread, before training; collective."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from monitor.adapters.base import Adapter, FragmentPlace
from monitor.adapters.hyperparameters import Constructed, other_members, reconcile, reconcile_schedule
from monitor.adapters.module_tensors import extra_states
from monitor.adapters.optimizer_state import NOT_STATE
from monitor.config.schema import ResumeSettings
from monitor.context import JobContext
from monitor.distributed import Group, run_on_all_ranks, run_on_rank0
from monitor.events import ResumeEvent
from monitor.memory.recovery import MemoryCandidate, newest_on_disk
from monitor.observe.units import LocalUnit, is_moving
from monitor.resume import select
from monitor.resume.read import OpenPayloads, ReadResult, Slots, encoding_loss, read_fragments
from monitor.run_state import RunState, StateLoader, UserState, restore_rng, state_of, unrestored_state
from store.catalog import Catalog
from store.certificate import Certificate, certify_replayed, certify_stored, mark_memory_sources
from store.errors import DamagedError, DriftpointError, ModelMismatchError, NothingToResumeError, StorageError
from store.journal import Chain
from store.names import BUFFER, SaveId, Unit
from store.resolve import RejectedVersion, Resolution
from store.schema import digest, seal
from store.text import listed

_log = logging.getLogger("driftpoint")

T = TypeVar("T")


@dataclass(frozen=True)
class ResumeResult:
    """The state that a job was resumed to."""

    resolution: Resolution
    resume_point: select.ResumePoint
    notes: tuple[str, ...]  # messages about everything damaged, skipped or converted
    lost: tuple[str, ...]
    """Values that the live dtypes or the optimizer cannot hold, stored state that was not restored, and live state that
    the store lacks, on any rank. If not empty, the state is not exact."""
    memory: SaveId | None = None  # the in-memory snapshot that was resumed, if any
    kept: frozenset[SaveId] = frozenset()  # that snapshot, and an older one that parts of the state come from
    replicas: frozenset[int] = frozenset()  # ranks of the snapshot that were read from a peer's replica
    passed_over: int = 0  # newer commits that were not used, since they are damaged or suspect
    chain: Chain | None = None  # records of the journal that continue it
    least: int = -1  # step that the chain must reach: that of the newer commit that was passed over for it
    replayed: int = 0  # steps repeated from the chain
    reconcile: Callable[[select.ResumePoint], tuple[Any, ...]] = lambda point: (point,)
    """Settles differences in hyperparameters in another resume point, as it was done for that of the commit."""


@dataclass
class LiveState:
    """Whether the job's state is a mixture of old and loaded values, because a resume ended midway."""

    mixed: bool = False


@dataclass(frozen=True)
class _Plan:
    """A complete commit, and where its values go on this rank."""

    resolution: Resolution
    slots: Slots
    places: Sequence[FragmentPlace]
    before: Mapping[str, Any]  # the framework's run state


@dataclass(frozen=True)
class _Checked:
    """All that a resume loads on this rank, and what it loses."""

    point: select.ResumePoint
    read: ReadResult
    lost: tuple[str, ...]
    constructed: Constructed  # which later saves record


def resume(
    catalog: Catalog,
    adapter: Adapter,
    group: Group,
    user: UserState,
    *,
    settings: ResumeSettings,
    live: LiveState,
    follow: Callable[..., Chain | frozenset[SaveId] | None] | None = None,
) -> ResumeResult | None:
    """Load the newest resumable commit into the live job. Collective. Return None if the store has no commits.

    ``live`` records changes to the live state. follow: finds the records of the journal that continue a commit; see
    :func:`monitor.resume.journal_replay.chain_of`. With them, the run state is that of the commit's oldest version.

    Raises as :meth:`monitor.checkpointer.Checkpointer.resume`. Only if copying the checked values failed midway, which
    is another DriftpointError, has anything changed."""
    bad: frozenset[RejectedVersion] = frozenset()
    notes, skip, not_followed, least = list[str](), frozenset[SaveId](), dict[SaveId, str](), -1
    while True:
        chosen: list[Resolution] = []  # on rank 0
        name, passed_over, newer = run_on_rank0(group, partial(select.select_commit, catalog, bad, chosen, skip))
        if name is None:
            return None
        if not chosen:
            catalog.forget()
        with OpenPayloads(catalog.files) as payloads:
            with adapter.cache_lookups():  # nothing changes until _load()
                plan = run_on_all_ranks(group, partial(_plan, catalog, SaveId.parse(name), bad, adapter, chosen))
                chain = None if follow is None else follow(catalog, plan.resolution, bad, not_followed)
                if isinstance(chain, frozenset):
                    skip, least, notes = chain, plan.resolution.manifest.step, [*notes, *plan.resolution.problems]
                    continue
                at = None if chain is None else chain.oldest
                checked = _check(catalog, plan, payloads, adapter, group, user=user, settings=settings, at=at)
            if isinstance(checked, frozenset):
                bad, skip, not_followed, least = bad | checked, frozenset(), {}, -1
                notes += [one.why for one in checked if one.why]
                continue
            if isinstance(checked, str):
                skip, least, not_followed[plan.resolution.manifest.save] = frozenset(), -1, checked
                continue
            point, problems = checked.point, plan.resolution.problems
            notes += [*passed_over, *problems, *point.notes, *checked.read.notes, *checked.lost]
            notes += run_on_all_ranks(group, partial(_object_notes, point.state, user, plan.before))
            if follow is None:
                notes += run_on_rank0(group, partial(select.records_ahead, catalog, plan.resolution.manifest.save))
            shared = _over_ranks(group, _load(plan, checked, adapter, user=user, group=group, live=live))
            user.recorded = checked.constructed
        notes, lost = list(dict.fromkeys([*not_followed.values(), *notes, *shared])), (*checked.lost, *shared)
        least = -1 if chain is None else min(least, chain.steps[-1].save.step)
        result = ResumeResult(plan.resolution, point, tuple(notes), lost, passed_over=newer, chain=chain, least=least)
        return replace(result, reconcile=partial(_reconciled, plan=plan, user=user, settings=settings))


def _check(
    catalog: Catalog,
    plan: _Plan,
    payloads: OpenPayloads,
    adapter: Adapter,
    group: Group,
    *,
    user: UserState,
    settings: ResumeSettings,
    at: int | None,
) -> _Checked | frozenset[RejectedVersion] | str:
    """Read, check and return all that a plan loads; or return unusable versions, or why the state of ``at`` is."""
    _require_same_versions(plan.resolution, group)
    local = sorted({place.fragment.slot for place in plan.places})
    params = [fqn for group in plan.before["param_groups"] for fqn in group["params"]]
    names = local, params if group.rank in adapter.leaders else [], list(extra_states(adapter.module))
    live, held, modules = (set[str]().union(*of_ranks) for of_ranks in zip(*group.all_gather(names), strict=True))
    select.require_slots({slot for slots in plan.slots.values() for slot in slots}, live)
    point = select.select_run_state(catalog, plan.resolution, plan.slots, group, user=user, settings=settings, at=at)
    if isinstance(point, RejectedVersion):
        return frozenset({point})
    if at not in (None, point.save.step):
        return f"the journal is not followed from {plan.resolution.manifest.save}: {'; '.join(point.notes)}"
    point = replace(point, state=with_own_scalars(point.state, adapter))
    dropped = run_on_all_ranks(group, partial(_dropped_state, point, plan, adapter, settings, held))
    others, flags = run_on_all_ranks(group, partial(_members, point, plan, adapter, held))
    point = replace(point, notes=(*point.notes, *_over_ranks(group, flags)))
    read = run_on_all_ranks(group, partial(read_fragments, payloads, plan.resolution.index, plan.places))
    bad: frozenset[RejectedVersion] = frozenset().union(*group.all_gather(read.bad))
    if bad:
        return bad
    read = run_on_all_ranks(group, partial(with_rank_buffers, read, point.state, plan.places))
    rounded = _over_ranks(group, read.rounded)
    unrestored = _over_ranks(group, run_on_all_ranks(group, partial(_unrestored, point, adapter, group, modules)))
    saved = point.state.user
    objects = _over_ranks(group, run_on_all_ranks(group, lambda: [] if saved is None else user.notes(saved)))
    lost = (*dropped, *_over_ranks(group, others), *rounded, *unrestored, *objects)
    run_on_all_ranks(group, lambda: _check_run_state(point.state, plan, adapter))
    chosen, notes, constructed = run_on_all_ranks(group, partial(_reconciled, point, plan, user, settings))
    if settings.hyperparameters == "store":
        return _Checked(replace(chosen, notes=(*chosen.notes, *notes)), read, lost, constructed)
    return _Checked(chosen, read, (*lost, *_over_ranks(group, notes)), constructed)


def _reconciled(
    point: select.ResumePoint, plan: _Plan, user: UserState, settings: ResumeSettings
) -> tuple[select.ResumePoint, Sequence[str], Constructed]:
    """Return the resume point with the hyperparameters to go on with, and their differences."""
    state, live, prefer = point.state, plan.before, settings.hyperparameters
    framework, constructed, notes = reconcile(state.framework, live["param_groups"], user.script.groups, prefer)
    recorded, objects = dict[str, Any](), {id(one): one for one in state.user or ()}
    saved = {user.label(index): one for index, one in enumerate(user.match(state.user) if state.user else ()) if one}
    for label, now in user.script.schedules.items():
        one, before = saved.get(label), framework.get("schedules", {}).get(label)
        old, new = (
            (framework.get(label), live.get(label)) if one is None else (one.state, state_of(user.schedules[label]))
        )
        settled, recorded[label], lines = reconcile_schedule(label, old, new, before=before, now=now, prefer=prefer)
        if one is not None:
            objects[id(one)] = replace(one, state=settled)
        elif old is not None:
            framework = {**framework, label: settled}
        notes = (*notes, *lines)
    state = replace(state, user=state.user and tuple(objects.values()), framework=framework)
    return replace(point, state=state), notes, Constructed(constructed, recorded)


def _dropped_state(
    point: select.ResumePoint, plan: _Plan, adapter: Adapter, settings: ResumeSettings, held: Set[str]
) -> list[str]:
    """Return a note on stored optimizer state whose parameters no live optimizer holds. The same on all ranks.

    held: parameters in the optimizers of all pipeline stages. Those without elements have nothing to lose. Raises
    ModelMismatchError if nothing may be dropped."""
    stored = {fqn for fqn, by_slot in plan.slots.items() if by_slot.keys() - NOT_STATE}
    stored |= {fqn for fqn, scalars in (point.state.framework.get("scalars") or {}).items() if scalars}
    infos = adapter.tensors()
    unused = sorted(fqn for fqn in infos.keys() & (stored - held) if math.prod(infos[fqn].shape) > 0)
    if unused and settings.unused_state == "refuse":
        raise ModelMismatchError(
            f"the store has optimizer state of {listed(unused)}, and this optimizer does not hold "
            f"{'that parameter' if len(unused) == 1 else 'these parameters'}, so it would be lost. If the run that was "
            "saved unfroze layers on its way, do the same (optimizer.add_param_group) before resume(); a parameter may "
            "be in a param group and stay frozen. To go on without that state, set `resume: {unused_state: drop}`"
        )
    return [f"the optimizer state of {listed(unused)} was dropped (`unused_state: drop`)"] if unused else []


def _members(point: select.ResumePoint, plan: _Plan, adapter: Adapter, held: Set[str]) -> tuple[list[str], list[str]]:
    tensors = plan.resolution.manifest.tensors, adapter.tensors()
    before, now = ({fqn: one.kind for fqn, one in found.items() if math.prod(one.shape)} for found in tensors)
    return other_members(point.state.framework["param_groups"], plan.before["param_groups"], held, before, now)


def _plan(
    catalog: Catalog, save: SaveId, bad: frozenset[RejectedVersion], adapter: Adapter, chosen: Sequence[Resolution]
) -> _Plan:
    adapter.check_attached()
    resolution = chosen[0] if chosen else select.resolve_commit(catalog, save, bad)
    select.require_model(resolution.manifest, adapter)
    slots = resolution.slots()
    return _Plan(resolution, slots, adapter.expected(slots), adapter.run_state())


def _require_same_versions(resolution: Resolution, group: Group) -> None:
    """Raise StorageError unless all ranks resolved the same versions: otherwise they would load a mixture."""
    units = [[str(unit), version.record.save, *version.record.bases] for unit, version in resolution.versions.items()]
    views = group.all_gather(digest(seal([resolution.manifest.save.name, units])))
    differing = [rank for rank, view in enumerate(views) if view != views[0]]
    if differing:
        raise StorageError(
            f"rank {differing[0]} and rank 0 resolved different versions from the store, so one of them cannot read "
            "files that the other can. Nothing was resumed. Check that both see the same mount, then restart the job"
        )


def _over_ranks(group: Group, messages: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(set().union(*group.all_gather(list(messages)))))


def with_rank_buffers(read: ReadResult, state: RunState, places: Sequence[FragmentPlace]) -> ReadResult:
    """Replace rank 0's buffers by this rank's own, which its run state holds if they differed."""
    buffers = {place.fragment.fqn: place for place in places if place.fragment.slot == BUFFER}
    values, rounded = dict(read.values), list(read.rounded)
    for fqn, tensor in state.buffers.items():
        place = buffers.get(fqn)
        if place is None or place.fragment.numel != tensor.numel():
            raise ModelMismatchError(
                f"the store holds {fqn} of this rank with {tensor.numel()} elements, and this model has "
                f"{0 if place is None else place.fragment.numel}: set another `store:`, or fix the model"
            )
        values[place.fragment] = flat = tensor.reshape(-1)
        loss = encoding_loss(flat, place)
        rounded += [] if loss is None else [loss]
    return replace(read, values=values, rounded=tuple(rounded))


def with_own_scalars(state: RunState, adapter: Adapter) -> RunState:
    """Replace rank 0's scalars by this rank's own, if it holds the same tensors as when they were saved."""
    scalars, own = state.framework["scalars"], state.rank_scalars if state.home == adapter.home else {}
    merged = {**scalars, **{fqn: {**scalars.get(fqn, {}), **found} for fqn, found in own.items()}}
    return replace(state, framework={**state.framework, "scalars": merged})


def _unrestored(point: select.ResumePoint, adapter: Adapter, group: Group, modules: Set[str]) -> list[str]:
    notes = unrestored_state(point.state, adapter, point.generators, modules)
    fewer, moved = point.world_size != group.world_size, point.state.home != adapter.home
    names = [name for name in point.state.rank_buffers if fewer or (moved and "/" in name)]  # of an optimizer
    if names:
        notes.append(
            f"the ranks had different values of {listed(names)}, and the run was saved on {point.world_size} ranks, or "
            "another mesh: other ranks get the values of rank 0, and those of ranks that are not here are not restored"
        )
    return notes


def _object_notes(state: RunState, user: UserState, live: Mapping[str, Any]) -> list[str]:
    """Describe run state that the commit lacks, as an imported one does, or that another optimizer class takes."""
    notes = []
    was, now = state.framework.get("optimizer"), live.get("optimizer")
    if was and was != now and " + " not in f"{was}{now}":  # of several, each parameter's is compared
        notes.append(f"the optimizer state was saved by {was}, and {now} goes on with it")
    if state.rng is None:
        notes.append(
            "the commit has no random states (imported checkpoints have none): dropout and shuffling start from the "
            "seeds of this job"
        )
    if state.user is None and len(user):
        notes.append(f"the commit has no state for the {len(user)} objects in state=: they keep their initial state")
    return notes


def _load(
    plan: _Plan, found: _Checked, adapter: Adapter, *, user: UserState, group: Group, live: LiveState
) -> list[str]:
    """Run the last checks, then change the live state. Return notes on values that other tensors replaced.

    User objects load first, since only trying shows whether they accept their state. Tensors, hyperparameters and
    random states follow, so that they end up bit for bit as saved."""
    state, generators = found.point.state, found.point.generators
    loader = run_on_all_ranks(group, lambda: StateLoader(state, adapter, user, generators, before=plan.before))
    mixed, live.mixed = live.mixed, True
    try:
        run_on_all_ranks(group, loader.load)
        with adapter.cache_lookups():
            run_on_all_ranks(group, lambda: _require_unchanged(plan, state, loader, adapter))
    except BaseException as error:
        whole = loader.undo() and not mixed
        live.mixed = not (isinstance(error, Exception) and all(group.all_gather(whole)))  # Ctrl-C is on one rank alone
        raise
    with adapter.cache_lookups():
        notes = run_on_all_ranks(group, lambda: _copy_values(plan, found.read, state.framework, adapter))
        adapter.finish_load()
    if generators and state.rng is not None:
        restore_rng(state.rng)
    live.mixed = False
    return notes


def _check_run_state(state: RunState, plan: _Plan, adapter: Adapter) -> None:
    try:
        select.require_optimizer(state.framework, plan.before)
        adapter.check_run_state(state.framework)
    except DriftpointError:
        raise
    except Exception as error:
        raise DamagedError(
            f"the run state has values that cannot be loaded: {error!r}. Nothing was resumed. Another program may have "
            "changed the store; resume from a copy of it, or set another `store:`"
        ) from error


def _require_unchanged(plan: _Plan, state: RunState, loader: StateLoader, adapter: Adapter) -> None:
    """Raise ModelMismatchError if loading the user's objects changed the shape or dtype of tensors in the plan."""
    if not loader.objects:
        return  # no code of others ran
    if (places := adapter.expected(plan.slots)) != plan.places and set(places) != set(plan.places):
        raise ModelMismatchError(
            "loading the objects in state=[...] changed tensors of the model or the optimizer, so they no longer match "
            "the store. Remove objects that change the shape or dtype of tensors from state=[...]"
        )
    adapter.check_run_state(state.framework)


def _copy_values(plan: _Plan, read: ReadResult, framework: Mapping[str, Any], adapter: Adapter) -> list[str]:
    try:
        adapter.prepare_load(plan.slots, read.values)
        notes = read.load(adapter.held())
        adapter.load_run_state(framework)
        return notes
    except Exception as error:
        # Everything was checked before: this is a device out of memory or the like.
        raise DriftpointError(
            f"the resume failed midway: {error!r}. The live state is a mixture of old and new values; the store is "
            "intact. Restart the job"
        ) from error


def resume_memory_or_store(
    attempt: Callable[[Catalog], ResumeResult | None], catalog: Catalog, snapshot: MemoryCandidate | None
) -> ResumeResult | None:
    """Resume with :func:`memory_or_store`, and record which in-memory snapshots the state comes from. Collective."""

    def resume_view(view: Catalog) -> ResumeResult | None:
        result = attempt(view)
        if snapshot is None or view is catalog or result is None:
            return result
        used = {version.save for version in result.resolution.versions.values()} & {snapshot.save, snapshot.older}
        kept = frozenset(save for save in used if save is not None)  # empty if the bytes in memory were wrong
        return replace(result, memory=max(kept), kept=kept, replicas=snapshot.replicas) if kept else result

    return memory_or_store(resume_view, catalog, snapshot)


def memory_or_store(
    attempt: Callable[[Catalog], T | None], catalog: Catalog, snapshot: MemoryCandidate | None
) -> T | None:
    """Return the result of ``attempt`` with in-memory snapshots on top of the store, or with the store alone.

    Collective. If damage in memory leaves nothing to resume, the store alone is tried; an empty store is no error."""
    if snapshot is None:
        return attempt(catalog)
    for view in (snapshot.catalog, snapshot.instead):
        try:
            if view is not None:
                return attempt(view)
        except NothingToResumeError as error:  # alike on all ranks, before anything has changed
            _log.error("memory: %s", error)
    return attempt(catalog)


def go_on_from(
    result: ResumeResult,
    certificate: Certificate,
    job: JobContext,
    catalog: Catalog,
    local: Mapping[Unit, LocalUnit],
    *,
    needs_drift: bool,
    measure_later: Callable[[Callable[[], None]], None],
) -> None:
    """Count versions and measure drift from the resumed state, and notify the listeners. Collective.

    catalog: the store without in-memory snapshots. needs_drift: whether decisions do.
    measure_later: as :meth:`monitor.save.saver.Saver.measure_later`."""
    step, manifest = result.resume_point.save.step, result.resolution.manifest
    _reset_ledger(job, catalog, result, step)
    job.table.resumed(local)
    measures: dict[bool, list[Callable[[], None]]] = {False: [], True: []}  # whether it may be later
    for unit, part in local.items():
        if unit in result.resolution.versions:
            on_host = all(tensor.device.type == "cpu" for tensor in part.tensors)
            later = on_host and is_moving(unit) and not needs_drift
            measures[later].append(partial(job.meter.reset, unit, part.tensors))

    def measure(later: bool) -> None:
        for reset in measures[later]:
            reset()

    measure(False)
    measure_later(partial(measure, True))
    event = ResumeEvent(
        step=step,
        commit=manifest.step,
        created=manifest.created,
        newest=job.ledger.newest,
        certificate=certificate,
        from_memory=result.memory is not None,
        replicas=len(result.replicas),
        fallbacks=len(result.resolution.fallbacks),
        passed_over=result.passed_over,
        replayed=result.replayed,
        notes=result.notes,
    )
    job.listeners.on_resume(event)


def build_certificate(result: ResumeResult) -> Certificate:
    """Certify the resumed state, including values that the live job cannot hold."""
    certificate = certify_stored(result.resolution)
    if result.replayed:
        differs = result.resolution.manifest.differs
        certificate = certify_replayed(certificate, result.resume_point.save, as_saved=not differs)
    replicated = {
        unit
        for unit, version in result.resolution.versions.items()
        if any(source.part.save == result.memory and source.part.rank in result.replicas for source in version.sources)
    }
    for save in result.kept:
        certificate = mark_memory_sources(certificate, save, replicated)
    if result.lost:
        certificate = replace(certificate, exact=False, as_found=False)
    return replace(certificate, problems=certificate.problems + result.lost)


def _reset_ledger(job: JobContext, catalog: Catalog, result: ResumeResult, step: int) -> None:
    """Reset the ledger to the resumed state at ``step``.

    After a resume from memory it takes the newest commit instead, since commits cannot refer to snapshots. The drift
    from that is unknown, so the next save stores every unit that came from memory."""
    base = result.resolution
    if result.replayed:
        job.table.lost |= {unit for unit in result.resolution.versions if is_moving(unit)}
    if result.memory is not None:
        job.table.lost |= {unit for unit, version in result.resolution.versions.items() if version.save in result.kept}
        job.table.lost |= {one.record.unit for one in result.resolution.fallbacks}  # in the commit, it may be damaged
        newest = newest_on_disk(catalog, job.group)
        if newest is None:
            job.ledger.forget()
            return
        base = newest
    job.ledger.adopt(base, step)
