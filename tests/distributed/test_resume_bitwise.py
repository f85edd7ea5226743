"""A job that was killed and brought back ends where the uninterrupted one does, to the last bit; and a composite
holds exactly the versions that its certificate names.

Dropout, a schedule, accumulation, clipping, two param groups, tied weights, a frozen block, and a loader whose
order and augmentation come from four random generators. The death is a real SIGKILL in the middle of a step; the
restart is torchrun's own, or a process started anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.support.launch import Launched, alone, once, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS, KILL_AT = 11, 8
ZERO = [
    {"name": f"zero{stage}-{precision}", "kind": "zero", "stage": stage, "precision": precision, "every": 3}
    for stage in (1, 2, 3)
    for precision in ("bf16", "fp32")
]
ZERO += [{**ZERO[4], "name": "zero3-bf16-eager", "staging": "eager"}]
CPU_ADAM = {"zero": {"offload_optimizer": {"device": "cpu"}}, "optimizer": {"torch_adam": False}}
"""DeepSpeed's own, whose betas move at first. It keeps their powers to itself."""
ZERO += [
    {**ZERO[place], **CPU_ADAM, "name": f"{ZERO[place]['name']}-cpu-adam-{moved}", "momentum": moved}
    for place, moved in ((3, "before"), (5, "before"), (3, "after"))
]
DIFFERENCES = {"packing": 1, "differences": True}
"""Loses nothing: the second save is the difference to the first, or packed where that is no smaller."""
ZERO += [
    {**ZERO[0], "name": "zero1-bf16-differences", "settings": DIFFERENCES},
    {**ZERO[4], "name": "zero3-bf16-differences", "settings": DIFFERENCES},
    {**ZERO[2], "name": "zero2-bf16-auto", "settings": {**DIFFERENCES, "packing": "auto"}},
]
ZERO += [{**ZERO[place], "name": f"{ZERO[place]['name']}-waves", "waves": 4000} for place in (0, 2, 4)]
DDP = [
    {"name": "ddp", "kind": "ddp", "every": 3},
    {"name": "ddp-lazy", "kind": "ddp", "every": 3, "staging": "lazy"},
    {"name": "ddp-differences", "kind": "ddp", "every": 3, "settings": DIFFERENCES},
]
FSDP2 = [
    {"name": "fsdp2", "kind": "fsdp2", "every": 3},
    {"name": "fsdp2-bf16-lazy", "kind": "fsdp2", "every": 3, "bf16": True, "staging": "lazy"},
    {"name": "fsdp2-waves", "kind": "fsdp2", "every": 3, "waves": 4000},
    {"name": "fsdp2-differences", "kind": "fsdp2", "every": 3, "settings": DIFFERENCES},
]
PLAIN = [
    {"name": "plain", "kind": "plain", "every": 3},
    {"name": "plain-differences", "kind": "plain", "every": 3, "settings": DIFFERENCES},
]
BUDGET = {"bytes_per_hour": 3.6e12, "burst_seconds": 4e-5}
"""At every decision 40 000 bytes, however long the steps take: random states, and some of the weights."""
COMPOSITES: list[dict[str, Any]] = [
    {
        "name": "zero2-parity2", "kind": "zero", "stage": 2, "precision": "bf16",
        "every": 2, "policy": {"name": "parity", "k": 2}, "composite": True,
    },
    {
        "name": "zero3-parity3", "kind": "zero", "stage": 3, "precision": "bf16",
        "every": 1, "policy": {"name": "parity", "k": 3}, "composite": True,
    },
    {"name": "ddp-parity2", "kind": "ddp", "every": 2, "policy": {"name": "parity", "k": 2}, "composite": True},
    {"name": "fsdp2-parity2", "kind": "fsdp2", "every": 2, "policy": {"name": "parity", "k": 2}, "composite": True},
    {
        "name": "fsdp2-budget", "kind": "fsdp2", "every": 2, "composite": True, "settings": {"budget": BUDGET},
        "policy": {"name": "budget", "lags": {"exp_avg": 0.1, "exp_avg_sq": 0.1}},
    },
]  # fmt: skip
EXACT = [case["name"] for case in [*ZERO, *DDP, *FSDP2, *PLAIN]]
COMPOSITE = [case["name"] for case in COMPOSITES]
CORE = {"zero1-bf16", "zero2-fp32", "zero3-bf16", "zero2-parity2", "ddp", "fsdp2", "plain"}
"""One of each framework and ZeRO stage, and a composite."""

LAUNCHES = {
    f"{name}-{'core' if core else 'more'}": [case for case in cases if (case["name"] in CORE) == core]
    for core in (True, False)
    for name, cases in {
        "zero": [*ZERO, *COMPOSITES[:2]],
        "torch": [*DDP, *FSDP2, *COMPOSITES[2:]],
        "plain": PLAIN,
    }.items()
}
Launch = Callable[[str], Launched]


def marked(names: Iterable[str], core: Callable[[str], bool] = CORE.__contains__) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.core) if core(name) else name for name in names]


