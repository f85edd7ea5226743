"""What is stored with fewer bits comes back as decoding gives it, on every rank, after a real SIGKILL and on other
numbers of ranks; bf16 training goes on from bf16 weights with the very loss that it would have had; and no update
after the resume is much larger than it would have been.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from store.catalog import open_catalog
from store.names import SaveId
from store.schema import Entry
from store.storage.local import LocalFiles
from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Case = dict[str, Any]
SLOW = {"warmup_min_lr": [1e-6, 1e-6], "warmup_max_lr": [1e-5, 1e-5]}
"""Learning rates at which differences are small."""
DIFFERENCES = {"packing": 1, "differences": True}


def zero(name: str, stage: int, settings: Case, **more: Any) -> Case:
    return {
        "name": name, "kind": "zero", "stage": stage, "precision": "bf16", "to": 1 + stage % 3, "settings": settings,
        "every": 3, "saved": 3, "steps": 5, **more,
    }  # fmt: skip


LOSSES = [
    zero(f"zero{stage}-{name}", stage, {"encoding": encoding})
    for stage in (1, 2, 3)
    for name, encoding in {"bf16": {"fp32": "bf16"}, "compact": "compact", "careful": "careful"}.items()
]
LOSSES += [zero("zero3-eager", 3, {"encoding": "compact", "staging": "eager"})]
PACKED = [
    zero(f"zero{stage}-{name}-differences", stage, {"encoding": name, **DIFFERENCES}, scheduler=SLOW, width=32,
         every=2, saved=6, steps=8)
    for stage, name in ((3, "compact"), (2, "careful"), (1, "raw"))
]  # fmt: skip
NEWEST = {"resume": {"at": "newest"}}
COMPOSITES = [
    zero("zero2-parity", 2, {"encoding": "compact", "policy": {"name": "parity", "k": 2}, **NEWEST},
         every=2, saved=6, steps=7),
    zero("zero3-threshold", 3, {"encoding": "compact", "policy": {"name": "threshold", "threshold": 0.2}, **NEWEST,
         **DIFFERENCES}, every=2, saved=8, steps=9),
]  # fmt: skip
TAMPERED = [
    zero("zero3-uneven", 3, {"encoding": "compact"}, saved=3, steps=3, tampered=True),
    zero("zero2-uneven-differences", 2, {"encoding": "compact", **DIFFERENCES}, every=1, steps=3, tampered=True),
]
SAVED_AT, WATCHED = 25, 20
UPDATES = [
    zero(f"updates-{name}-{beta}", 2, {"encoding": encoding, **more}, every=SAVED_AT, saved=SAVED_AT,
         steps=SAVED_AT + WATCHED, updates=True, optimizer={"betas": [0.9, beta]}, width=32)
    for beta in (0.95, 0.999)
    for name, encoding, more in (("compact", "compact", {}), ("careful", "careful", DIFFERENCES))
]  # fmt: skip
FP32 = [
    zero("zero3-fp32", 3, {"encoding": "careful", **DIFFERENCES}, precision="fp32", every=1),
    {**zero("ddp", 0, {"encoding": "compact", **DIFFERENCES}, every=1), "kind": "ddp"},
]
"""Whose weights are not the ones that they train with, once they are rounded."""
CASES = [*LOSSES, *PACKED, *COMPOSITES, *TAMPERED, *UPDATES, *FP32]
ELSEWHERE = [*LOSSES, *PACKED, *FP32]
LOSSY = [case for case in CASES if case["settings"]["encoding"] != "raw"]
SHARED = [case for case in CASES if case["settings"]["encoding"] == "compact"]
"""Whose weights are whole multiples of a step, and not the bfloat16 values that they train with."""
NEAR = 2e-3
MOST = 1.5


def names(cases: list[Case]) -> list[str]:
    return [case["name"] for case in cases]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precision")


@pytest.fixture(scope="module")
def launched(directory: Path) -> Launched:
    """Two ranks: trained, killed, brought back by torchrun."""
    pytest.importorskip("deepspeed")
    done = torchrun("precision_train.py", 2, {"cases": CASES}, directory, restarts=1)
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.fixture(scope="module")
def elsewhere(launched: Launched, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Three ranks, every case at another ZeRO stage."""
    spec = {"cases": ELSEWHERE, "elsewhere": str(directory)}
    done = torchrun("precision_train.py", 3, spec, tmp_path_factory.mktemp("elsewhere"))
    assert done.code == 0, done.output[-6000:]
    return done


def test_a_rank_died_of_a_signal(launched: Launched) -> None:
    assert [one["rank"] for one in launched.of("dies")] == [1]


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_what_comes_back_is_what_decoding_gives(launched: Launched, case: Case) -> None:
    steps: dict[tuple[str, str], int] = {}
    for rank in (0, 1):
        resumed = launched.one("resumed", case=case["name"], rank=rank)
        assert resumed["step"] == case["saved"] // case["every"] * case["every"]
        steps = {(layer, slot): step for layer, slot, step, *_ in resumed["units"]}
        assert len(resumed["hashes"]) > 10
        for fragment, digest in resumed["hashes"].items():
            fqn, slot, *_ = fragment.split("|")
            step = steps[layer_of(fqn, steps), slot]
            saved = launched.one("saved", case=case["name"], rank=rank, step=step)
            assert digest == saved["hashes"][fragment], f"{fragment} is not that of step {step}, decoded"
    moving = {step for (_, slot), step in steps.items() if slot in ("fp32", "exp_avg", "exp_avg_sq")}
    assert (len(moving) > 1) == (case in COMPOSITES)


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_only_what_lost_no_bit_is_called_exact(launched: Launched, case: Case) -> None:
    for one in launched.of("resumed", case=case["name"]):
        assert one["exact"] == (case not in LOSSY)
        lossy = {(slot, encoding) for _, slot, _, encoding, _ in one["units"] if encoding != "raw"}
        assert bool(lossy) == (case in LOSSY)
        assert not {slot for slot, _ in lossy} - {"fp32", "exp_avg", "exp_avg_sq"}
        for _, _, step, encoding, drift in one["units"]:
            if encoding != "raw" and step == one["step"]:
                assert drift is not None and drift > 0, one


