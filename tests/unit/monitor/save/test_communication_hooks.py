"""What a communication hook of DistributedDataParallel keeps is saved by an object in ``state=``, or told."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.support.checked import Job, errors, exact, require_found


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "driftpoint"):
        yield caplog


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Compression:
    """Saves and restores what a communication hook keeps."""

    def __init__(self, kept: PowerSGDState) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"iter": self.kept.iter, "errors": self.kept.error_dict}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept.iter, self.kept.error_dict = state["iter"], state["errors"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("handed", [False, True])
def test_what_a_communication_hook_keeps(store: Path, logged: pytest.LogCaptureFixture, handed: bool) -> None:
    model, kept = DistributedDataParallel(nn.Linear(4, 4)), PowerSGDState(None, 1, 2)
    model.register_comm_hook(kept, powerSGD_hook)
    job = Job(store, model, state=[Compression(kept)] if handed else [])
    if not handed:
        return require_found(job, store, logged, "by the communication hook powerSGD_hook is PowerSGDState")
    job.step()
    assert errors(logged) == [] and exact(store)
    return job.ckpt.close()


def compress(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.fp16_compress_hook(dist.group.WORLD, bucket)


compress.__annotations__ = default_hooks.fp16_compress_hook.__annotations__  # DDP compares them as objects


class Plain:
    def __init__(self, **values: object) -> None:
        vars(self).update(values)


class Slots:
    __slots__ = ("errors",)


class Slotted(Slots):
    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.errors, self.__count = torch.zeros(2), 1


class Raising:
    def __init__(self) -> None:
        vars(self)["rate"] = 1

    @property
    def rate(self) -> float:
        raise RuntimeError("not yet")


LASTING = {
    "a tensor": torch.zeros(2),
    "a list of tensors": [torch.zeros(2)],
    "a mapping that is filled later": {},
    "tensors in a list of mappings of an object": Plain(errors=[{"bucket": torch.zeros(2)}]),
    "a list of an object that is filled later": Plain(errors=[]),
    "a random generator": Plain(rng=torch.Generator()),
    "a generator of numpy": Plain(rng=np.random.default_rng(0)),
    "a generator of python": Plain(rng=random.Random(0)),
    "a tensor in an inherited slot": Slotted(),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kept", LASTING.values(), ids=LASTING)
def test_where_a_communication_hook_keeps_tensors(store: Path, logged: pytest.LogCaptureFixture, kept: object) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(kept, compress)
    require_found(Job(store, model), store, logged, "by the communication hook compress is")


CONSTANT = {
    "a process group": lambda: dist.group.WORLD,
    "numbers": lambda: {"factor": 2.0, "names": ("a", "b")},
    "numbers of an object": lambda: Plain(factor=2.0, dtype=torch.bfloat16, group=dist.group.WORLD, none=None),
    "a device mesh": lambda: Plain(mesh=init_device_mesh("cpu", (1,))),
    "the model": lambda: Plain(model=nn.Linear(2, 2)),
    "a logger and an event": lambda: Plain(
        log=logging.getLogger("hook"), stop=threading.Event(), lock=threading.Lock(), torch=torch
    ),
    "a property that raises": Raising,
    "a long list": lambda: [0.0] * 1_000_000,
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kept", CONSTANT.values(), ids=CONSTANT)
def test_a_communication_hook_that_keeps_no_tensors(
    store: Path, logged: pytest.LogCaptureFixture, kept: Callable[[], object]
) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(kept(), compress)
    job = Job(store, model)
    job.step()
    assert errors(logged) == [] and exact(store)
    job.ckpt.close()
