"""Reading objects by ranges: what is read front to back comes ahead of being asked for, several ranges at once.

A block read ahead belongs to one thread and goes when it is used up; nothing is kept that could be given twice. Objects
are never changed, so what was read of one stays right. It does not know what is read.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from store.errors import DamagedError
from store.objects.bucket import Bucket
from store.objects.options import MIB

_LARGEST = 4 * MIB
"""Bytes of one request."""


@dataclass
class _Place:
    """Where a thread's last read ended, and what was read beyond it. size: of the object. window: bytes read ahead."""

    key: str
    size: int
    position: int
    window: int = 0
    block: memoryview = field(default_factory=lambda: memoryview(b""))


class Reader:
    """Of one bucket. Any thread."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._piece = min(_LARGEST, bucket.options.part_bytes())
        self._own = threading.local()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``. DamagedError where the object ends early; MissingError without one."""
        rest = target.cast("B") if target.nbytes else memoryview(b"")
        place = self._place(key, offset)
        if offset + len(rest) > place.size:
            short = offset + len(rest) - place.size
            raise DamagedError(f"{self._bucket.where(key)} ends at byte {place.size}, {short} bytes too early")
        while len(rest):
            if not len(place.block):
                self._read_on(place, len(rest))
            count = min(len(rest), len(place.block))
            rest[:count] = place.block[:count]
            rest, place.block = rest[count:], place.block[count:]
            place.position += count

    def _place(self, key: str, offset: int) -> _Place:
        place: _Place | None = getattr(self._own, "place", None)
        if place is not None and (place.key, place.position) == (key, offset):
            place.window = min(max(2 * place.window, self._piece), self._piece * self._bucket.options.connections)
            return place
        size = place.size if place is not None and place.key == key else self._bucket.size(key)
        self._own.place = place = _Place(key, size, offset)
        return place

    def _read_on(self, place: _Place, wanted: int) -> None:
        most = self._piece * self._bucket.options.connections
        count = min(max(min(wanted, most), place.window), place.size - place.position)
        end = place.position + count
        stops = [*range(place.position + self._piece, end, self._piece), end]
        starts = [place.position, *stops[:-1]]
        if len(starts) == 1:
            place.block = self._bucket.get_range(place.key, starts[0], stops[0])
        else:
            keys = [place.key] * len(starts)
            place.block = memoryview(b"".join(self._threads().map(self._bucket.get_range, keys, starts, stops)))
        if len(place.block) != count:
            raise DamagedError(f"{self._bucket.where(place.key)} gave {len(place.block)} bytes instead of {count}")

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._bucket.options.connections, "driftpoint-ranges")
            return self._pool
