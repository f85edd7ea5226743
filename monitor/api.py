"""Implement ``monitor.attach``: build the job, compare settings among ranks, log a start-up message.

Collective; training thread."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from monitor.adapters import adapter_for
from monitor.adapters.base import Adapter
from monitor.adapters.frozen import SkipFrozenAdapter
from monitor.adapters.hyperparameters import Constructed, constructed, settings_of
from monitor.adapters.pytorch import PyTorchAdapter
from monitor.checkpointer import Checkpointer
from monitor.config.load import Config, ConfigSource, bytes_each, load_config
from monitor.context import JobContext
from monitor.daemon_client import DaemonClient
from monitor.decide.budget_tracker import BudgetTracker
from monitor.decide.schedule import schedule_for
from monitor.distributed import Group, current_group, run_on_all_ranks
from monitor.events import Listeners
from monitor.huggingface.accelerator import StepCounter, is_accelerator, prepared_objects
from monitor.observe.drift_meter import BySlotMeter
from monitor.observe.layers import Layer, find_layers, join_layers
from monitor.observe.sketch_meter import SketchMeter
from monitor.observe.units import LocalUnit, UnitTable
from monitor.preemption import with_scheduler
from monitor.run_state import Objects, UserState, capture_run_state, joined, to_tree
from monitor.save.encode import LIFE
from monitor.save.store_session import open_existing_store, open_store
from monitor.telemetry.log import SaveLog, check_rng, log_startup
from monitor.telemetry.metrics import Metrics
from monitor.telemetry.trace import TraceRecorder
from policies.builtin import Observe
from store.encoding import encoding_named
from store.errors import ConfigError, UnsupportedError
from store.location import is_url, mount_of, place_of
from store.names import Unit
from store.schema import as_json, without_gc
from store.text import counted
from store.trace import JobLine

_COLLECTIVE_SETTINGS = (
    *("every", "auto", "bounds", "budget", "resume", "layers", "encoding", "frozen", "preemption", "self_check"),
)
"""Settings that decide which collectives a rank enters, and when. Others may differ: paths, timeouts, the endpoint."""

_DEFAULT_FILE = "driftpoint.yaml"  # the configuration that the command line reads by default


def check_same_config(job: JobContext) -> None:
    """Raise ConfigError, on all ranks, if a rank's collective settings differ from rank 0's. Collective."""
    local = as_json(job.config.model_dump(include={*_COLLECTIVE_SETTINGS}))
    local["memory"] = as_json(job.config.memory.model_dump(include={"enabled", "every", "versions", "peers"}))
    # A policy's parameters matter on rank 0 only, and its path may differ between machines: only its name counts.
    drift = ", needs drift" if job.policy.needs_drift else ""
    local["policy"] = f"{job.policy.name}{', observed' if job.observing else ''}{drift}"
    rank0: Mapping[str, Any] = job.group.broadcast(local)

    def check() -> None:
        for key, value in rank0.items():
            if local[key] != value:
                raise ConfigError(
                    f"{key} is {local[key]} on this rank and {value} on rank 0: all ranks must use the same "
                    "configuration, otherwise collectives deadlock"
                )

    run_on_all_ranks(job.group, check)


def startup_message(job: JobContext, metrics: Metrics, *, has_commits: bool, unset: bool) -> str:
    """Return one line: what is saved, where and when, the metrics URL, and whether there is something to resume.

    unset: ``attach`` was called without a configuration."""
    parts = [_saving_text(job)]
    if not job.observing:
        parts.append(_store_size_text(job))
    if job.config.memory.enabled:
        parts.append(f"in-memory snapshots in {job.config.memory.path}")
    if job.config.copies.max_bytes is not None:
        parts.append(f"copying {shortened(job.config.copies.max_bytes)}B at a time, so training waits for storage")
    if job.config.metrics.enabled:
        parts.append(f"no metrics: {metrics.trouble}" if metrics.url is None else f"metrics at {metrics.url}")
    else:
        parts.append("no metrics (metrics.enabled: false)")
    if not job.observing:
        parts.append("ckpt.resume() continues from its newest commit" if has_commits else "nothing to resume")
    if not job.observing and (scheduler := with_scheduler(job.config.preemption, job.group.world_size)[1]):
        parts.append(f"SIGTERM, which {scheduler} sends, saves and exits")
    if unset and Path(_DEFAULT_FILE).exists():
        parts.append(f"using default settings: {_DEFAULT_FILE} exists but was not passed to attach()")
    elif unset:
        parts.append("using default settings: `driftpoint init` writes a file to change them")
    return "; ".join(parts)


def shortened(count: int) -> str:
    """Format a count with three digits and a unit: ``110 M``."""
    value, unit = float(count), ""
    for larger in (" k", " M", " G", " T"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g}{unit}"


def _saving_text(job: JobContext) -> str:
    config, layers = job.config, counted(len(job.table.layers), "layer")
    # Tied parameters count once, buffers do not count.
    numel = sum(math.prod(info.shape) for info in job.adapter.tensors().values() if info.kind != "buffer")
    parameters = f"{shortened(numel)} parameters"
    if job.observing:
        return f"measuring {layers} ({parameters}), {_interval_text(config)}, and saving nothing (policy observe)"
    model = f"{layers} ({parameters}, {_exactness_text(job)})"
    chosen = f"all of {model}" if job.policy.name == "full" else f"the choice of policy {job.policy.name} from {model}"
    objects = counted(len(job.user), "object")  # the loop's other objects are not saved
    return (
        f"saving {chosen}, random generators and {objects} in state= to {_store_text(config)}, {_interval_text(config)}"
    )


def _store_size_text(job: JobContext) -> str:
    """Return the largest size that the store can reach, assuming that the optimizer keeps Adam's two moments."""
    config = job.config
    counts = {"trainable": 0, "other": 0}
    for info in job.adapter.tensors().values():
        counts["trainable" if info.kind == "trainable" else "other"] += math.prod(info.shape)
    commit_bytes = round(counts["trainable"] * bytes_each(config.encodings()) + 4 * counts["other"])
    rule = config.retention
    without_every = config.model_copy(update={"retention": rule.model_copy(update={"keep_every": None})})
    most = without_every.most_commits()
    text = f"the store takes up to {shortened(most * commit_bytes)}B ({most} commits of {shortened(commit_bytes)}B)"
    text += "" if rule.keep_every is None else f", and one commit more every {rule.keep_every} steps"
    text += "" if rule.weights_every is None else f", and the weights alone of {rule.weights_last} commits"
    if rule.max_share is None or is_url(place_of(config.store_path)):
        return text
    return f"{text}, fewer where that is over {rule.max_share:.0%} of its disk"


