"""``monitor.attach``: from what the user trains with and a configuration to a checkpointer. Collective."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monitor.adapters.select import adapter_for
from monitor.adapters.without_frozen import WithoutFrozen
from monitor.agree import everywhere
from monitor.alike import require_alike
from monitor.banner import banner
from monitor.checkpointer import Checkpointer
from monitor.config import Config, load_config
from monitor.daemon_link import DaemonLink
from monitor.drift.buffers import BySlotMeter
from monitor.drift.select import meter_for
from monitor.events import Listeners
from monitor.group import Group, current_group
from monitor.hf.accelerator import is_accelerator, prepared
from monitor.job import Job
from monitor.layers import find_layers
from monitor.metrics import Metrics
from monitor.opened import open_existing, open_store
from monitor.pacing import pace_for
from monitor.rehearsing import rehearse_policy
from monitor.run_state import UserState, to_tree
from monitor.save_log import SaveLog
from monitor.saying import say
from monitor.spending import Spending
from monitor.tracing import TracedJob, Tracer
from monitor.units import UnitTable
from policies.observe import Observe


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
        found = prepared(target)
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
    made = everywhere(group, lambda: _job(target, config, state, group, steps))
    job, metrics = made.job, made.metrics
    require_alike(job)
    if isinstance(job.adapter, WithoutFrozen):
        job.adapter.agree(group)
    rehearse_policy(job)
    settings = job.config
    options = settings.s3.options()
    if job.observing:
        catalog = open_existing(settings.store, group, options)
        return _told(Checkpointer(job, metrics, made.spending, None, catalog), job, False, config is None)
    opened = open_store(settings.store, group, settings.timeouts.lock, settings.every == "auto", options)
    if opened.incarnation is not None:
        job.pace.count(opened.incarnation.interruptions, opened.incarnation.rank_seconds)
    ckpt = Checkpointer(job, metrics, made.spending, opened, opened.catalog)
    return _told(ckpt, job, opened.has_commits, config is None)


def _told(made: Checkpointer, job: Job, has_commits: bool, unset: bool) -> Checkpointer:
    if job.group.rank == 0:
        say(banner(job, made.metrics, has_commits=has_commits, unset=unset))
    return made


@dataclass(frozen=True)
class _Made:
    job: Job
    metrics: Metrics
    spending: Spending


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
        adapter = WithoutFrozen(adapter)
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
    spending = Spending(settings.budget.account(), metrics)
    tracer = Tracer(settings, TracedJob(adapter.framework, inner.name, observing), group, table, metrics)
    pace = pace_for(settings.every, settings.auto, settings.bounds.max_staleness, group.world_size, metrics)
    daemon = DaemonLink(settings.daemon, settings.memory.path, metrics, settings.metrics.security())
    listeners = Listeners(spending, pace, metrics, SaveLog(settings, group.rank), tracer, daemon)
    job = Job(settings, inner, group, adapter, table, meter, user, pace, listeners, observing, steps)
    return _Made(job, metrics, spending)
