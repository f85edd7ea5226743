"""Tensors get other memory between a decision's listing and its copies, by the script's own code. The copies follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from monitor.decide.decider import Decider
from monitor.save import async_copy
from tests.support.internals import abandon, wait_for_snapshot
from tests.support.jobs import Job, same
from tests.support.kept import memory
from tests.support.late_streams import LateStreams

WIDTHS = (64, 512)
"""Of models whose tensors are freed to the heap, and to the system: reading those would end the process."""


class Mover:
    """An object in ``state=`` that repacks the weights when it is asked for its state."""

    def __init__(self) -> None:
        self.model: torch.nn.Module | None = None
        self.kept: list[torch.Tensor] = []

    def move(self) -> None:
        for parameter in self.model.parameters() if self.model is not None else ():
            parameter.data = parameter.data.clone()
            self.kept += [torch.full_like(parameter, 7.0) for _ in range(4)]  # where it was

    def state_dict(self) -> dict[str, Any]:
        self.move()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """It has none."""


@contextmanager
def copied(way: str) -> Iterator[None]:
    """way: of the copies. Through views in late streams, as on a device; with writes tracked, if that is possible."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "views":
            patch.setattr(async_copy, "_has_views", lambda _: True)
            LateStreams(patch)
        yield


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("way", ["views", "tracked"])
def test_while_a_snapshot_captures_the_run_state(way: str, width: int, tmp_path: Path) -> None:
    store, mover = tmp_path / "s", Mover()
    settings = {"width": width, "every": 100, "memory": memory(store), "staging": "lazy" if way == "views" else "auto"}
    one = Job(store, state=[mover], **settings)  # type: ignore[arg-type]
    one.ckpt.resume()
    for step in range(1, 6):
        one.update()
        expected, mover.model = one.weights(), one.model if step == 5 else None
        with copied(way):
            one.ckpt.step()
            one.ckpt.flush()
            wait_for_snapshot(one.ckpt)
    mover.model = None
    abandon(one.ckpt)
    two = Job(store, state=[Mover()], **settings)  # type: ignore[arg-type]
    two.update()
    assert two.ckpt.resume() == 5 and two.ckpt.certificate is not None and two.ckpt.certificate.exact
    assert same(two.weights(), expected)
    two.ckpt.close(save=False)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("way", ["views", "tracked"])
def test_while_the_policy_decides(way: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, mover, decide = tmp_path / "s", Mover(), Decider.decide
    staging = "lazy" if way == "views" else "auto"
    one = Job(store, width=width, staging=staging)
    one.ckpt.resume()

    def decides(self: Decider, *arguments: Any, **named: Any) -> Any:
        made = decide(self, *arguments, **named)
        mover.move()
        return made

    monkeypatch.setattr(Decider, "decide", decides)
    for step in range(1, 5):
        one.update()
        expected, mover.model = one.weights(), one.model if step == 4 else None
        with copied(way):
            one.ckpt.step()
            one.ckpt.flush()
    mover.model = None
    one.ckpt.close(save=False)
    two = Job(store, width=width)
    two.update()
    assert two.ckpt.resume() == 4 and two.ckpt.certificate is not None and two.ckpt.certificate.exact
    assert same(two.weights(), expected)
    two.ckpt.close(save=False)
