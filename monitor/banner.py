"""The one line that says what was decided when a job was attached, and why.

Pure, but for asking what kind of filesystem the store lies on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from monitor.config import Config
from monitor.job import Job
from monitor.metrics import Metrics
from store.encoding import encoding_named
from store.mounts import mount_of

_FILE = "driftpoint.yaml"
"""What the command line takes where it is told nothing else."""


def banner(job: Job, metrics: Metrics, *, has_commits: bool, unset: bool) -> str:
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


def _what(job: Job) -> str:
    config, count = job.config, len(job.table.layers)
    layers = "1 layer" if count == 1 else f"{count} layers"
    parameters = f"{_parameters(job)} parameters"
    if job.observing:
        return f"watching {layers} ({parameters}), {_every(config)}, and saving nothing (policy observe)"
    model = f"{layers} ({parameters}, {_exactness(job)})"
    chosen = f"all of {model}" if job.policy.name == "full" else f"what policy {job.policy.name} chooses of {model}"
    return f"saving {chosen} to {_store(config)}, {_every(config)}"


def _parameters(job: Job) -> str:
    """Tied ones count once, buffers not at all."""
    count = sum(math.prod(info.shape) for info in job.adapter.tensors().values() if info.kind != "buffer")
    return shortened(count)


def _exactness(job: Job) -> str:
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