def _exactness_text(job: JobContext) -> str:
    lossy = sorted({name for name in job.config.encodings().values() if not encoding_named(name).lossless})
    if lossy:
        return f"not exact: rounded to {', '.join(lossy)}"
    return "exact" if job.policy.name == "full" else "stored without rounding"


def _store_text(config: Config) -> str:
    mount = None if "://" in config.store_path else mount_of(Path(config.store_path).expanduser())
    if mount is None or mount.loss is None:
        return config.store_path
    return f"{config.store_path} (on {mount.name}: {mount.loss})"


def _interval_text(config: Config) -> str:
    if config.every == "auto":
        most = config.auto.max_loss_minutes
        return f"every: auto (so that the least time is lost, to a failure {most:g} min at most)"
    return "at every step" if config.every == 1 else f"every {config.every} steps"


def attach(target: Any, config: ConfigSource = None, *, state: Objects = ()) -> Checkpointer:
    """Create the checkpointer of a training job.

    All ranks call it, after the process group is initialized and the model is wrapped. It opens or creates the store,
    starts a background thread and, on rank 0, serves metrics. It does not change the model: call
    :meth:`~monitor.Checkpointer.resume` to load saved state. Collective.

    Args:
        target: A DeepSpeed engine; a tuple ``(model, optimizer)`` of plain PyTorch, DistributedDataParallel or FSDP2,
            with a list for several optimizers; a mapping of names to such tuples, for several models; or an
            ``accelerate.Accelerator`` that has prepared one model and one optimizer.
        config: Path of a YAML file, a mapping, a :class:`monitor.Config`, or None for the defaults. See
            docs/configuration.md.
        state: Further objects to save and resume, such as schedulers, samplers and loss scalers. Each has
            ``state_dict()`` and ``load_state_dict()``, or is a ``torch.Generator``. A mapping of names to objects,
            ``{"scheduler": scheduler}``, may gain objects from run to run, and None drops what is stored under a name;
            a list needs the same objects in the same order in every run. A resume loads them before weights, moments
            and hyperparameters, so a value that an object sets in those is overwritten by the saved one.

    Returns:
        The checkpointer. Call its ``step()`` after every optimizer step.

    Raises:
        ConfigError: A setting is invalid or differs between ranks, or an object in ``state`` cannot be saved.
        UnsupportedError: The target, or something in it, is not supported.
        StoreInUseError: Another job on this machine owns the store.
        NoStoreError: There is no store, and ``store: {create: false}`` forbids to make one.
        StorageError: The store cannot be written. If only disk space is missing, an existing store is opened, and saves
            begin once there is space.
        SaveError: A rank has no memory for the copies that a save makes.

    Example::

        ckpt = monitor.attach((model, optimizer), {"every": 100}, state=[scheduler])
        for step in range(ckpt.resume(), total_steps):
            loss = train_one_step()
            ckpt.step()
        ckpt.close()
    """
    if is_accelerator(target):
        accelerated = prepared_objects(target)
        prepared = {f"accelerate.{index}": item for index, item in enumerate(accelerated.state)}
        return attach_counted(accelerated.target, config, joined(prepared, state), accelerated.steps)
    return attach_counted(target, config, state, None)


