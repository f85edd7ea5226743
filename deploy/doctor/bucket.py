"""Test a bucket for the operations that a store relies on, with real requests, and remove all test objects.

They have names of interrupted writes, which a store ignores. No store object is written, so a store in use is safe."""

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from deploy.doctor.base import Finding, Plan, Probe, clock, semantics
from deploy.format import plural, size_text
from store.errors import ExistsError, MissingError, StorageError
from store.storage.atomic import replace_hint, write_new
from store.storage.object_store import ObjectFiles

_WRITERS = 4
_LIMIT = 1 << 10
_FIRST = b"driftpoint doctor"
_NTP = "synchronise this machine by NTP (chronyd, systemd-timesyncd): from 15 minutes on, S3 refuses all requests"


def check_bucket(files: ObjectFiles, plan: Plan) -> Iterator[Finding]:
    """Run all checks of the bucket."""
    try:
        held = len(files.list_dir(""))
    except StorageError as error:
        todo = "for the required features and permissions see docs/object-stores.md"
        yield Finding("bucket", "fail", str(error), todo)
        return
    yield Finding("bucket", "ok", f"{files.root} is reachable and can be listed: {plural(held, 'name')} at its top")
    try:
        with Probe(files) as probe:
            yield from _check(probe)
            large = bytes(files.part_bytes + 1)
            write_new(files, probe.name(), large, most=len(large))  # in parts, which needs a right of its own
    except StorageError as error:
        todo = "allow put, get, list, delete and abort of uploads below the prefix"
        yield Finding("writing", "fail", str(error), f"{todo}: docs/object-stores.md")
    if plan.store_bytes is not None and plan.commit_bytes is not None:
        seen = f"up to {plan.config.most_commits()} commits of {size_text(plan.commit_bytes)} at a time"
        yield Finding("space", "ok", f"{seen}: {size_text(plan.store_bytes)}; a bucket does not report its free space")


def _check(probe: Probe[ObjectFiles]) -> Iterator[Finding]:
    first = probe.name()
    began = time.time() - 1.0  # stamps have whole seconds
    write_new(probe.files, first, _FIRST)
    yield clock("the server's", began, probe.files.modified(first), _NTP)
    broken = [text for text in (check(probe, first) for check in _PROMISES) if text is not None]
    works = "conditional puts are refused and atomic; puts, replacements and deletions are visible at once"
    yield semantics(broken, works, "use Amazon S3, or a server that supports this")


def _refuses_second_put(probe: Probe[ObjectFiles], first: str) -> str | None:
    try:
        write_new(probe.files, first, secrets.token_bytes(16))
    except ExistsError:
        return None if probe.files.read(first, _LIMIT) == _FIRST else "an object changed although its put was refused"
    return "the condition of a put (If-None-Match: *) is ignored: two jobs could overwrite each other's commits"


def _one_wins(probe: Probe[ObjectFiles], _: str) -> str | None:
    name = probe.name()

    def put(data: bytes) -> bytes | None:
        try:
            write_new(probe.files, name, data)
        except ExistsError:
            return None
        return data

    with ThreadPoolExecutor(_WRITERS) as pool:
        won = [data for data in pool.map(put, [secrets.token_bytes(16) for _ in range(_WRITERS)]) if data is not None]
    if len(won) != 1:
        return f"of {_WRITERS} concurrent conditional puts of one object, {len(won)} succeeded"
    return None if probe.files.read(name, _LIMIT) == won[0] else "the object of the successful put was overwritten"


def _reads_back(probe: Probe[ObjectFiles], first: str) -> str | None:
    return None if probe.files.read(first, _LIMIT) == _FIRST else "a read does not return what was put"


def _lists(probe: Probe[ObjectFiles], first: str) -> str | None:
    return None if first in probe.files.list_dir("") else "an object that was put is not listed at once"


def _replaces(probe: Probe[ObjectFiles], _: str) -> str | None:
    name = probe.name()
    replace_hint(probe.files, name, b"one")
    replace_hint(probe.files, name, b"two")
    return None if probe.files.read(name, _LIMIT) == b"two" else "a replaced object is not visible at once"


def _deletes(probe: Probe[ObjectFiles], first: str) -> str | None:
    probe.files.unlink(first)
    try:
        probe.files.read(first, _LIMIT)
    except MissingError:
        return "a deleted object is still listed" if first in probe.files.list_dir("") else None
    return "a deleted object can still be read"


_PROMISES = (_reads_back, _lists, _refuses_second_put, _one_wins, _replaces, _deletes)
