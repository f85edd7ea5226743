"""Copies of memory whose writes the kernel tracks, and ways of writing to it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from monitor.adapters.identity import MemoryRegions, addresses_of
from monitor.save.write_tracker import CopyPlan, TrackedCopy, WriteTracker

MIB = 1 << 18  # float32 values


def tracked(tracker: WriteTracker, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> TrackedCopy:
    sources = [source for source, _ in pairs]
    plan = CopyPlan(MemoryRegions.of(sources), addresses_of([buffer for _, buffer in pairs]))
    copy = TrackedCopy(tracker, plan, sources)
    copy.__dict__["pairs"] = pairs  # keeps the buffers
    return copy


def by_data(live: torch.Tensor) -> None:
    live.data[77_777] = 1.0


def by_numpy(live: torch.Tensor) -> None:
    live.numpy()[-3000] += 1.0


def in_place(live: torch.Tensor) -> None:
    live.clamp_(-0.1, 0.1)


def by_pointer(live: torch.Tensor) -> None:
    ctypes.memset(live.data_ptr() + 40_000, 1, 1)


def of_the_same_value(live: torch.Tensor) -> None:
    live.data[50_000] = float(live[50_000])


def by_a_view(live: torch.Tensor) -> None:
    live.view(-1, 2)[60_000:60_001].detach().zero_()


def by_a_system_call(live: torch.Tensor) -> None:
    with Path("/dev/zero").open("rb") as zeros:
        assert os.preadv(zeros.fileno(), [live.numpy().data[90_000:90_001]], 0) == 4


CHANGES = [by_data, by_numpy, in_place, by_pointer, of_the_same_value, by_a_view, by_a_system_call]