@without_gc(lasting=True)
def attach_counted(target: Any, config: ConfigSource, state: Objects, steps: Callable[[], int] | None) -> Checkpointer:
    """Attach with a step counter.

    steps: returns optimizer steps so far, if the framework does not count them. None: every ``ckpt.step()`` is one."""
    group = current_group()
    settings, adapter = run_on_all_ranks(group, lambda: (load_config(config), adapter_for(target)))
    with adapter.cache_lookups():
        if isinstance(adapter, PyTorchAdapter):
            adapter.agree(group)
        adapter, layers = run_on_all_ranks(group, lambda: _find_layers(adapter, settings))
        if len(adapter.leaders) > 1:
            layers = join_layers(group.all_gather(layers if group.rank in adapter.leaders else ()))
        build = partial(_build_job, adapter, settings, layers, state, group, steps=steps)
        job, metrics, budget_tracker = run_on_all_ranks(group, build)
        check_same_config(job)
        if isinstance(job.adapter, SkipFrozenAdapter):
            job.adapter.agree(group)
    with job.adapter.cache_lookups():  # a new cache: state_dict() of the user's objects, called above, may do anything
        local = run_on_all_ranks(group, job.table.local)  # raises now if something cannot be stored
        return _open(job, metrics, budget_tracker, local, unset=config is None)


def _open(
    job: JobContext, metrics: Metrics, budget_tracker: BudgetTracker, local: Mapping[Unit, LocalUnit], *, unset: bool
) -> Checkpointer:
    """Open the store, or create it, and make the checkpointer. unset: see :func:`startup_message`. Collective."""
    group, settings = job.group, job.config
    options = settings.s3.options()
    if job.observing:
        opened, catalog = None, open_existing_store(settings.store_path, group, options)
    else:
        counting, create = settings.every == "auto", settings.creates_store
        opened = open_store(settings.store_path, group, settings.timeouts.lock, counting, options, create=create)
        catalog = opened.catalog
        if opened.incarnation is not None:
            job.pace.count(opened.incarnation.interruptions, opened.incarnation.rank_seconds)
    try:
        ckpt = Checkpointer(job, metrics, budget_tracker, opened, catalog, local=local)
    except BaseException:
        if opened is not None:  # the script may attach again
            opened.release()
        raise
    if group.rank == 0:
        log_startup(startup_message(job, metrics, has_commits=ckpt.holds_commits, unset=unset))
    return ckpt


def _find_layers(adapter: Adapter, settings: Config) -> tuple[Adapter, tuple[Layer, ...]]:
    """Return the adapter, without frozen parameters if they are left out, and the layers on this rank."""
    if settings.frozen == "skip":
        adapter = cast("Adapter", SkipFrozenAdapter(adapter))
    experts, patterns = settings.layers.experts, settings.layers.patterns
    fqns = list(adapter.tensors())
    return adapter, find_layers(adapter.module, fqns, experts=experts, patterns=patterns, local=adapter.local)


def _build_job(
    adapter: Adapter,
    settings: Config,
    layers: tuple[Layer, ...],
    state: Objects,
    group: Group,
    *,
    steps: Callable[[], int] | None,
) -> tuple[JobContext, Metrics, BudgetTracker]:
    user = UserState(state)
    state = capture_run_state(adapter, user, adapter.leaders[0]).whole()
    to_tree(state)  # raises now if something cannot be stored
    schedules = {key: settings_of(item) for key, item in {**user.schedules, **adapter.objects()}.items()}
    user.script = user.recorded = Constructed(constructed(state["framework"]), schedules)
    if any(group["hyper"].get("capturable") for group in state["framework"]["param_groups"]):
        if settings.copies.mode == "lazy":
            raise UnsupportedError(
                "the optimizer is capturable: a CUDA graph may replay its steps without a call that could wait for "
                "the copies of `staging: lazy`. Set `staging: auto`, or capturable=False"
            )
        settings = settings.model_copy(update={"staging": settings.copies.model_copy(update={"mode": "eager"})})
    table = UnitTable(adapter, layers, group)
    meter = BySlotMeter(SketchMeter(settings.drift.width, settings.drift.seed))
    policy = settings.bounded_policy()
    observing = isinstance(policy, Observe)
    inner = policy.inner if isinstance(policy, Observe) else policy
    metrics = Metrics(settings.metrics.layer_series, group.rank)
    budget_tracker = BudgetTracker(settings.budget.account(), metrics)
    job_line = partial(JobLine, framework=adapter.framework, policy=inner.name, observing=observing)
    tracer = TraceRecorder(settings, job_line, group, table, metrics)
    pace = schedule_for(settings.every, settings.auto, settings.bounds.max_staleness, group.world_size, metrics)
    daemon = DaemonClient(settings.daemon, settings.memory.path, metrics, settings.metrics.security())
    page = "huggingface.md" if isinstance(steps, StepCounter) else "loops.md"
    check_rng(adapter, tracer, settings.trace_path(), group, page)
    listeners = Listeners(budget_tracker, pace, metrics, SaveLog(settings, group.rank), tracer, daemon)
    job = JobContext(settings, inner, group, adapter, table, meter, user, pace, listeners, observing, steps)
    job.ledger.full_after_rollback, job.ledger.life = not settings.budget.limited, LIFE * settings.differences
    return job, metrics, budget_tracker
