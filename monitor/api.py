"""attach(): build the job, check settings on all ranks, start-up message.

What must be set alike on all ranks: it decides which collectives they enter, and when. Collective; at attach.

Other settings are each rank's own affair, or rank 0's: what stores and traces are called, timeouts, the endpoint.

The one line that says what was decided when a job was attached, and why.

Pure, but for asking what kind of filesystem the store lies on.

The policy is rehearsed on the job's own layers before any store is touched. Collective; rank 0 asks it.

It knows the units that exist now: slots that an optimizer makes at its first step are not among them.

``monitor.attach``: from what the user trains with and a configuration to a checkpointer. Collective.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitor.adapters import adapter_for
from monitor.adapters.frozen import SkipFrozenAdapter
from monitor.checkpointer import Checkpointer
from monitor.config.load import Config, load_config
from monitor.context import JobContext
from monitor.daemon_client import DaemonClient
from monitor.decide.budget_tracker import BudgetTracker
from monitor.decide.schedule import schedule_for
from monitor.decide.statistics import unit_stats
from monitor.distributed import Group, current_group, run_on_all_ranks, run_on_rank0
from monitor.events import Listeners
from monitor.huggingface.accelerator import is_accelerator, prepared_objects
from monitor.ledger import Ledger
from monitor.observe import meter_for
from monitor.observe.drift_meter import BySlotMeter
from monitor.observe.layers import find_layers
from monitor.observe.units import UnitTable
from monitor.run_state import UserState, to_tree
from monitor.save.store_session import open_existing_store, open_store
from monitor.telemetry.log import SaveLog, log_startup
from monitor.telemetry.metrics import Metrics
from monitor.telemetry.trace import TracedJob, TraceRecorder, plain
from policies.builtin import Observe
from policies.conformance import check_before_training
from store.encoding import encoding_named
from store.errors import ConfigError
from store.location import mount_of

_KEYS = ("every", "auto", "bounds", "budget", "resume", "layers", "encoding", "frozen", "preemption")


def check_same_config(job: JobContext) -> None:
    """Raises ConfigError, on all ranks, where one is set otherwise than rank 0."""
    mine = _settings(job)
    first: Mapping[str, Any] = job.group.broadcast(mine)
    run_on_all_ranks(job.group, lambda: _require(mine, first))


def _settings(job: JobContext) -> dict[str, Any]:
    """A policy's parameters matter on rank 0 only, and may be anything; a path to it may differ between machines."""
    settings = plain(job.config.model_dump(include={*_KEYS}))
    settings["memory"] = plain(job.config.memory.model_dump(include={"enabled", "every", "versions", "peers"}))
    looks = ", which looks at drift" if job.policy.needs_drift else ""
    return {**settings, "policy": f"{job.policy.name}{', observed' if job.observing else ''}{looks}"}


