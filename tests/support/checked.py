"""A small job whose saves are checked, and what the self-check says of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from store.catalog import open_catalog
from store.certificate import certify
from store.resolve import newest_resumable
from store.storage.local import LocalFiles

CONFIG = {"every": 1, "metrics": {"enabled": False}}


class Job:
    """A model, an optimizer and a checkpointer whose saves are waited for."""

    def __init__(
        self, store: Path, model: nn.Module | None = None, kind: Any = None, state: Any = (), **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Linear(4, 4)
        self.optimizer = (kind or torch.optim.AdamW)(self.model.parameters())
        self.ckpt = monitor.attach(
            (self.model, self.optimizer), {**CONFIG, "store": str(store), **settings}, state=list(state)
        )
        self.ckpt.resume()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 4)).square().sum().backward()
        self.optimizer.step()
        self.ckpt.step()
        self.ckpt.flush()

    @property
    def failures(self) -> float:
        found = self.ckpt.metrics.registry.get_sample_value("driftpoint_failures_total", {"reason": "self_check"})
        return found or 0.0


def errors(logged: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in logged.records if one.levelno >= logging.ERROR]


def checks(logged: pytest.LogCaptureFixture) -> list[str]:
    return [text for one in logged.records if (text := one.getMessage()).startswith("self-check of step")]


def exact(store: Path) -> bool:
    return certify(newest_resumable(open_catalog(LocalFiles(store)))[0]).exact


def require_found(job: Job, store: Path, logged: pytest.LogCaptureFixture, *words: str) -> None:
    """One error that has the words, in the log, the metrics and every commit; a resume is not exact."""
    job.step()
    (said,) = errors(logged)
    assert all(word in said for word in words), said
    assert not exact(store)
    assert job.failures == 1
    job.step()
    assert not exact(store) and len(errors(logged)) == 1
    job.ckpt.close()
