"""Streams whose copies are made as late as CUDA allows: when somebody waits for them. For where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from monitor.save import async_copy


class Stream:
    """Copies that were asked for and not made. ``copied``: how many were made."""

    def __init__(self, *_: Any) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.copied = 0

    def wait_stream(self, other: Stream) -> None:
        """What follows here comes after what was asked of the other one: which may be at once."""
        other.synchronize()

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()
            self.copied += 1

    def record_event(self) -> Stream:
        """An event, which is over once this stream is."""
        return self


class LateStreams:
    """``main`` is training's, ``side`` is that of the copies."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.main, self.side = Stream(), Stream()
        self._current = self.main
        real = torch.Tensor.copy_

        def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if non_blocking:
                self._current.queue.append(lambda: real(target, source))
                return target
            self._current.synchronize()
            return real(target, source)

        def copies(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool) -> None:
            for target, source in zip(targets, sources, strict=True):
                copy(target, source, non_blocking)

        patch.setattr(torch, "_foreach_copy_", copies)
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(torch.Tensor, "copy_", copy)
        patch.setattr(async_copy, "_side_stream", cache(async_copy._side_stream.__wrapped__))
        patch.setattr(torch.cuda, "Stream", lambda _: self.side)
        patch.setattr(torch.cuda, "current_stream", lambda _: self.main)
        patch.setattr(torch.cuda, "stream", self._in)

    @contextmanager
    def _in(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before
