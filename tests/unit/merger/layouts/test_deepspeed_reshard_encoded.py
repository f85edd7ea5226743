"""Encoded stores of DeepSpeed runs at other stages and world sizes: the files that a store of the decoded values gives.

That those load, and go on, is shown with DeepSpeed itself elsewhere; here every tensor of every file is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.import_checkpoint import plan_import
from merger.io.output_dir import CERTIFICATE
from merger.layouts.base import Target
from merger.merge import merge
from merger.sources import open_source
from store.errors import UsageError
from store.names import SaveId, Unit
from tests.support.deepspeed_stores import LAYERS, DeepSpeedStore
from tests.support.pt_trees import differences, names, read
from tests.support.stores import How

pytest.importorskip("deepspeed")

LOSSY = {"fp32": "bf16+int8", "exp_avg": "int8-block", "exp_avg_sq": "int8-log2"}


@pytest.fixture(scope="module", params=["plain", "differences"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[DeepSpeedStore, Path]:
    """An encoded store, and the root of one that holds the decoded values as they are."""
    folder = tmp_path_factory.mktemp("reshard")
    encoded = DeepSpeedStore(folder / "encoded")

    def save(step: int, level: int | None, base: SaveId | None = None) -> SaveId:
        return encoded.save(step, how={slot: How(name, level, base) for slot, name in LOSSY.items()})

    if request.param == "plain":
        save(10, None)
    else:
        save(10, 1, save(5, 1))
    DeepSpeedStore(folder / "raw", encoded).save(10)
    return encoded, folder / "raw"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_stages_and_world_sizes(
    pair: tuple[DeepSpeedStore, Path], tmp_path: Path, stage: int, world: int
) -> None:
    encoded, raw = pair
    target = Target("deepspeed", zero_stage=stage, world_size=world)
    result = merge(encoded.root, tmp_path / "one", target=target)
    assert not result.problems and not result.certificate.exact
    assert merge(raw, tmp_path / "other", target=target).certificate.exact
    require_same(tmp_path / "one", tmp_path / "other", world)


def require_same(one: Path, other: Path, world: int) -> None:
    files = [name for name in names(one) if name.endswith(".pt")]
    assert files == [name for name in names(other) if name.endswith(".pt")]
    assert len([name for name in files if "optim_states" in name]) == world
    for name in files:
        trees: Sequence[Any] = [read(folder / name) for folder in (one, other)]
        for tree in trees:  # what each says of itself
            tree.get("driftpoint", {}).pop("exact", None)
            tree.get("driftpoint", {}).pop("units", None)
        assert differences(*trees) == [], name


@pytest.mark.parametrize("stage", [1, 2])
def test_working_weights_are_those_that_the_run_computed_with(
    pair: tuple[DeepSpeedStore, Path], tmp_path: Path, stage: int
) -> None:
    """The casts of the true masters, though those were rounded when they were stored."""
    encoded, _ = pair
    result = merge(encoded.root, tmp_path / "out", target=Target("deepspeed", zero_stage=stage, world_size=2))
    module = read(tmp_path / "out" / result.tag / "mp_rank_00_model_states.pt")["module"]
    for layer in LAYERS:
        values = torch.from_numpy(encoded.values(Unit(layer.name, "fp32"), 10))
        assert torch.equal(module[layer.fqn], values.to(torch.bfloat16))


@pytest.mark.parametrize("certificate", [True, False])
def test_what_is_rebuilt_says_what_was_rounded_when_it_is_a_source_again(
    pair: tuple[DeepSpeedStore, Path], tmp_path: Path, certificate: bool
) -> None:
    """With its certificate beside it, and by its client state alone."""
    encoded, _ = pair
    merge(encoded.root, tmp_path / "out", target=Target("deepspeed", zero_stage=1, world_size=2))
    if not certificate:
        (tmp_path / "out" / CERTIFICATE).unlink()
    found = open_source(tmp_path / "out").checkpoint(None, frozenset()).certificate
    assert not found.exact
    assert {unit.slot: unit.encoding for unit in found.units} == LOSSY
    assert all(unit.error > 0 for unit in found.units)
    with pytest.raises(UsageError, match=r"rounded .*fp32 as bf16\+int8"):
        plan_import(tmp_path / "out")
