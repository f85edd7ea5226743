"""What a job that is to be killed writes down: a file of JSON lines that outlives it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Diary:
    """The file, open for appending. All ranks write to it, each line at once."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def put(self, kind: str, **fields: Any) -> None:
        """Append a line."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        line = json.dumps({"kind": kind, "rank": rank, "pid": os.getpid(), **fields})
        os.write(self._descriptor, f"{line}\n".encode())


def entries(diary: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the lines so far, of one kind or all."""
    lines = diary.read_bytes().split(b"\n")[:-1] if diary.exists() else []
    found = [json.loads(line) for line in lines]
    return [one for one in found if kind in (None, one["kind"])]
