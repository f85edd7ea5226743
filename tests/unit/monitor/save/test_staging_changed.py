"""State that is changed while its copy is under way: public calls wait for the copy, other changes give the save up."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from monitor.save.async_copy import AsyncCopy
from monitor.save.write_tracker import SourceSample
from store.catalog import open_catalog
from store.errors import SaveError
from store.storage.local import LocalFiles
from tests.support.jobs import Job, job, same
from tests.support.kept import memory
from tests.support.memory_jobs import kept_steps, settled, state_in


@contextmanager
def writers_held_up(one: Job) -> Iterator[None]:
    """Nothing is copied in the background inside the block."""
    release = threading.Event()
    one.ckpt._saver.upkeep(lambda: bool(release.wait(180)) and None, "holding the writer up")
    if one.ckpt._memory is not None:
        one.ckpt._memory._writer.submit(lambda: float(release.wait(180)))
    try:
        yield
    finally:
        release.set()


def zero_through_data(one: Job) -> None:
    for parameter in one.model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter))


def first_element_of_a_moment(one: Job) -> None:
    one.optimizer.state[one.model.head.weight]["exp_avg_sq"].data[0, 0] += 1.0


def last_element_of_a_weight(one: Job) -> None:
    one.model.blocks[1][0].bias.data[-1] *= 1.5


BY_DATA = [zero_through_data, first_element_of_a_moment, last_element_of_a_weight]


def commits(store: Path) -> list[int]:
    return sorted(save.step for save in open_catalog(LocalFiles(store)).saves())


@pytest.mark.parametrize("change", BY_DATA)
@pytest.mark.parametrize("settings", [{}, {"encoding": "compact", "encode": "staging"}])
def test_a_write_through_data_gives_the_save_up(
    tmp_path: Path, change: Callable[[Job], None], settings: dict[str, Any]
) -> None:
    with job(tmp_path / "s", staging="lazy", width=64, **settings) as one:
        one.ckpt.resume()
        one.step()
        one.update()
        with writers_held_up(one):
            one.ckpt.step()
            change(one)
        one.ckpt.flush()
        one.step()
        assert commits(tmp_path / "s") == [1, 3]
        assert one.metric("driftpoint_failures_total", reason="StateChangedError") == 1


@pytest.mark.parametrize("change", BY_DATA)
@pytest.mark.parametrize("more", [{}, {"encoding": "compact"}])
def test_a_write_through_data_gives_the_version_in_memory_up(
    tmp_path: Path, change: Callable[[Job], None], more: dict[str, Any]
) -> None:
    store = tmp_path / "s"
    with job(store, every=100, staging="lazy", width=64, memory=memory(store, **more)) as one:
        one.ckpt.resume()
        for _ in range(2):
            one.step()
            settled(one)
        one.update()
        with writers_held_up(one):
            one.ckpt.step()
            change(one)
        settled(one)
        assert 2 in kept_steps(store)
        assert 3 not in kept_steps(store)


def loads_the_model(one: Job, before: dict[str, Any]) -> None:
    one.model.load_state_dict(before["model"])


def loads_a_part(one: Job, before: dict[str, Any]) -> None:
    part = {name.removeprefix("head."): value for name, value in before["model"].items() if name.startswith("head.")}
    one.model.head.load_state_dict(part)


def loads_the_optimizer(one: Job, before: dict[str, Any]) -> None:
    one.optimizer.load_state_dict(before["optimizer"])


@pytest.mark.parametrize("load", [loads_the_model, loads_a_part, loads_the_optimizer])
def test_loading_waits_for_the_copies_and_the_save_is_that_of_the_decision(
    tmp_path: Path, load: Callable[[Job, dict[str, Any]], None]
) -> None:
    store = tmp_path / "s"
    with job(store, every=3, staging="lazy", memory=memory(store)) as one:
        one.ckpt.resume()
        one.step()
        settled(one)
        before = copy.deepcopy({"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()})
        one.step()
        settled(one)
        one.update()
        with writers_held_up(one):
            one.ckpt.step()
            decided = one.weights()
            load(one, before)
        one.ckpt.flush()
        settled(one)
        assert commits(store) == [3]
        one.update()
        with writers_held_up(one):
            one.ckpt.step()
            kept = one.weights()
            load(one, before)
        settled(one)
        assert 4 in kept_steps(store)
        assert same(state_in(store), kept)
    with job(store, every=100) as two:
        two.ckpt.resume(memory=False)
        assert same(two.weights(), decided)


def test_an_attached_model_is_pickled_and_copied_without_its_checkpointer(tmp_path: Path) -> None:
    with job(tmp_path / "s", staging="lazy") as one:
        data = io.BytesIO()
        torch.save(one.model, data)
        assert b"monitor" not in data.getvalue()
        data.seek(0)
        for other in (torch.load(data, weights_only=False), copy.deepcopy(one.model)):
            other.load_state_dict(one.model.state_dict())


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 2, 62, 63, 64, 65, 1000, 4097])
def test_the_first_and_the_last_element_are_compared_bit_by_bit(dtype: torch.dtype, numel: int) -> None:
    for place in (0, -1):
        live = torch.zeros(numel, dtype=torch.float32).to(dtype)
        made = AsyncCopy()
        made.add([live, torch.empty(0)], [torch.empty_like(live), torch.empty(0)])
        made.start()
        live.data.view(torch.uint8)[place] ^= 1
        made.finish()
        with pytest.raises(SaveError, match=r"ckpt\.copied\(\)"):
            made.require_whole()


@pytest.mark.parametrize("numel", [1, 63, 125, 1000, 4097, 1 << 20])
def test_any_run_of_a_fiftieth_is_found(numel: int) -> None:
    run = -(-numel // 50)
    for start in {0, numel // 3, numel // 2, numel - run}:
        live = torch.randn(numel)
        made = AsyncCopy()
        made.add([live], [torch.empty_like(live)])
        made.start()
        live.data[start : start + run].neg_()
        made.finish()
        with pytest.raises(SaveError):
            made.require_whole()


def test_values_that_are_no_number_are_equal_to_themselves() -> None:
    live = [torch.full((300,), float("nan")), torch.tensor([-0.0, float("inf")])]
    made = AsyncCopy()
    made.add(live, [torch.empty_like(one) for one in live])
    made.start()
    made.finish()
    made.require_whole()


def test_a_buffer_that_does_not_hold_the_source_is_noticed() -> None:
    live = torch.randn(100)
    assert SourceSample([(live, live.clone())], []).holds()
    assert not SourceSample([(live, torch.zeros(100))], []).holds()