def spec(cases: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"cases": cases, "steps": STEPS, "kill_at": KILL_AT, **more}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """The launch that a case belongs to, made when it is first asked for."""
    pytest.importorskip("deepspeed")
    launch_of = {case["name"]: launch for launch, cases in LAUNCHES.items() for case in cases}

    @once
    def launch(name: str) -> list[Launched]:
        directory, cases = tmp_path_factory.mktemp(name), LAUNCHES[name]
        if name.startswith("plain"):
            return [alone("resume_train.py", spec(cases, phase=phase), directory) for phase in (0, 1)]
        return [torchrun("resume_train.py", 2, spec(cases), directory, restarts=1)]

    def of(case: str) -> Launched:
        name = launch_of[case]
        done, codes = launch(name), [-9, 0] if name.startswith("plain") else [0]
        assert [one.code for one in done] == codes, "\n".join(one.output[-3000:] for one in done)
        assert not any("does not go on as that run did" in one.output for one in done)  # it draws the same numbers
        return Launched(0, "", [record for one in done for record in one.records])

    return of


def losses(launched: Launched, kind: str, case: str) -> dict[tuple[int, int], list[float]]:
    """By rank and step."""
    return {(one["rank"], one["step"]): one["losses"] for one in launched.of(kind, case=case)}


@pytest.mark.parametrize("launch", marked(LAUNCHES, lambda name: name.endswith("core")))
def test_a_rank_died_of_a_signal_in_each_launch(launched: Launch, launch: str) -> None:
    cases = LAUNCHES[launch]
    died = [one["rank"] for one in launched(cases[0]["name"]).of("dies")]
    assert died == [0 if cases[0]["kind"] == "plain" else 1]


@pytest.mark.parametrize("case", marked(EXACT))
def test_saving_changes_nothing(launched: Launch, case: str) -> None:
    straight, killed = losses(launched(case), "straight", case), losses(launched(case), "killed", case)
    assert {step for _, step in killed} == set(range(KILL_AT))
    assert killed == {key: value for key, value in straight.items() if key[1] < KILL_AT}


@pytest.mark.parametrize("case", marked(EXACT))
def test_losses_after_a_resume_are_those_of_the_uninterrupted_run(launched: Launch, case: str) -> None:
    straight, continued = losses(launched(case), "straight", case), losses(launched(case), "continued", case)
    assert {step for _, step in continued} == set(range(6, STEPS))
    assert continued == {key: value for key, value in straight.items() if key[1] >= 6}


@pytest.mark.parametrize("case", marked(EXACT))
def test_the_end_is_the_same_state(launched: Launch, case: str) -> None:
    ranks = (0,) if case in [one["name"] for one in PLAIN] else (0, 1)
    for rank in ranks:
        straight = launched(case).one("end", case=case, of="straight", rank=rank)
        resumed = launched(case).one("end", case=case, of="resumed", rank=rank)
        assert len(straight["hashes"]) > 10
        assert straight["hashes"] == resumed["hashes"]


@pytest.mark.parametrize("case", marked(EXACT))
def test_a_full_save_is_certified_exact(launched: Launch, case: str) -> None:
    for one in launched(case).of("resumed", case=case):
        assert (one["step"], one["exact"], one["save"]) == (6, True, "00000006-000001")


@pytest.mark.parametrize("case", marked(COMPOSITE))
def test_a_composite_holds_the_versions_that_its_certificate_names(launched: Launch, case: str) -> None:
    newest = max(one["step"] for one in launched(case).of("saved", case=case) if one["step"] <= KILL_AT)
    layer_of = _layers(launched(case), case)
    for rank in (0, 1):
        resumed = launched(case).one("resumed", case=case, rank=rank)
        assert (int(resumed["save"][:8]), resumed["exact"]) == (newest, False)
        steps = {(layer, slot): step for layer, slot, step in resumed["units"]}
        assert len(set(steps.values())) > 1
        nearest = min(steps.values(), key=lambda step: (abs(step - resumed["effective"]), step))
        assert min(steps.values()) < resumed["effective"] < newest
        assert resumed["step"] == nearest
        for fragment, digest in resumed["hashes"].items():
            fqn, slot, *_ = fragment.split("|")
            step = steps[layer_of[fqn], slot]
            assert digest == _saved(launched(case), case, rank, step)[fragment], (
                f"{fragment} is not that of step {step}"
            )


@pytest.mark.parametrize("case", marked(COMPOSITE))
def test_training_goes_on_from_a_composite(launched: Launch, case: str) -> None:
    assert {step for _, step in losses(launched(case), "continued", case)} >= {KILL_AT, STEPS - 1}


def _saved(launched: Launched, case: str, rank: int, step: int) -> dict[str, str]:
    # The first record of a step: the one before the kill.
    return launched.of("saved", case=case, rank=rank, step=step)[0]["hashes"]


def _layers(launched: Launched, case: str) -> dict[str, str]:
    # Of this small model: blocks are layers, and so are the embedding and what the model owns itself.
    units = {layer for layer, _, _ in launched.one("resumed", case=case, rank=0)["units"]}
    names = {key.split("|")[0] for rank in (0, 1) for key in launched.one("resumed", case=case, rank=rank)["hashes"]}
    return {name: next((unit for unit in units if name.startswith(f"{unit}.")), "(root)") for name in names}
