"""A disk in memory that tells what a power loss may leave behind: :class:`SimulatedFiles`.

The model is the weakest that a POSIX filesystem may be:

* Bytes written since the last fsync of a file: each sector of them is on disk or not, in any combination,
  and the length of the file is anything between.
* Names changed in a directory since the last fsync of *that directory*: any subset of the changes is on disk,
  applied in order. Directories know nothing of each other. A rename within one directory is one change.
* An fsync of a file makes its bytes durable, never its name. What was fsynced stays.

It does not know what is stored. Every change is logged, so a test replays any prefix of a run
(:func:`disk_after`) and asks for the crash states at that point (:meth:`Disk.crashed`). Faults are injected by
:class:`Fault`. Used by one thread.
"""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from store.errors import DamagedError, ExistsError, MissingError, NoSpaceError, StorageError
from store.storage.local import Files
from tests.support.files_below import FilesBelow

Choose = Callable[[str], bool]
"""Whether this one change reached the disk; the argument says what it is: ``name``, ``sector`` or ``length``."""


@dataclass(frozen=True)
class Op:
    """One change, as logged. ``node`` identifies the file for ``write`` and ``sync``."""

    verb: str
    path: str = ""
    target: str = ""
    node: int = -1
    data: bytes = b""
    offset: int | None = None
    """Of a write that does not append."""


@dataclass
class _File:
    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def crashed(self, choose: Choose, sector: int) -> _File:
        data = bytearray(self.durable)
        for start, written in self.pending:
            for at, end in _sectors(start, start + len(written), sector):
                if choose("sector"):
                    data.extend(bytes(max(0, end - len(data))))
                    data[at:end] = written[at - start : end - start]
        if self.pending and choose("length"):
            data.extend(bytes(len(self.live) - len(data)))
        return _File(bytearray(data), bytes(data))


@dataclass
class _Directory:
    live: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[tuple[str, int | None], ...]] = field(default_factory=list)

    def change(self, *changes: tuple[str, int | None]) -> None:
        _apply(self.live, changes)
        self.pending.append(changes)

    def sync(self) -> None:
        self.durable = dict(self.live)
        self.pending.clear()

    def crashed(self, choose: Choose) -> _Directory:
        names = dict(self.durable)
        for changes in self.pending:
            if choose("name"):
                _apply(names, changes)
        return _Directory(dict(names), names)


