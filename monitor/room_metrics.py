"""Metrics of the room that is left: on the store's disk, and in shared memory.

Of the store a background thread asks, never the training thread or a scrape: a file server that hangs would hold them.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Gauge


class RoomMetrics:
    """Of a filesystem. what: word of the names."""

    def __init__(self, registry: CollectorRegistry, what: str, told: str) -> None:
        self.free = Gauge(f"driftpoint_{what}_free_bytes", f"Bytes that are free {told}", registry=registry)
        self.size = Gauge(
            f"driftpoint_{what}_size_bytes", f"Bytes {told}, free or not; 0: not known", registry=registry
        )

    def look(self, path: str | os.PathLike[str]) -> None:
        """Ask the filesystem of ``path``, which may not say: then it is not known. May block."""
        try:
            found = os.statvfs(path)
        except OSError:  # it is away: saves fail then, and tell
            self.size.set(0)
            return
        self.free.set(found.f_bavail * found.f_frsize)
        self.size.set(found.f_blocks * found.f_frsize)
