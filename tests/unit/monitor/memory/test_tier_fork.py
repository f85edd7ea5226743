"""A child that the training script forks has a copy of its checkpointer, and must not end what is the parent's."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from monitor.config.load import Config
from store.memory.arena import is_owned
from store.session import lock_holder
from tests.support.jobs import Job
from tests.support.kept import memory, settled, tier_of
from tests.support.memory_jobs import kept_steps


def in_child(action: Callable[[], None]) -> None:
    """Fork, have the child do it, and wait for its end."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except SystemExit:
            pass
        except BaseException:  # noqa: BLE001 - whatever it is, this process is not the test's
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def leaves(one: Job) -> None:
    with one.ckpt:
        sys.exit(0)


@pytest.mark.parametrize("how", ["close", "with", "exit"])
def test_the_end_of_a_forked_child_takes_nothing_away(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest commit is as new as memory, so that an end of the job would give the memory back."""
    torch.manual_seed(0)
    store = tmp_path / "store"
    monkeypatch.setattr(Config, "shares_memory", lambda _: False)
    one = Job(store, every=4, memory=memory(store), timeouts={"close": 5.0})
    one.ckpt.resume()
    for _ in range(6):
        one.step()
        settled(one)
    one.ckpt.save(wait=True)
    ends = {
        "close": one.ckpt.close,
        "with": lambda: leaves(one),
        "exit": lambda: one.ckpt._close(5.0, clean=True, ended=False),  # what the interpreter's end brings about
    }
    in_child(ends[how])
    assert kept_steps(store) == [5, 6]
    assert is_owned(tier_of(store).generation(1).owner(0)) and lock_holder(store) == os.getpid()
    for _ in range(3):
        one.step()
        settled(one)
    assert kept_steps(store) == [7, 9]
    one.ckpt.close()
    assert kept_steps(store) == []
