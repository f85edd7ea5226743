"""State beside tensors and optimizer comes back as it was, or its absence is told and the state is not called exact."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import monitor
from merger.import_checkpoint import plan_import
from merger.merge import merge
from store.errors import ModelMismatchError, UnsupportedError, UsageError
from tests.support.forged import forge_part, saves_of


class Observer(nn.Module):
    """Keeps what it has seen as extra state, like the metadata of fp8 layers."""

    def __init__(self, seen: Any = None) -> None:
        super().__init__()
        self.seen = seen if seen is not None else {"amax": torch.zeros(2), "history": deque(maxlen=2)}
        self.broken = False

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state
        if self.broken and "new" not in state:
            raise RuntimeError("cannot be set")


class OneWay(nn.Module):
    def get_extra_state(self) -> Any:
        return {}


class Holder:
    """An object with a state of any kind."""

    def __init__(self, state: Any = 0) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"state": self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state["state"]


class Sampler(Holder):
    pass


class Scheduler(Holder):
    pass


class Run:
    """A model of one layer and an observer, or another module."""

    def __init__(self, store: Path, state: Any = (), extra: nn.Module | None = None) -> None:
        self.extra = nn.Identity() if extra is None else extra
        self.model = nn.Sequential(OrderedDict(layer=nn.Linear(2, 2), extra=self.extra))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        settings = {"store": str(store), "every": 1, "metrics": {"enabled": False}}
        self.ckpt = monitor.attach((self.model, self.optimizer), settings, state=state)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: Any) -> None:
        self.ckpt.close()

    def step(self) -> None:
        self.model.layer(torch.randn(3, 2)).sum().backward()
        self.optimizer.step()
        self.ckpt.step()
        self.ckpt.flush()

    @property
    def exact(self) -> bool:
        assert self.ckpt.certificate is not None
        return self.ckpt.certificate.exact

    @property
    def notes(self) -> str:
        assert self.ckpt.resumed is not None
        return "; ".join(self.ckpt.resumed.notes)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def saved(store: Path, state: Any = (), extra: nn.Module | None = None) -> None:
    with Run(store, state, extra) as run:
        run.step()


def test_the_extra_state_of_modules_comes_back(store: Path) -> None:
    seen = {"amax": torch.tensor([1.0, 2.0]), "history": deque([3, 4], maxlen=2)}
    saved(store, extra=Observer(seen))
    with Run(store, extra=Observer()) as run:
        assert run.ckpt.resume() == 1 and run.exact
        assert torch.equal(run.extra.seen["amax"], seen["amax"])
        assert run.extra.seen["history"] == seen["history"] and run.extra.seen["history"].maxlen == 2


def test_outputs_of_merges_and_imports_say_that_they_lack_it(store: Path, tmp_path: Path) -> None:
    saved(store, extra=Observer())
    for notes in (merge(store, tmp_path / "out").notes, plan_import(store).notes):
        assert any("left out: the extra state of module 'extra'" in note for note in notes), notes
    saved(tmp_path / "plain")
    assert not any("left out" in note for note in merge(tmp_path / "plain", tmp_path / "other").notes)


@pytest.mark.parametrize(
    ("extra", "message"),
    [(Observer({"of": object()}), r"\['modules'\]\['extra'\]\['of'\]"), (OneWay(), "module 'extra' .a OneWay.")],
    ids=["not plain", "no setter"],
)
def test_extra_state_that_cannot_be_carried_is_refused_by_name(extra: nn.Module, message: str, store: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Run(store, extra=extra)


def test_extra_state_that_the_store_lacks_takes_the_word_exact_away(store: Path) -> None:
    saved(store)
    with Run(store, extra=Observer()) as run:
        assert run.ckpt.resume() == 1
        assert not run.exact and "no extra state of the modules extra" in run.notes


def test_extra_state_without_a_module_takes_the_word_exact_away(store: Path) -> None:
    saved(store, extra=Observer())
    with Run(store) as run:
        assert run.ckpt.resume() == 1
        assert not run.exact and "extra state of the modules extra is dropped" in run.notes


def test_a_module_that_refuses_its_extra_state_keeps_all_as_it_was(store: Path) -> None:
    saved(store, extra=Observer())
    with Run(store, extra=Observer({"new": 1})) as run:
        run.extra.broken, before = True, run.model.layer.weight.detach().clone()
        with pytest.raises(UsageError, match="module 'extra'"):
            run.ckpt.resume()
        assert run.extra.seen == {"new": 1} and torch.equal(run.model.layer.weight, before)


def test_generators_of_devices_that_are_not_there_take_the_word_exact_away(store: Path) -> None:
    saved(store)

    def two_more(part: dict[str, Any]) -> None:
        generators = part["run_state"]["rng"]
        generators["cuda"] += [generators["torch"]] * 2

    forge_part(store, saves_of(store)[-1], two_more)
    with Run(store) as run:
        assert run.ckpt.resume() == 1
        assert not run.exact and "random generators of CUDA" in run.notes


class Place(NamedTuple):
    epoch: int
    batch: int


CONTAINERS = [
    Counter(a=1, b=2),
    defaultdict(list, {"x": [1, 2]}),
    OrderedDict([("b", 1), ("a", 2)]),
    deque([1, 2], maxlen=3),
    torch.Size([2, 3]),
    bytearray(b"ab"),
]


@pytest.mark.parametrize("state", CONTAINERS, ids=lambda state: type(state).__name__)
def test_containers_of_users_keep_their_type(state: Any, store: Path) -> None:
    saved(store, [Holder(state)])
    found = Holder()
    with Run(store, [found]) as run:
        run.ckpt.resume()
    assert type(found.state) is type(state) and found.state == state


@pytest.mark.parametrize(
    "state", [Place(1, 2), torch.nn.utils.rnn.PackedSequence(torch.ones(1), torch.ones(1))], ids=["named", "packed"]
)
def test_named_tuples_are_refused_by_name_and_path(state: Any, store: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"\['user'\]\[0\]\['state'\] is a .*{type(state).__name__}"):
        Run(store, [Holder(state)])


def test_a_schedule_with_milestones_counts_on(store: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    schedules = [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]) for _ in range(2)]
    saved(store, schedules[:1])
    with Run(store, schedules[1:]) as run:
        run.ckpt.resume()
    assert schedules[1].milestones == Counter({2: 2, 4: 1}) and type(schedules[1].milestones) is Counter


def test_named_objects_may_come_in_any_order(store: Path) -> None:
    saved(store, {"scheduler": Scheduler(1), "train": Sampler(2), "eval": Sampler(3)})
    objects = {"eval": Sampler(), "scheduler": Scheduler(), "train": Sampler()}
    with Run(store, objects) as run:
        run.ckpt.resume()
        assert run.exact
    assert {name: item.state for name, item in objects.items()} == {"eval": 3, "scheduler": 1, "train": 2}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([Scheduler(1), Sampler(2)], [Sampler(), Scheduler()]),
        ({"a": Scheduler(1), "b": Sampler(2)}, {"a": Sampler(), "b": Scheduler()}),
        ([Scheduler(1), Sampler(2)], {"b": Sampler(), "a": Scheduler()}),
        ([Scheduler(1), Sampler(2)], [Scheduler()]),
        ([Scheduler(1)], [Scheduler(), Sampler()]),
        ([Scheduler(1), Sampler(2)], {"a": Scheduler()}),
        ({"a": Scheduler(1), "b": Sampler(2)}, {"a": Scheduler()}),
        ({"a": Scheduler(1)}, [Scheduler()]),
    ],
    ids=["order", "names", "list to names", "one less", "one more", "list to fewer", "name gone", "names to list"],
)
def test_other_objects_are_refused_before_anything_changes(before: Any, after: Any, store: Path) -> None:
    saved(store, before)
    with Run(store, after) as run:
        weight, generator = run.model.layer.weight.detach().clone(), torch.get_rng_state()
        with pytest.raises(ModelMismatchError):
            run.ckpt.resume()
        assert all(item.state == 0 for item in run.ckpt._job.user.objects)
        assert torch.equal(run.model.layer.weight, weight) and torch.equal(torch.get_rng_state(), generator)


def test_a_new_name_keeps_its_initial_state_and_is_told(store: Path) -> None:
    saved(store, {"scheduler": Scheduler(1)})
    objects = {"ema": Sampler(9), "scheduler": Scheduler()}
    with Run(store, objects) as run:
        run.ckpt.resume()
        assert "state['ema'] (a Sampler) is not in the store" in run.notes
        run.step()
    assert [item.state for item in objects.values()] == [9, 1]
    again = {"scheduler": Scheduler(), "ema": Sampler()}
    with Run(store, again) as run:
        run.ckpt.resume()
        assert "not in the store" not in run.notes
    assert [item.state for item in again.values()] == [1, 9]


def test_none_drops_what_is_stored_under_a_name(store: Path) -> None:
    saved(store, {"scheduler": Scheduler(1), "ema": Sampler(2)})
    with Run(store, {"scheduler": Scheduler(), "ema": None}) as run:
        run.ckpt.resume()
        assert run.ckpt._job.user.objects[0].state == 1 and "'ema' is dropped" in run.notes
        run.step()
    with Run(store, {"scheduler": Scheduler()}) as run:
        assert run.ckpt.resume() == 2


def test_a_list_becomes_names_in_its_order_and_new_ones_follow(store: Path) -> None:
    saved(store, [Scheduler(1), Sampler(2)])
    objects = {"scheduler": Scheduler(), "sampler": Sampler(), "ema": Holder(5)}
    with Run(store, objects) as run:
        run.ckpt.resume()
    assert [item.state for item in objects.values()] == [1, 2, 5]


def test_a_named_object_whose_class_was_renamed_takes_its_state_and_that_is_told(store: Path) -> None:
    saved(store, {"data": Sampler(1), "scheduler": Scheduler(2)})
    objects = {"data": Holder(), "scheduler": Scheduler()}
    with Run(store, objects) as run:
        run.ckpt.resume()
        assert "state['data'] (a Holder) takes the state that was saved under its name by a Sampler" in run.notes
    assert [item.state for item in objects.values()] == [1, 2]


def test_a_subclass_takes_the_state_of_its_base(store: Path) -> None:
    saved(store, [Holder(3)])
    sampler = Sampler()
    with Run(store, [sampler]) as run:
        run.ckpt.resume()
    assert sampler.state == 3


def test_stores_without_names_and_classes_are_read(store: Path) -> None:
    saved(store, [Scheduler(1), Sampler(2)])
    forge_part(store, saves_of(store)[-1], lambda part: part["run_state"].pop("objects"))
    objects = [Scheduler(), Sampler()]
    with Run(store, objects) as run:
        run.ckpt.resume()
        assert run.exact
    assert [item.state for item in objects] == [1, 2]


def test_a_named_object_of_another_kind_is_refused(store: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    saved(store, {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)})
    other = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    before = other.state_dict()
    with Run(store, {"scheduler": other}) as run, pytest.raises(ModelMismatchError):
        run.ckpt.resume()
    assert other.state_dict() == before