def _require(mine: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    for key, value in first.items():
        if mine[key] != value:
            raise ConfigError(
                f"{key} is {mine[key]} here and {value} on rank 0: give every rank the same configuration, or they "
                "wait for each other for good"
            )


_FILE = "driftpoint.yaml"
"""What the command line takes where it is told nothing else."""


def startup_message(job: JobContext, metrics: Metrics, *, has_commits: bool, unset: bool) -> str:
    """What is saved where and when, where to look, and what a resume finds. unset: no configuration was given."""
    config = job.config
    parts = [_what(job), *_besides(config), _metrics(job.config, metrics)]
    if not job.observing:
        parts.append("ckpt.resume() goes on from its newest commit" if has_commits else "nothing to resume")
    if unset:
        parts.append(_by_default())
    return "; ".join(parts)


def _by_default() -> str:
    """Who has a file and forgot to hand it over would look for its settings in vain."""
    if Path(_FILE).exists():
        return f"all of this is by default: {_FILE} is not read unless attach is given it"
    return "all of this is by default, and `driftpoint init` writes a file to change it"


def shortened(count: int) -> str:
    """Three digits: ``110 M``."""
    value, unit = float(count), ""
    for larger in (" k", " M", " G", " T"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g}{unit}"


def _what(job: JobContext) -> str:
    config, count = job.config, len(job.table.layers)
    layers = "1 layer" if count == 1 else f"{count} layers"
    parameters = f"{_parameters(job)} parameters"
    if job.observing:
        return f"watching {layers} ({parameters}), {_every(config)}, and saving nothing (policy observe)"
    model = f"{layers} ({parameters}, {_exactness(job)})"
    chosen = f"all of {model}" if job.policy.name == "full" else f"what policy {job.policy.name} chooses of {model}"
    return f"saving {chosen} to {_store(config)}, {_every(config)}"


def _parameters(job: JobContext) -> str:
    """Tied ones count once, buffers not at all."""
    count = sum(math.prod(info.shape) for info in job.adapter.tensors().values() if info.kind != "buffer")
    return shortened(count)


def _exactness(job: JobContext) -> str:
    lossy = sorted({name for name in job.config.encodings().values() if not encoding_named(name).lossless})
    if lossy:
        return f"not exact: rounded to {', '.join(lossy)}"
    return "exact" if job.policy.name == "full" else "every bit of what it chooses"


def _store(config: Config) -> str:
    mount = None if "://" in config.store else mount_of(Path(config.store).expanduser())
    lost = None if mount is None else mount.loss
    return config.store if mount is None or lost is None else f"{config.store} (on {mount.name}: {lost})"


def _every(config: Config) -> str:
    if config.every == "auto":
        most = config.auto.max_loss_minutes
        return f"every: auto (so that the least time is lost, to a failure {most:g} min at most)"
    return "at every step" if config.every == 1 else f"every {config.every} steps"


def _besides(config: Config) -> Iterator[str]:
    if config.memory.enabled:
        yield f"the newest state in {config.memory.path} besides"


def _metrics(config: Config, metrics: Metrics) -> str:
    if not config.metrics.enabled:
        return "no metrics (metrics.enabled: false)"
    if metrics.url is None:
        return f"no metrics: {metrics.trouble}"
    return f"metrics at {metrics.url}"


def check_policy(job: JobContext) -> None:
    """Raises ConfigError, on all ranks, where the policy fails on what this job is going to show it."""
    table = UnitTable(job.adapter, job.table.layers, job.group)  # the job's own learns its units at the first decision
    table.agree(table.local())

    def rehearsed() -> None:
        measured = job.policy.needs_drift or job.observing
        check_before_training(
            job.policy, unit_stats(table, Ledger(), 0, {}), measured=measured, limited=job.config.budget.limited
        )

    run_on_rank0(job.group, rehearsed)


def attach(
    target: Any,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
    *,
    state: Sequence[Any] = (),
) -> Checkpointer:
    """Attach to a DeepSpeed engine, to ``(model, optimizer)`` of plain PyTorch, DistributedDataParallel or FSDP2, or
    to an ``accelerate.Accelerator`` that has prepared one of each.

    config: a YAML file, a mapping, or None for the defaults. state: objects to save and resume besides the model
    and the optimizer (schedulers, samplers, loss scalers, ``torch.Generator``): each with ``state_dict`` and
    ``load_state_dict``. A resume loads them before weights, moments and hyperparameters, which have the last word.
    Every rank calls it, after the process group is up.

    Raises ConfigError for senseless settings, for settings that differ between ranks and for a policy that fails on
    the layers of this job, UnsupportedError for what cannot be handled, StoreInUseError where another job on this
    machine owns the store, and StorageError where it cannot be written.
    """
    if is_accelerator(target):
        found = prepared_objects(target)
        return attach_counted(found.target, config, [*found.state, *state], found.steps)
    return attach_counted(target, config, state, None)


def attach_counted(
    target: Any,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config | None,
    state: Sequence[Any],
    steps: Callable[[], int] | None,
) -> Checkpointer:
    """:func:`attach`, for loops that count themselves. steps: optimizer steps taken so far, where the framework does
    not count them; None: every ``ckpt.step()`` is one."""
    group = current_group()
    made = run_on_all_ranks(group, lambda: _job(target, config, state, group, steps))
    job, metrics = made.job, made.metrics
    check_same_config(job)
    if isinstance(job.adapter, SkipFrozenAdapter):
        job.adapter.agree(group)
    check_policy(job)
    settings = job.config
    options = settings.s3.options()
    if job.observing:
        catalog = open_existing_store(settings.store, group, options)
        return _told(Checkpointer(job, metrics, made.spending, None, catalog), job, False, config is None)
    opened = open_store(settings.store, group, settings.timeouts.lock, settings.every == "auto", options)
    if opened.incarnation is not None:
        job.pace.count(opened.incarnation.interruptions, opened.incarnation.rank_seconds)
    ckpt = Checkpointer(job, metrics, made.spending, opened, opened.catalog)
    return _told(ckpt, job, opened.has_commits, config is None)


def _told(made: Checkpointer, job: JobContext, has_commits: bool, unset: bool) -> Checkpointer:
    if job.group.rank == 0:
        log_startup(startup_message(job, made.metrics, has_commits=has_commits, unset=unset))
    return made


@dataclass(frozen=True)
class _Made:
    job: JobContext
    metrics: Metrics
    spending: BudgetTracker


def _job(
    target: Any,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config | None,
    state: Sequence[Any],
    group: Group,
    steps: Callable[[], int] | None,
) -> _Made:
    settings = load_config(config)
    adapter = adapter_for(target)
    if settings.frozen == "skip":
        adapter = SkipFrozenAdapter(adapter)
    user = UserState(state)
    to_tree({"framework": adapter.run_state(), "user": user.capture()})  # what cannot be stored is told now
    layers = find_layers(
        adapter.module, list(adapter.tensors()), experts=settings.layers.experts, patterns=settings.layers.patterns
    )
    table = UnitTable(adapter, layers, group)
    table.local()  # as above
    meter = BySlotMeter(meter_for(settings.drift.method, settings.drift.width, settings.drift.seed))
    policy = settings.bounded_policy()
    observing = isinstance(policy, Observe)
    inner = policy.inner if isinstance(policy, Observe) else policy
    metrics = Metrics(settings.metrics.layer_series, group.rank)
    spending = BudgetTracker(settings.budget.account(), metrics)
    tracer = TraceRecorder(settings, TracedJob(adapter.framework, inner.name, observing), group, table, metrics)
    pace = schedule_for(settings.every, settings.auto, settings.bounds.max_staleness, group.world_size, metrics)
    daemon = DaemonClient(settings.daemon, settings.memory.path, metrics, settings.metrics.security())
    listeners = Listeners(spending, pace, metrics, SaveLog(settings, group.rank), tracer, daemon)
    job = JobContext(settings, inner, group, adapter, table, meter, user, pace, listeners, observing, steps)
    return _Made(job, metrics, spending)
