"""Universal checkpoints with files of two saves: conversions that were interrupted, and what was copied by hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.checkpoint import Checkpoint
from merger.layouts.base import Target
from merger.merge import merge
from merger.sources import open_source
from store.errors import MergeError
from tests.support.foreign import run, train_stock
from tests.support.launch import WORKERS, python

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ZERO1, ZERO3, WRAPPER = "zero1-bf16", "zero3-bf16-sub-groups", "zero1-bf16-wrapper"
WEIGHT = "blocks.2.down.weight"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 3 of two ranks, each converted, in ``2`` and ``3``; and the wrapper's run, of one."""
    directory = tmp_path_factory.mktemp("mixed")
    train_stock(directory, 2, [ZERO1, ZERO3])
    train_stock(directory, 1, [WRAPPER])
    pairs = []
    for case in (ZERO1, ZERO3):
        for step in (2, 3):
            (directory / case / str(step)).mkdir()
            pairs += [
                str(directory / case / "saved" / f"global_step{step}"),
                str(directory / case / str(step) / f"global_step{step}_universal"),
            ]
    run([WORKERS / "source_convert.py", *pairs], directory)
    return directory


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Any:
    """A function: a copy of a case's converted step 3."""

    def copied(case: str) -> Path:
        shutil.copytree(converted / case / "3", tmp_path / "universal")
        return tmp_path / "universal" / "global_step3_universal"

    return copied


def opened(folder: Path) -> Checkpoint:
    return open_source(folder).checkpoint(None, frozenset())


def convert_killed(source: Path, target: Path, files: int) -> None:
    done = python([WORKERS / "source_convert_killed.py", source, target, files], source)
    assert done.returncode == 9, done.stderr[-4000:]


def edited(folder: Path, name: str, change: Any) -> None:
    value = torch.load(folder / "zero" / name, weights_only=False)
    torch.save(change(value) or value, folder / "zero" / name)


@pytest.mark.parametrize("case", [ZERO1, ZERO3])
def test_a_conversion_that_was_interrupted_is_refused(converted: Path, copy: Any, tmp_path: Path, case: str) -> None:
    """An older step's into a newer's directory: its first parameters are the older's, all else is the newer's."""
    folder = copy(case)
    convert_killed(converted / case / "saved" / "global_step2", folder, 9)
    with pytest.raises(MergeError, match=r"/tmp exists.* interrupted.* into an empty directory"):
        merge(folder, tmp_path / "out")
    shutil.rmtree(folder / "tmp")
    with pytest.raises(MergeError, match=r"another save|different saves"):
        merge(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (ZERO1, ["fp32.pt", "exp_avg.pt"]),
        (ZERO3, ["fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"]),
        (ZERO3, ["fp32.pt"]),
        (ZERO3, ["exp_avg.pt"]),
        (ZERO3, ["exp_avg_sq.pt"]),
    ],
)
def test_a_parameter_of_another_save_is_refused(converted: Path, copy: Any, case: str, names: list[str]) -> None:
    folder = copy(case)
    for name in names:
        place = Path("zero") / WEIGHT / name
        shutil.copy(converted / case / "2" / "global_step2_universal" / place, folder / place)
    with pytest.raises(MergeError, match=rf"{WEIGHT}.* saves"):
        opened(folder)


def test_where_nothing_tells_it_is_not_exact(copy: Any) -> None:
    folder = copy(ZERO3)
    assert opened(folder).certificate.as_found
    edited(folder, "optimizer_state.pt", lambda state: state.pop("fp32_flat_groups") and None)
    found = opened(folder)
    assert not found.certificate.whole
    assert any("nothing tells whether" in line and str(folder) in line for line in found.problems)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_slice_without_state_proves_nothing_but_of_a_parameter_without(copy: Any, everywhere: bool) -> None:
    """As an embedding has it whose first rows never occurred; and a parameter that the model does not use."""
    folder = copy(ZERO3)
    model = torch.load(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    (index, offset), part = place(model["param_shapes"], WEIGHT, 2)

    def cleared(state: Any) -> None:
        for slot in ("exp_avg", "exp_avg_sq"):
            state["optimizer_state_dict"]["state"][index][slot][offset : offset + part] = 0

    edited(folder, "optimizer_state.pt", cleared)
    for slot in ("exp_avg", "exp_avg_sq"):
        edited(folder, f"{WEIGHT}/{slot}.pt", lambda flat: clear(flat[: None if everywhere else part]))
    found = opened(folder)
    assert found.certificate.as_found == everywhere
    assert [line for line in found.problems if WEIGHT in line and "nothing tells" in line] == list(found.problems)
    assert bool(found.problems) != everywhere


def clear(tensor: torch.Tensor) -> None:
    tensor.zero_()


def place(param_shapes: Any, fqn: str, ranks: int) -> tuple[tuple[int, int], int]:
    """((sub-group, offset), elements) of a parameter's slice in rank 0's flat partitions."""
    for index, group in enumerate(param_shapes):
        offset = 0
        for name, shape in group.items():
            part = -(-shape.numel() // ranks)
            if name == fqn:
                return (index, offset), part
            offset += part
    raise AssertionError(fqn)


@pytest.mark.parametrize(("counted", "match"), [(2, "has made 2 steps, .* counts 3"), (None, "counts no steps")])
def test_steps_that_are_counted_in_the_param_groups(copy: Any, counted: int | None, match: str) -> None:
    """Where DeepSpeed's FusedAdam has them."""
    folder = copy(ZERO3)

    def moved(state: Any) -> None:
        base = state["optimizer_state_dict"]
        for one in base["state"].values():
            one.pop("step")
        for group in base["param_groups"]:
            group.update({} if counted is None else {"step": counted})

    edited(folder, "optimizer_state.pt", moved)
    found = opened(folder)
    assert not found.certificate.whole
    with pytest.raises(MergeError, match=match):
        raise MergeError("\n".join(found.problems))


def test_files_of_two_merges_of_the_same_step_are_not_mixed(converted: Path, tmp_path: Path) -> None:
    """Two runs' saves are called alike, and so are their steps."""
    universal = Target(layout="universal")
    one, other = (merge(converted / case / "saved", tmp_path / case, target=universal) for case in (ZERO1, WRAPPER))
    assert one.tag == other.tag
    for name in ("exp_avg.pt", "exp_avg_sq.pt"):
        file = Path(one.tag) / "zero" / WEIGHT / name
        shutil.copy(other.out / file, one.out / file)
    with pytest.raises(MergeError, match=r"exp_avg\.pt is of another .* mixed"):
        opened(one.out / one.tag)
