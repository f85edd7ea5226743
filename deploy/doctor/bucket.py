"""Test a bucket for the operations that a store relies on, with real requests, and remove all test objects.

The objects have names of interrupted writes, which a store ignores. No store object is written, so a store in use is
safe.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from deploy.doctor.base import Finding, Plan, Probe
from deploy.doctor.disk import meaning
from deploy.format import plural, size_text
from store.errors import ExistsError, MissingError, StorageError
from store.storage.atomic import replace_hint, write_new
from store.storage.local import NewFile
from store.storage.object_store import ObjectFiles

_SKEW = 5.0
"""Accepted clock difference in seconds."""

_SLOW = 0.5
"""Seconds from which a request counts as slow."""

_WRITERS = 4
_MOST_BYTES = 1 << 28
_MOST_SECONDS = 5.0
_PIECE = 1 << 22
_LIMIT = 1 << 10
_FIRST = b"driftpoint doctor"


def check_bucket(files: ObjectFiles, plan: Plan, *, speed: bool = True) -> Iterator[Finding]:
    """Run all checks of the bucket; ``speed`` also measures the throughput with a large object."""
    try:
        held = len(files.list_dir(""))
    except StorageError as error:
        yield Finding("bucket", "fail", str(error), "what a bucket must have and permit: docs/object-stores.md")
        return
    yield Finding("bucket", "ok", f"{files.root} is reached and can be listed, {plural(held, 'name')} at its top")
    try:
        with Probe(files, partial(_remove, files)) as probe:
            yield from _tried(probe)
            if speed:
                yield _speed(probe, plan)
    except StorageError as error:
        todo = "a job must be permitted to put, get, list and delete below the prefix, and to abort uploads"
        yield Finding("writing", "fail", str(error), f"{todo}: docs/object-stores.md")
    if plan.store_bytes is not None and plan.commit_bytes is not None:
        seen = f"up to {plan.commits} commits of {size_text(plan.commit_bytes)} side by side"
        yield Finding("space", "ok", f"{seen}: {size_text(plan.store_bytes)}; a bucket's end cannot be asked for")


def _remove(files: ObjectFiles, names: Sequence[str]) -> None:
    with suppress(StorageError):  # whether deleting works was tried
        files.unlink_all(names)


def _tried(probe: Probe[ObjectFiles]) -> Iterator[Finding]:
    first = probe.name()
    began = time.time()
    _put(probe, first, _FIRST)
    yield _clock(began, probe.files.modified(first))
    yield _latency(probe, first)
    broken = [text for text in (tried(probe, first) for tried in _PROMISES) if text is not None]
    yield (
        Finding("semantics", "fail", "; ".join(broken), "take Amazon S3 itself, or a server that does what is missing")
        if broken
        else Finding(
            "semantics",
            "ok",
            "nothing is put over what is there, nor by two at once; what was put, replaced or deleted shows at once",
        )
    )


def _put(probe: Probe[ObjectFiles], name: str, data: bytes) -> None:
    write_new(probe.files, name, lambda file: file.write(data))


def _keeps(probe: Probe[ObjectFiles], first: str) -> str | None:
    try:
        _put(probe, first, secrets.token_bytes(16))
    except ExistsError:
        return None if probe.files.read(first, _LIMIT) == _FIRST else "an object changed although a put was refused"
    return "it puts objects over others although told not to (If-None-Match: *): two jobs could commit over one another"


def _one_wins(probe: Probe[ObjectFiles], _: str) -> str | None:
    name = probe.name()

    def put(data: bytes) -> bytes | None:
        try:
            _put(probe, name, data)
        except ExistsError:
            return None
        return data

    with ThreadPoolExecutor(_WRITERS) as pool:
        won = [data for data in pool.map(put, [secrets.token_bytes(16) for _ in range(_WRITERS)]) if data is not None]
    if len(won) != 1:
        return f"of {_WRITERS} that put an object at once on the condition that there is none, {len(won)} were told so"
    return None if probe.files.read(name, _LIMIT) == won[0] else "who was told to have put an object had not"


def _reads_back(probe: Probe[ObjectFiles], first: str) -> str | None:
    return None if probe.files.read(first, _LIMIT) == _FIRST else "what was put is not what is read"


def _lists(probe: Probe[ObjectFiles], first: str) -> str | None:
    return None if first in probe.files.list_dir("") else "an object that was put is not listed at once"


def _replaces(probe: Probe[ObjectFiles], _: str) -> str | None:
    name = probe.name()
    replace_hint(probe.files, name, b"one")
    replace_hint(probe.files, name, b"two")
    return None if probe.files.read(name, _LIMIT) == b"two" else "what an object was replaced by is not read at once"


def _forgets(probe: Probe[ObjectFiles], first: str) -> str | None:
    probe.files.unlink(first)
    try:
        probe.files.read(first, _LIMIT)
    except MissingError:
        return "an object that was deleted is listed still" if first in probe.files.list_dir("") else None
    return "an object that was deleted can be read still"


_PROMISES: tuple[Callable[[Probe[ObjectFiles], str], str | None], ...] = (
    _reads_back,
    _lists,
    _keeps,
    _one_wins,
    _replaces,
    _forgets,
)


def _clock(began: float, stamped: float) -> Finding:
    """Compare the server's clock; ``stamped`` has whole seconds."""
    now = time.time()
    off = stamped - now if stamped > now else min(0.0, stamped + 1.0 - began)
    if abs(off) <= _SKEW:
        return Finding("clock", "ok", "the server's clock is this machine's, within seconds")
    return Finding(
        "clock",
        "warn",
        f"the server's clock is {off:+.0f} s off this machine's",
        "set this machine's by NTP (chronyd, systemd-timesyncd): from 15 minutes on Amazon S3 refuses every request",
    )


def _latency(probe: Probe[ObjectFiles], first: str) -> Finding:
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        probe.files.size(first)
        seconds.append(time.perf_counter() - began)
    found = statistics.median(seconds)
    seen = f"{1000 * found:.0f} ms a request; a commit takes two for each rank, one after the other"
    if found < _SLOW:
        return Finding("latency", "ok", seen)
    return Finding("latency", "warn", seen, "take a bucket in the region that the job runs in")


def _speed(probe: Probe[ObjectFiles], plan: Plan) -> Finding:
    data, done, began = secrets.token_bytes(_PIECE), 0, time.perf_counter()
    least = probe.files.part_bytes + 1  # so that it goes in parts

    def fill(file: NewFile) -> None:
        nonlocal done
        while done < least or (done < _MOST_BYTES and time.perf_counter() - began < _MOST_SECONDS):
            file.write(data)
            done += len(data)

    write_new(probe.files, probe.name(), fill, most=least)
    rate = done / (time.perf_counter() - began)
    return Finding("speed", "ok", f"{rate / 1e6:.0f} MB/s from this process, in parts{meaning(plan, rate)}")
