"""What one rank finds at a resume counts on all of them. Two ranks in threads, each with a model of its own."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

import monitor
from monitor.adapters.pytorch import PyTorchAdapter
from monitor.config.load import load_config
from monitor.resume.resume import LiveState, ResumeResult, resume
from monitor.run_state import UserState
from store.catalog import open_catalog
from store.errors import DriftpointError
from store.storage.local import LocalFiles

RANKS = 2


class Threads:
    """The collectives of threads."""

    def __init__(self) -> None:
        self.met, self.box = threading.Barrier(RANKS, timeout=60), [b""] * RANKS

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self.box[rank] = pickle.dumps(value)
        self.met.wait()
        found = [pickle.loads(one) for one in self.box]
        self.met.wait()
        return found


class Rank:
    """A group, as one rank sees it."""

    world_size = RANKS

    def __init__(self, rank: int, threads: Threads) -> None:
        self.rank, self._threads = rank, threads

    def all_gather(self, value: Any) -> list[Any]:
        return self._threads.all_gather(self.rank, value)

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]

    def all_reduce_max(self, values: list[int]) -> list[int]:
        return [max(column) for column in zip(*self.all_gather(values), strict=True)]


class Counter:
    """A user's object; refuses its state so many times."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            self.refuses -= 1
            raise ValueError("not now")


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def resumed(
    store: Path, objects: Callable[[int], dict[str, Any]], mixed: Callable[[int], bool] = lambda _: False
) -> list[tuple[ResumeResult | None, LiveState]]:
    """What the ranks of a job resume from a store, whose user has the object a; None where it is refused."""
    model, optimizer = job()
    settings = {"store": str(store), "every": 1, "metrics": {"enabled": False}}
    with monitor.attach((model, optimizer), settings, state={"a": Counter()}) as ckpt:
        ckpt.resume()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        ckpt.step()
    threads, config = Threads(), load_config(settings).resume

    def run(rank: int) -> tuple[ResumeResult | None, LiveState]:
        group: Any = Rank(rank, threads)
        adapter, live, catalog = PyTorchAdapter(*job()), LiveState(mixed(rank)), open_catalog(LocalFiles(store))
        try:
            user = UserState(objects(rank))
            return resume(catalog, adapter, group, user, settings=config, live=live), live
        except DriftpointError:
            return None, live

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def test_an_object_that_one_rank_does_not_find_is_lost_on_all(tmp_path: Path) -> None:
    found = resumed(tmp_path / "s", lambda rank: {"a": Counter(), **({"b": Counter()} if rank else {})})
    assert [result is not None and len(result.lost) for result, _ in found] == [1, 1]


def test_what_one_rank_cannot_undo_is_a_mixture_on_all(tmp_path: Path) -> None:
    found = resumed(tmp_path / "s", lambda rank: {"a": Counter(refuses=2 * rank)})
    assert [(result, live.mixed) for result, live in found] == [(None, True)] * 2


def test_what_all_ranks_undo_is_none(tmp_path: Path) -> None:
    found = resumed(tmp_path / "s", lambda rank: {"a": Counter(refuses=rank)})
    assert [(result, live.mixed) for result, live in found] == [(None, False)] * 2


def test_a_mixture_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    found = resumed(tmp_path / "s", lambda rank: {"a": Counter(refuses=rank)}, mixed=bool)
    assert [(result, live.mixed) for result, live in found] == [(None, True)] * 2
