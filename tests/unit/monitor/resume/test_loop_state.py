"""monitor.LoopState: what a loop holds comes back in value, type and place."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import monitor
from store.errors import ConfigError, UnsupportedError
from tests.support.jobs import job


def test_values_come_back_as_they_were_at_the_step(tmp_path: Path) -> None:
    rng = np.random.default_rng(3).bit_generator.state, random.Random(4).getstate()
    held = monitor.LoopState(
        epoch=3, best=0.1, batch=(torch.arange(3), [torch.ones(2), "a"]), seen=OrderedDict(a=1), rng=rng
    )
    with job(tmp_path / "store", state={"loop": held}) as one:
        assert one.ckpt.resume() == 0
        one.step()
        held.epoch, held.batch[0][0], held.late = 4, 7, True
        one.step()
        held.epoch = 5
        held.batch[0][0] = 8  # after the step
    found = monitor.LoopState(epoch=0, best=None, batch=None, seen=None)
    with job(tmp_path / "store", state={"loop": found}) as two:
        assert two.ckpt.resume() == 2
    assert (found.epoch, found.best, found.seen, found.late) == (4, 0.1, OrderedDict(a=1), True)
    assert found.rng == rng
    assert type(found.seen) is OrderedDict and type(found.batch) is tuple
    assert found.batch[0].tolist() == [7, 1, 2] and found.batch[1][0].tolist() == [1, 1] and found.batch[1][1] == "a"


def test_tensors_return_to_the_devices_of_those_they_replace() -> None:
    host = torch.ones(2)
    meta = host.to("meta")
    found = monitor.LoopState(one=meta, pair=(meta, host), by_name={"x": meta}, new=None, other=[meta])
    found.load_state_dict(
        {"one": host, "pair": (host, host), "by_name": {"x": host, "y": host}, "new": host, "other": []}
    )
    places: Any = (found.one, *found.pair, *found.by_name.values(), found.new)
    assert [one.device.type for one in places] == ["meta", "meta", "cpu", "meta", "cpu", "cpu"]
    assert found.other == []


def test_a_value_that_was_not_saved_stays_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "driftpoint")
    found = monitor.LoopState(epoch=1, best=2.0)
    found.load_state_dict({"epoch": 5})
    assert vars(found) == {"epoch": 5, "best": 2.0}
    assert "the saved run had no value of best" in caplog.text


def test_what_cannot_be_saved_is_refused_when_attaching(tmp_path: Path) -> None:
    with (
        pytest.raises(UnsupportedError, match="data"),
        job(tmp_path / "store", state={"loop": monitor.LoopState(data=iter([1]))}),
    ):
        pass


def test_names_that_it_does_not_have(tmp_path: Path) -> None:
    found = monitor.LoopState(epoch=1)
    with pytest.raises(AttributeError, match="'epochs'; it has epoch"):
        found.epochs  # noqa: B018
    with pytest.raises(ConfigError):
        monitor.LoopState(state_dict=1)
    assert vars(copy.deepcopy(found)) == vars(pickle.loads(pickle.dumps(found))) == {"epoch": 1}
