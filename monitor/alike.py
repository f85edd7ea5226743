"""What must be set alike on all ranks: it decides which collectives they enter, and when. Collective; at attach.

Other settings are each rank's own affair, or rank 0's: what stores and traces are called, timeouts, the endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monitor.agree import everywhere
from monitor.job import Job
from monitor.trace_lines import plain
from store.errors import ConfigError

_KEYS = ("every", "auto", "bounds", "budget", "resume", "layers", "encoding", "frozen", "preemption")


def require_alike(job: Job) -> None:
    """Raises ConfigError, on all ranks, where one is set otherwise than rank 0."""
    mine = _settings(job)
    first: Mapping[str, Any] = job.group.from_first(mine)
    everywhere(job.group, lambda: _require(mine, first))


def _settings(job: Job) -> dict[str, Any]:
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
