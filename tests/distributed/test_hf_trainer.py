"""The Hugging Face Trainer, killed and started again, ends where the uninterrupted one does: losses, logs, rates,
weights. Under DeepSpeed ZeRO-2 and ZeRO-3, DistributedDataParallel, FSDP2 and in one process; beside its own saving and
with that switched off; evaluating in between. A composite (policy ``budget``) ends near by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import Launched, alone, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

OFF = {"save_strategy": "no"}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 3}
BESIDE = {
    **EVALUATING, "save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": True, "save_total_limit": 1,
}  # fmt: skip


THEIRS = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
}
"""DeepSpeed's own optimizer and schedule; else they are the Trainer's."""


def case(
    name: str, zero: int = 0, every: int = 3, kill_at: int = 8, config: Any = None, **arguments: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "zero": zero,
        "config": config or {},
        "samples": 40 if zero or name == "ddp" else 20,
        "kill_at": kill_at,
        "settings": {"every": every},
        "arguments": {**OFF, "num_train_epochs": 3, **arguments},
    }


TIGHT = {
    "policy": "budget", "budget": {"bytes_per_hour": 2e6, "burst_seconds": 60}, "every": 1, "encoding": "compact",
}  # fmt: skip
ALONE = [
    case("epochs", **EVALUATING),
    case("steps", max_steps=12, **EVALUATING),
    case("boundary", every=5, kill_at=7, eval_strategy="epoch"),
    case("beside", **BESIDE),
    {**case("budget"), "settings": TIGHT},
    {**case("memory"), "settings": {"every": 3, "memory": {"enabled": True, "every": 1}}},
]
LORA = [
    {**case("lora", **EVALUATING), "lora": True},
    {**case("lora-budget"), "lora": True, "settings": TIGHT},
    {**case("lora-skip"), "lora": True, "settings": {"every": 3, "frozen": "skip"}},
]
GENERATOR = {"accelerator_config": {"use_seedable_sampler": False}}  # Accelerate gives the sampler one
DDP = [
    case("ddp", **BESIDE),
    {**case("ddp-sampler", **GENERATOR), "samples": 40},
    {**case("ddp-sampler-boundary", every=5, kill_at=7, **GENERATOR), "samples": 40},
    {**case("fsdp2", **EVALUATING), "samples": 40, "fsdp2": True},
    {**case("ddp-budget"), "samples": 40, "settings": TIGHT},
]
ZERO = [
    {**case("zero2-budget", zero=2), "settings": TIGHT},
    case("zero2", zero=2, **EVALUATING),
    case("zero3", zero=3, config=THEIRS, **EVALUATING),
    {**case("zero3-lora", zero=3, config=THEIRS), "lora": True, "settings": {"every": 3, "frozen": "skip"}},
]


COMMITTED = {"boundary": 5, "ddp-sampler-boundary": 5}


def launched(cases: list[dict[str, Any]], directory: Path) -> Launched:
    if cases in (ALONE, LORA):
        done = [alone("hf_train.py", {"cases": cases, "phase": phase}, directory) for phase in (0, 1)]
    else:
        done = [torchrun("hf_train.py", 2, {"cases": cases}, directory, restarts=1)]
    assert [one.code for one in done] in ([-9, 0], [0]), "\n".join(one.output[-6000:] for one in done)
    assert not any("does not go on as that run did" in one.output for one in done)  # it draws the same random numbers
    return Launched(0, "", [record for one in done for record in one.records])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(ALONE, id="alone", marks=pytest.mark.core),
        pytest.param(LORA, id="lora"),
        pytest.param(DDP, id="ddp", marks=pytest.mark.core),
        pytest.param(ZERO, id="zero"),
    ],
)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Launched]:
    """The names of a launch's cases, and what became of it."""
    return [case["name"] for case in request.param], launched(request.param, tmp_path_factory.mktemp("launch"))


def test_a_killed_trainer_goes_on_as_if_nothing_had_happened(ran: tuple[list[str], Launched]) -> None:
    names, done = ran
    assert {(one["case"], one["rank"]) for one in done.of("resumed")} >= {(name, 0) for name in names}
    for straight in done.of("straight"):
        name, rank = straight["case"], straight["rank"]
        if name.endswith("budget"):
            continue
        killed, resumed = (done.one(kind, case=name, rank=rank) for kind in ("killed", "resumed"))
        assert resumed["exact"], name
        first = COMMITTED.get(name, 6)
        if name == "memory":
            first = min(int(step) for step in resumed["losses"])
            assert first in (7, 8)
        expected = {int(step): losses for step, losses in straight["losses"].items()}
        continued = {int(step): losses for step, losses in resumed["losses"].items()}
        assert {int(step) for step in killed["losses"]} == set(range(killed["step"] + 1))
        assert continued == {step: losses for step, losses in expected.items() if step >= first}, name
        for key in ("step", "epoch", "best", "rate", "weights"):
            assert resumed[key] == straight[key], (name, key)
        assert told(resumed) == told(straight), name


def test_a_composite_goes_on_near_by(ran: tuple[list[str], Launched]) -> None:
    _, done = ran
    for straight in done.of("straight"):
        name, rank = straight["case"], straight["rank"]
        if not name.endswith("budget"):
            continue
        resumed = done.one("resumed", case=name, rank=rank)
        assert not resumed["exact"]
        assert 0 < min(map(int, resumed["losses"])) <= 8
        assert resumed["step"] == straight["step"]
        theirs, ours = (mean_of_last(one) for one in (straight, resumed))
        assert abs(ours - theirs) < 0.2, (name, theirs, ours)


def mean_of_last(record: dict[str, Any]) -> float:
    """Of the losses in the last five steps."""
    last = sorted(record["losses"], key=int)[-5:]
    found = [float.fromhex(loss) for step in last for loss in record["losses"][step]]
    return sum(found) / len(found)


def told(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The Trainer's own history, less what depends on the clock."""
    clocks = ("runtime", "per_second")
    history = [
        {key: value for key, value in entry.items() if not any(clock in key for clock in clocks)}
        for entry in record["log"]
    ]
    return [entry for entry in history if "train_loss" not in entry]
