"""The journal on a small disk: it leaves room for saves, and goes where one does not fit beside it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import monitor
from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.mounts import fill, tmpfs

SETTINGS = {"every": 20, "metrics": {"enabled": False}, "trace": {"enabled": False}}


def train(store: Path, steps: int, *, journal: bool) -> int:
    """Train on from what is there, and return the last step that was saved. A save takes about 200 kB, a record 70."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = monitor.attach((model, optimizer), {**SETTINGS, "store": str(store), "journal": {"enabled": journal}})
    begin = ckpt.resume()
    for _ in range(begin, begin + steps):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        ckpt.step()
        ckpt.flush()
    ckpt.finish(clean=False)
    return newest(store)


def newest(store: Path) -> int:
    return open_catalog(LocalFiles(store)).saves()[0].step


def test_the_journal_leaves_room_for_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tmpfs(tmp_path / "small", "2500k") as place, caplog.at_level(logging.WARNING, "driftpoint"):
        assert train(place / "store", 90, journal=True) == 80
        assert sum("kept for the next two saves" in one for one in caplog.messages) == 1
        for journal in (True, True, False):  # a resume knows only this rank's sizes at first
            begin = newest(place / "store")
            assert train(place / "store", 100, journal=journal) > begin + 60
        assert not [one for one in caplog.messages if "failed" in one]


def test_a_journal_goes_where_a_save_does_not_fit_beside_it(tmp_path: Path) -> None:
    """Another program takes the rest of the disk, and the journal is off since."""
    with tmpfs(tmp_path / "small", "2500k") as place:
        assert train(place / "store", 50, journal=True) == 40
        fill(place, leave=150_000)
        assert train(place / "store", 60, journal=False) >= 80
        assert not list((place / "store/journal/segments").iterdir())