@pytest.mark.parametrize("case", [*LOSSES, *PACKED], ids=names([*LOSSES, *PACKED]))
def test_the_next_losses_are_those_of_the_uninterrupted_run(launched: Launched, case: Case) -> None:
    for rank in (0, 1):
        wanted = launched.one("straight", case=case["name"], rank=rank, step=case["saved"])["losses"]
        assert len(wanted) == 2
        found = launched.one("continued", case=case["name"], rank=rank, step=case["saved"])["losses"]
        assert found == (pytest.approx(wanted, rel=NEAR) if case in SHARED else wanted)


def test_differences_without_rounding_resume_as_if_nothing_had_been(launched: Launched) -> None:
    case = next(case for case in PACKED if case not in LOSSY)
    for step in range(case["saved"], case["steps"]):
        for rank in (0, 1):
            wanted, found = (launched.one(kind, case=case["name"], rank=rank, step=step)["losses"]
                             for kind in ("straight", "continued"))  # fmt: skip
            assert found == wanted


@pytest.mark.parametrize("case", PACKED, ids=names(PACKED))
def test_differences_were_what_was_read(launched: Launched, directory: Path, case: Case) -> None:
    found = entries(directory / case["name"], case["saved"])
    assert {entry.packing for entry in found if entry.slot == "fp32"} == {"split-planes"}
    base = case["saved"] - case["every"] if case in LOSSY else case["every"]  # the save before, or the whole
    assert {entry.base for entry in found} >= {f"{base:08d}-000001"}


@pytest.mark.parametrize("case", TAMPERED, ids=names(TAMPERED))
def test_ranks_may_store_a_unit_in_part_raw(launched: Launched, directory: Path, case: Case) -> None:
    found = entries(directory / case["name"], case["saved"])
    units = {(e.layer, e.slot): {o.encoding for o in found if (o.layer, o.slot) == (e.layer, e.slot)} for e in found}
    assert [key for key, encodings in units.items() if encodings == {"raw", "int8-log2"}], units


@pytest.mark.parametrize("case", ELSEWHERE, ids=names(ELSEWHERE))
def test_another_world_size_and_stage_gets_the_same_state(elsewhere: Launched, case: Case) -> None:
    told = elsewhere.of("elsewhere", case=case["name"])
    assert len(told) == 3
    for one in told:
        assert (one["step"], one["differences"], one["healthy"], one["skipped"]) == (case["saved"], [], True, None)


@pytest.mark.parametrize("case", [*LOSSES, *PACKED], ids=names([*LOSSES, *PACKED]))
def test_the_weights_it_computes_with_are_the_same_to_the_bit_unless_they_share_steps(
    launched: Launched, elsewhere: Launched, case: Case
) -> None:
    straight = {one["loss"] for one in launched.of("evaluated", case=case["name"], of="straight")}
    assert len(straight) == 1
    for ranks, of in ((2, launched), (3, elsewhere)):
        found = of.of("evaluated", case=case["name"], of="resumed")
        assert len(found) == ranks
        for one in found:
            assert one["loss"] == (pytest.approx(*straight, rel=NEAR) if case in SHARED else min(straight))


@pytest.mark.parametrize("case", UPDATES, ids=names(UPDATES))
def test_no_update_explodes(launched: Launched, case: Case) -> None:
    for step in range(SAVED_AT, SAVED_AT + WATCHED):
        straight, continued = (updates(launched, kind, case["name"], step) for kind in ("straight", "continued"))
        assert straight.keys() == continued.keys()
        for what, size in continued.items():
            assert 0 < size <= MOST * straight[what], (step, what)


def updates(launched: Launched, kind: str, case: str, step: int) -> dict[str, float]:
    """The largest change of an element, and the norm of the change of every layer, over both ranks."""
    ranks = launched.of(kind, case=case, step=step)
    assert len(ranks) == 2
    layers = {layer for one in ranks for layer in one["squares"]}
    norms = {layer: sum(one["squares"].get(layer, 0.0) for one in ranks) ** 0.5 for layer in layers}
    return {"largest": max(one["largest"] for one in ranks), **norms}


def entries(store: Path, step: int) -> list[Entry]:
    catalog, save = open_catalog(LocalFiles(store)), SaveId(step, 1)
    group = catalog.group(save, catalog.manifest(save).groups[save.name])
    return [entry for part in group.parts.values() for entry in part.entries]


def layer_of(fqn: str, units: dict[tuple[str, str], int]) -> str:
    """Of this small model: blocks are layers, and so are the embedding and what the model owns itself."""
    return next((layer for layer, _ in units if fqn.startswith(f"{layer}.")), "(root)")