def _sectors(start: int, stop: int, sector: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = min(stop, (start // sector + 1) * sector)
        yield start, end
        start = end


def _apply(names: dict[str, int], changes: Iterable[tuple[str, int | None]]) -> None:
    for name, node in changes:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """Files and directories with what is durable of them. Changes only through :meth:`apply`."""

    def __init__(self, sector: int = 512) -> None:
        self.sector = sector
        self.nodes: dict[int, _File | _Directory] = {0: _Directory()}
        self.next_node = 1

    def apply(self, op: Op) -> None:
        """Carry out a change that was checked before."""
        getattr(self, f"_{op.verb}")(op)

    def crashed(self, choose: Choose) -> Disk:
        """The disk after a power loss now; ``choose`` decides on each change that was not synced."""
        after = Disk(self.sector)
        after.next_node = self.next_node
        todo = [0]
        while todo:
            number = todo.pop()
            node = self.nodes[number]
            if isinstance(node, _File):
                after.nodes[number] = node.crashed(choose, self.sector)
                continue
            kept = node.crashed(choose)
            after.nodes[number] = kept
            todo += [child for child in kept.live.values() if child not in after.nodes and child not in todo]
        return after

    def copied(self) -> Disk:
        """An independent copy."""
        return copy.deepcopy(self)

    def find(self, path: str) -> _File | _Directory | None:
        """The node at a path, None where there is none."""
        node = self.nodes[0]
        for name in path.split("/") if path else []:
            if not isinstance(node, _Directory) or name not in node.live:
                return None
            node = self.nodes[node.live[name]]
        return node

    def files(self) -> dict[str, bytes]:
        """All files by path: what is visible now."""
        found: dict[str, bytes] = {}
        todo = [("", 0)]
        while todo:
            path, number = todo.pop()
            node = self.nodes[number]
            if isinstance(node, _File):
                found[path] = bytes(node.live)
            else:
                todo += [(f"{path}/{name}".lstrip("/"), child) for name, child in node.live.items()]
        return dict(sorted(found.items()))

    def _parent(self, path: str) -> tuple[_Directory, str]:
        folder, _, name = path.rpartition("/")
        node = self.find(folder)
        assert isinstance(node, _Directory), path
        return node, name

    def _add(self, path: str, node: _File | _Directory) -> None:
        self.nodes[self.next_node] = node
        parent, name = self._parent(path)
        parent.change((name, self.next_node))
        self.next_node += 1

    def _create(self, op: Op) -> None:
        self._add(op.path, _File())

    def _mkdir(self, op: Op) -> None:
        self._add(op.path, _Directory())

    def _write(self, op: Op) -> None:
        file = self.nodes[op.node]
        assert isinstance(file, _File)
        start = len(file.live) if op.offset is None else op.offset
        file.pending.append((start, op.data))
        file.live[start : start + len(op.data)] = op.data

    def _sync(self, op: Op) -> None:
        file = self.nodes[op.node]
        assert isinstance(file, _File)
        file.durable = bytes(file.live)
        file.pending.clear()

    def _sync_dir(self, op: Op) -> None:
        node = self.find(op.path)
        assert isinstance(node, _Directory)
        node.sync()

    def _link(self, op: Op) -> None:
        source, name = self._parent(op.path)
        target, new = self._parent(op.target)
        target.change((new, source.live[name]))

    def _rename(self, op: Op) -> None:
        source, name = self._parent(op.path)
        target, new = self._parent(op.target)
        node = source.live[name]
        if source is target:
            source.change((new, node), (name, None)) if new != name else None
        else:
            target.change((new, node))
            source.change((name, None))

    def _unlink(self, op: Op) -> None:
        parent, name = self._parent(op.path)
        parent.change((name, None))

    _rmdir = _unlink


@dataclass
class Fault:
    """Fails the ``nth`` (from 1) operation of this verb whose path contains ``path``, and ``times`` in a row.

    error: errno. after: the operation takes effect and fails all the same. phantom: it succeeds, but what was
    written is zeros (``write``), or nothing was made durable (``sync``, ``sync_dir``).
    """

    verb: str
    nth: int = 1
    error: int = errno.EIO
    times: int | None = 1
    path: str = ""
    after: bool = False
    phantom: bool = False
    seen: int = 0

    def strikes(self, verb: str, path: str) -> bool:
        """Whether it hits this operation, which is counted."""
        if verb != self.verb or self.path not in path:
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class SimulatedFiles:
    """``store.storage.local.Files`` on a :class:`Disk` in memory."""

    def __init__(self, disk: Disk | None = None, faults: Sequence[Fault] = (), exists: bool = True) -> None:
        self.disk = disk or Disk()
        self.faults = list(faults)
        self.log: list[Op] = []
        self.exists = exists
        self.before: Callable[[Op], None] = lambda op: None
        """Called before each change: where a test lets another process run in between."""

    def create(self, path: str) -> _SimulatedNewFile:
        self.before(op := Op("create", path))
        self._require_free("create", path)
        self._do(op)
        return _SimulatedNewFile(self, path, self.disk.next_node - 1)

    def link(self, source: str, target: str) -> None:
        self.before(op := Op("link", source, target))
        self._require_file("link", source)
        self._require_free("link", target)
        self._do(op)

    def rename(self, source: str, target: str) -> None:
        self.before(op := Op("rename", source, target))
        self._require_file("rename", source)
        self._require_parent("rename", target)
        if isinstance(self.disk.find(target), _Directory):
            raise StorageError(f"cannot rename {target}: it is a directory")
        self._do(op)

    def unlink(self, path: str) -> None:
        self.before(op := Op("unlink", path))
        self._require_file("unlink", path)
        self._do(op)

    def make_dir(self, path: str) -> bool:
        if path == "":
            made, self.exists = not self.exists, True
            return made
        self.before(op := Op("mkdir", path))
        self._require_parent("mkdir", path)
        if self.disk.find(path) is not None:
            return False
        self._do(op)
        return True

    def remove_dir(self, path: str) -> None:
        self.before(op := Op("rmdir", path))
        if self._require_dir("rmdir", path).live:
            raise StorageError(f"cannot rmdir {path}: it is not empty")
        self._do(op)

    def sync_dir(self, path: str) -> None:
        self.before(op := Op("sync_dir", path))
        self._require_dir("fsync directory", path)
        self._do(op)

    def list_dir(self, path: str) -> list[str]:
        return sorted(self._require_dir("list", path).live)

    def size(self, path: str) -> int:
        return len(self._require_file("stat", path, DamagedError).live)

    def read(self, path: str, limit: int) -> bytes:
        data = bytes(self._require_file("read", path, DamagedError).live)
        if len(data) > limit:
            raise DamagedError(f"{path} has {len(data)} bytes, more than the {limit} such a file can have")
        return data

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        flat = target.cast("B") if target.nbytes else memoryview(bytearray())
        data = self._require_file("read", path, DamagedError).live[offset : offset + len(flat)]
        if len(data) < len(flat):
            raise DamagedError(f"{path} ends at byte {offset + len(data)}, too early")
        flat[:] = data

    def below(self, path: str) -> Files:
        return FilesBelow(self, path)

    def _do(self, op: Op) -> None:
        fault = next((f for f in self.faults if f.strikes(op.verb, op.target or op.path)), None)
        if fault is None or fault.after or fault.phantom:
            done = _phantom(op) if fault is not None and fault.phantom else op
            if done is not None:
                self.disk.apply(done)
                self.log.append(done)
        if fault is not None and not fault.phantom:
            kind = NoSpaceError if fault.error == errno.ENOSPC else StorageError
            raise kind(f"cannot {op.verb} {op.target or op.path}: {os.strerror(fault.error)}")

    def _require_parent(self, verb: str, path: str) -> _Directory:
        folder = _checked(path).rpartition("/")[0]
        return self._require_dir(verb, folder)

    def _require_free(self, verb: str, path: str) -> None:
        self._require_parent(verb, path)
        if self.disk.find(path) is not None:
            raise ExistsError(f"cannot {verb} {path}: the name is taken")

    def _require_dir(self, verb: str, path: str) -> _Directory:
        node = self._require(verb, path)
        if not isinstance(node, _Directory):
            raise StorageError(f"cannot {verb} {path}: it is no directory")
        return node

    def _require_file(self, verb: str, path: str, otherwise: type[Exception] = StorageError) -> _File:
        node = self._require(verb, path)
        if not isinstance(node, _File):
            raise otherwise(f"cannot {verb} {path}: it is not a regular file")
        return node

    def _require(self, verb: str, path: str) -> _File | _Directory:
        nodes = self.disk.nodes
        node: _File | _Directory | None = nodes[0] if self.exists else None
        for name in _checked(path).split("/") if path else ():
            if isinstance(node, _File):
                raise StorageError(f"cannot {verb} {path}: a file is in the way")
            number = node.live.get(name) if node is not None else None
            node = None if number is None else nodes[number]
        if node is None:
            raise MissingError(f"cannot {verb} {path}: it is not there")
        return node


class _SimulatedNewFile:
    def __init__(self, files: SimulatedFiles, path: str, node: int) -> None:
        self._files = files
        self._path = path
        self._node = node

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._files.before(op := Op("write", self._open(), node=self._node, data=bytes(data)))
        self._files._do(op)

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        file = self._files.disk.nodes[self._node]
        if offset < 0 or offset + len(data) > len(file.live):
            raise ValueError(f"bytes from {offset} were never written")
        self._files.before(op := Op("write", self._open(), node=self._node, data=bytes(data), offset=offset))
        self._files._do(op)

    def sync(self) -> None:
        self._files.before(op := Op("sync", self._open(), node=self._node))
        self._files._do(op)

    def close(self) -> None:
        self._path = ""

    def _open(self) -> str:
        if not self._path:
            raise StorageError("the file is closed")
        return self._path


def _phantom(op: Op) -> Op | None:
    return replace(op, data=bytes(len(op.data))) if op.verb == "write" else None


@lru_cache(1 << 12)
def _checked(path: str) -> str:
    if path and any(part in ("", ".", "..") or "\0" in part for part in path.split("/")):
        raise DamagedError(f"{path!r} is no name inside the store")
    return path


def disk_after(start: Disk, log: Sequence[Op]) -> Disk:
    """``start`` after the logged changes; ``start`` itself stays as it is."""
    disk = start.copied()
    for op in log:
        disk.apply(op)
    return disk


def every_crash(disk: Disk, limit: int) -> Iterator[Disk]:
    """All crash states of a disk; where there are more than ``limit`` only the extreme ones.

    Extreme: nothing kept, all kept, one change lost, one change kept, and every prefix kept.
    """
    count = _choices(disk)
    if 1 << count <= limit:
        todo: list[tuple[bool, ...]] = [()]
        while todo:
            asked: list[bool] = []
            yield disk.crashed(_scripted(script := todo.pop(), asked))
            todo += [(*asked[:i], True) for i in range(len(script), len(asked))]
        return
    for i in range(count + 1):
        yield disk.crashed(_scripted([at < i for at in range(count)], []))
        yield disk.crashed(_scripted([at == i for at in range(count)], []))
        yield disk.crashed(_scripted([at != i for at in range(count)], []))


def _choices(disk: Disk) -> int:
    asked: list[bool] = []
    disk.crashed(_scripted([True] * 10_000, asked))
    return len(asked)


def _scripted(script: Sequence[bool], asked: list[bool]) -> Choose:
    def choose(kind: str) -> bool:
        asked.append(len(asked) < len(script) and script[len(asked)])
        return asked[-1]

    return choose
