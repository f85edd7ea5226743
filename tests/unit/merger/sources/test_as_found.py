"""Checkpoints of other programs: what files prove, what they contradict, and the word for the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from merger.checkpoint import Checkpoint
from merger.import_checkpoint import import_checkpoint, plan_import
from merger.io.output_dir import CERTIFICATE
from merger.layouts.base import Target
from merger.merge import merge
from merger.sources import open_source
from store.catalog import open_catalog
from store.errors import MergeError
from store.location import files_at
from tests.support.deepspeed_stores import LAYERS, change_pt, deepspeed_files, optim_file

SLOTS = ("fp32", "exp_avg", "exp_avg_sq")


def read(root: Path) -> Checkpoint:
    return open_source(root).checkpoint(None, frozenset())


@pytest.mark.parametrize(("stage", "vouched"), [(1, ("fp32",)), (3, ())])
def test_files_without_hashes_are_as_found_and_never_exact(
    tmp_path: Path, stage: int, vouched: tuple[str, ...]
) -> None:
    """At ZeRO-1/2 the working weights are in another file, which vouches for the masters."""
    root = deepspeed_files(tmp_path, stage, 2)
    found = read(root)
    expected = {(layer.fqn, slot) for layer in LAYERS for slot in SLOTS if slot not in vouched}
    assert (found.problems, found.unvouched) == ((), expected)
    for layout in ("native", "universal", "hf"):
        result = merge(root, tmp_path / layout, target=Target(layout))
        certificate = json.loads((result.out / CERTIFICATE).read_text())
        counted = len([slot for _, slot in expected if layout != "hf" or slot == "fp32"])
        for one in (result.certificate.as_json(), certificate):
            assert (one["exact"], one["as_found"], one["unvouched"]) == (False, True, counted), layout


@pytest.mark.parametrize("layout", ["native", "universal"])
@pytest.mark.parametrize("beside", [True, False])
def test_a_merge_does_not_make_up_for_what_its_source_does_not_prove(tmp_path: Path, layout: str, beside: bool) -> None:
    out = merge(deepspeed_files(tmp_path, 3, 2), tmp_path / "out", target=Target(layout)).out
    if not beside:
        (out / CERTIFICATE).unlink()
    again = read(out)
    assert (again.certificate.exact, again.certificate.as_found, again.problems) == (False, True, ())
    assert again.certificate.unvouched == len(LAYERS) * len(SLOTS)


def test_an_import_says_as_found(tmp_path: Path) -> None:
    found = import_checkpoint(plan_import(deepspeed_files(tmp_path, 3, 2)), tmp_path / "store").certificate
    assert (found.exact, found.as_found, found.unvouched) == (False, True, len(LAYERS) * len(SLOTS))


def test_shards_of_two_ranks_exchanged_under_new_names_are_refused(tmp_path: Path) -> None:
    """Written again, so that the archives have the names of the files."""
    root = deepspeed_files(tmp_path, 3, 2)
    assert read(root).certificate.as_found
    first, second = optim_file(root, 0), optim_file(root, 1)
    trees = [torch.load(path, weights_only=False) for path in (first, second)]
    for path, tree in zip((second, first), trees, strict=True):
        torch.save(tree, path)
    with pytest.raises(MergeError, match=r"rank_1_.*where rank 1 holds only padding.*rank_0_.*were exchanged"):
        read(root)


def test_padding_that_is_not_zero_anywhere_proves_nothing(tmp_path: Path) -> None:
    """Optimizers with coupled weight decay move the padding."""
    root = deepspeed_files(tmp_path, 3, 2)

    def fill(tree: Any) -> None:
        for state in tree["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            state["exp_avg"][state["exp_avg"] == 0] = 0.5

    change_pt(optim_file(root, 1), fill)
    assert read(root).certificate.as_found


def test_a_parameter_listed_as_trained_and_as_frozen_is_told(tmp_path: Path) -> None:
    root = deepspeed_files(tmp_path, 2, 2)
    fqn = LAYERS[1].fqn

    def both(tree: Any) -> None:
        tree["frozen_param_shapes"] = {fqn: torch.Size([LAYERS[1].numel])}
        tree["frozen_param_fragments"] = {fqn: tree["module"][fqn]}

    (model,) = root.glob("*/*model_states.pt")
    change_pt(model, both)
    found = read(root)
    assert (
        not found.certificate.whole and f"lists {fqn} in param_shapes and in frozen_param_shapes" in found.problems[0]
    )


def spoil(root: Path, stage: int, slot: str, value: float) -> None:
    """Put a value into the first element of a slot of the first param group, on rank 0."""

    def change(tree: Any) -> None:
        state = tree["optimizer_state_dict"]
        masters, base = (
            ("fp32_flat_groups", "optimizer_state_dict") if stage == 3
            else ("single_partition_of_fp32_groups", "base_optimizer_state")
        )  # fmt: skip
        tensor = state[masters][0] if slot == "fp32" else state[base]["state"][0][slot]
        tensor.data[0] = value

    change_pt(optim_file(root, 0), change)


BAD = [
    ("fp32", torch.nan, "NaN in fp32"),
    ("exp_avg", -torch.inf, "infinite values in exp_avg"),
    ("exp_avg_sq", -1e-20, "negative values in exp_avg_sq"),
]


@pytest.mark.parametrize(("slot", "value", "text"), BAD)
@pytest.mark.parametrize("layout", ["native", "hf", "import"])
def test_values_that_no_training_state_holds_are_refused_by_name_and_layer(
    tmp_path: Path, slot: str, value: float, text: str, layout: str
) -> None:
    root = deepspeed_files(tmp_path, 3, 2)
    spoil(root, 3, slot, value)
    out, line = tmp_path / "out", f"layer one: {text} of one.weight"
    if layout == "import":
        with pytest.raises(MergeError, match=rf"{line}.*--allow-nonfinite"):
            import_checkpoint(plan_import(root), out)
        assert not out.exists()
        result: Any = import_checkpoint(plan_import(root), out, allow_nonfinite=True)
        assert open_catalog(files_at(out)).saves()
    elif layout == "hf" and slot != "fp32":
        assert merge(root, out, target=Target("hf")).certificate.as_found  # the moments are not in it, and not read
        return
    else:
        with pytest.raises(MergeError, match=rf"{line}.*--allow-nonfinite"):
            merge(root, out, target=Target(layout))
        assert not out.exists()
        result = merge(root, out, target=Target(layout), allow_nonfinite=True)
        document = json.loads((out / CERTIFICATE).read_text())
        assert (document["exact"], document["as_found"], document["problems"]) == (False, False, [line])
    assert result.problems == (line,) and not result.certificate.whole


def test_a_buffer_may_hold_infinities_and_a_first_moment_may_be_negative(tmp_path: Path) -> None:
    root = deepspeed_files(tmp_path, 1, 2)
    spoil(root, 1, "exp_avg", -3.0)
    (model,) = root.glob("*/*model_states.pt")

    def add(tree: Any) -> None:
        tree["module"]["mask"] = torch.full((4,), -torch.inf)
        tree["buffer_names"] = ["mask"]

    change_pt(model, add)
    assert merge(root, tmp_path / "out").certificate.as_found


def test_values_cast_on_the_way_are_checked_as_they_were(tmp_path: Path) -> None:
    root = deepspeed_files(tmp_path, 3, 2)
    spoil(root, 3, "fp32", torch.nan)
    with pytest.raises(MergeError, match="layer one: NaN in fp32"):
        merge(root, tmp_path / "out", target=Target("hf", dtype="F16"))
    shutil.rmtree(root)
