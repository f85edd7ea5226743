"""Check the machine: limits, memory and ports. Changes nothing and does not need root."""

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from deploy.doctor.base import Finding, Plan, State
from deploy.format import count_text, size_text
from store.errors import StorageError
from store.memory.limits import cgroup_free_bytes, free_bytes

_NO_LIMIT = 1 << 60  # control group limit, in bytes, that means no limit: version 1 reports a large number
_FILES = 1024  # recommended number of open files per process


def check_machine(plan: Plan) -> Iterator[Finding]:
    """Run all checks of the machine."""
    yield _open_files()
    yield _shared_memory(plan)
    yield from _ports(plan)


def _open_files() -> Finding:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "no limit" if files == resource.RLIM_INFINITY else f"limit {files} per process"
    few = files != resource.RLIM_INFINITY and files < _FILES
    return Finding("open files", "warn" if few else "ok", limit, f"raise it: ulimit -n {4 * _FILES}" if few else "")


def _shared_memory(plan: Plan) -> Finding:
    memory = plan.config.memory
    folder = Path(memory.path)
    wanted: State = "warn" if memory.enabled else "ok"
    if not folder.is_dir():
        todo = "set `memory: {path: ...}` to the shared memory directory"
        return Finding("shared memory", wanted, f"there is no {folder}", todo)
    try:
        free, group = free_bytes(folder), cgroup_free_bytes()
    except (OSError, StorageError) as error:
        return Finding("shared memory", wanted, f"cannot determine the free space of {folder}: {error}", "")
    seen = f"{size_text(max(0, free))} available in {folder}, of {size_text(psutil.virtual_memory().total)} memory"
    if group is not None and group < _NO_LIMIT:
        seen += f", {size_text(max(0, group))} left in this control group"
    if (need := plan.memory_bytes) is None:
        return Finding("shared memory", "ok", seen + ("" if memory.enabled else "; in-memory snapshots are off"))
    seen += f"; in-memory snapshots of {count_text(plan.parameters or 0)} parameters need {size_text(need)} here"
    if need <= free:
        seen += "" if memory.enabled else ": `memory: {enabled: true}` would fit"
        return Finding("shared memory", "ok", seen)
    if not memory.enabled:
        return Finding("shared memory", "ok", f"{seen}: they would not fit, and are off")
    return Finding(
        "shared memory",
        "warn",
        f"{seen}: the job would run without them",
        "give the job more shared memory (docker run --shm-size; in Kubernetes an emptyDir with `medium: Memory` at "
        "/dev/shm), spread it over more nodes (--nodes), or set `memory: {versions: 1}` or `{encoding: compact}`",
    )


def _ports(plan: Plan) -> Iterator[Finding]:
    metrics, daemon = plan.config.metrics, plan.config.daemon
    if metrics.enabled:
        yield _port("metrics port", metrics.host, metrics.port, "metrics")
    if daemon.enabled and daemon.port:
        yield _port("daemon port", "127.0.0.1", daemon.port, "daemon")


def _port(check: str, host: str, port: int, section: str) -> Finding:
    if port == 0:
        return Finding(check, "ok", "a free port will be used")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1)
        except OSError as error:
            return Finding(
                check,
                "warn",
                f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}",
                f"unless your own job uses it, set `{section}: {{port: ...}}` to another one, or 0 for any; training "
                "itself is not affected",
            )
    return Finding(check, "ok", f"{host} port {port} is free")
