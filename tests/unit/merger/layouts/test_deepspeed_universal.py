"""Universal checkpoints: what becomes a file, what is refused, and what is said about loading them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from merger.checkpoint import Checkpoint
from merger.layouts.base import LayoutResult, Target
from merger.layouts.deepspeed_universal import universal_layout
from merger.writers.torch_zip import PtFile
from store.errors import MergeError, UnsupportedError
from store.fragments import FragmentIndex
from tests.support.planned import Tensor, planned

TAG = "global_step10_universal"
ALL = ("fp32", "exp_avg", "exp_avg_sq")
SAME = [{"lr": 0.1, "betas": [0.9, 0.99]}, {"lr": 0.1, "betas": (0.9, 0.99)}]


def laid_out(*args: Any, **kwargs: Any) -> LayoutResult:
    return universal_layout(planned(*args, **kwargs), Target("universal"))


def value(laid: LayoutResult, path: str) -> Any:
    (container,) = (file.container for file in laid.files if file.path == f"{TAG}/{path}")
    assert isinstance(container, PtFile)
    return container.value


def test_each_parameter_has_a_directory_and_nothing_else_has() -> None:
    tensors = {
        "a.w": Tensor((5, 2)),
        "b.w": Tensor((3,), None, "frozen"),
        "c.w": Tensor((0, 4), None),
        "d.seen": Tensor((), None, "buffer"),
    }
    laid = laid_out(tensors, [["a.w", "b.w", "c.w"]])
    names = sorted(file.path for file in laid.files)
    assert names == sorted(
        [f"{TAG}/zero/a.w/{name}.pt" for name in ("fp32", "exp_avg", "exp_avg_sq", "step")]
        + [f"{TAG}/zero/optimizer_state.pt", f"{TAG}/mp_rank_00_model_states.pt"]
        + [f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt", "latest_universal"]
    )
    assert value(laid, "zero/a.w/fp32.pt")["param"].shape == (5, 2)
    assert value(laid, "zero/a.w/step.pt").item() == 10
    assert laid.tag == TAG


def test_files_say_which_state_they_are_of_whatever_its_save_is_called() -> None:
    """The same for every merge of a save, another for another run's."""
    checkpoint = planned({"a.w": Tensor((5, 2))}, [["a.w"]])
    (extent,) = checkpoint.index.names()["a.w", "exp_avg"]
    other_block = replace(extent, block=replace(extent.block, digest="00000001"))
    kept = [one for (_, slot), (one,) in checkpoint.index.names().items() if slot != "exp_avg"]
    others = [
        checkpoint,
        replace(checkpoint, index=FragmentIndex([*kept, other_block])),
        replace(checkpoint, certificate=replace(checkpoint.certificate, store_id="1")),
    ]
    notes = []
    for one in others:
        laid = universal_layout(one, Target("universal"))
        (note,) = {repr(value(laid, f"zero/a.w/{slot}.pt")["driftpoint"]) for slot in ("fp32", "exp_avg")}
        noted = value(laid, "zero/optimizer_state.pt")["driftpoint"]
        assert note == repr({key: item for key, item in noted.items() if key != "slots"})
        assert (noted["save"], noted["step"]) == ("00000010-000001", 10)
        notes.append(note)
    assert len(set(notes)) == 3
    assert notes[0] == repr(value(laid_out({"a.w": Tensor((5, 2))}, [["a.w"]]), "zero/a.w/fp32.pt")["driftpoint"])


@pytest.mark.parametrize("fqn", ["a/b", "..", ".", "../x", "/abs", "x\0y", "optimizer_state.pt", "n" * 256])
def test_a_name_that_is_no_directory_s_is_refused(fqn: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot be in a universal checkpoint"):
        laid_out({fqn: Tensor((5,))}, [[fqn]])


def test_steps_of_a_group_become_one_and_of_groups_stay_and_are_told() -> None:
    tensors = {"a.w": Tensor((50,), 8), "b.w": Tensor((50,), 12), "c.w": Tensor((50,), 20)}
    laid = laid_out(tensors, [["a.w", "b.w"], ["c.w"]], hyper=SAME)
    assert [value(laid, f"zero/{fqn}/step.pt").item() for fqn in tensors] == [12, 12, 20]
    assert value(laid, "zero/optimizer_state.pt")["optimizer_state_dict"]["state"][0]["step"].item() == 20
    assert any("one optimizer step" in note and "8 in a" in note for note in laid.notes)
    assert any("different optimizer steps (12, 20)" in note and "takes 20 for all" in note for note in laid.notes)


def test_groups_alike_make_no_note_and_different_ones_name_what_differs() -> None:
    tensors = {"a.w": Tensor((500,)), "b.w": Tensor((500,))}
    alike = laid_out(tensors, [["a.w"], ["b.w"]], hyper=SAME)
    assert not any("ZeRO-3 gives every group" in note for note in alike.notes)
    assert not any("kept" in line for line in alike.load)
    other = laid_out(tensors, [["a.w"], ["b.w"]], hyper=[SAME[0], {**SAME[1], "lr": 0.2, "betas": (0.9, 0.95)}])
    note = next(note for note in other.notes if "ZeRO-3 gives every group" in note)
    assert "differ in lr, betas" in note and "as the lines that load it do" in note
    assert any("kept" in line for line in other.load)


def test_what_no_group_holds_is_counted_and_has_a_line_of_its_own() -> None:
    bare = laid_out({"a.w": Tensor((500,))}, [["a.w"]])
    assert not any("restores what the optimizer trains" in note for note in bare.notes)
    assert not any(line.startswith("model.") for line in bare.load)
    with_more = laid_out({"a.w": Tensor((500,)), "b.f": Tensor((3,), None, "frozen")}, [["a.w"]])
    assert any("1 frozen parameter or buffer (in b) stays" in note for note in with_more.notes)
    assert any(line.startswith("model.") for line in with_more.load)


@pytest.mark.parametrize(("aligned", "stage", "told"), [(False, 2, True), (True, 2, False), (False, 3, True)])
def test_gradients_dealt_out_in_turn_are_told(aligned: bool, stage: int, told: bool) -> None:
    zero = {"stage": stage, "round_robin_gradients": True, "parameter_alignment": aligned}
    tensors = {name: Tensor((500,)) for name in ("a.w", "b.w", "c.w")}
    laid = laid_out(tensors, [["a.w", "b.w", "c.w"]], config={"zero_optimization": zero}, stage=stage)
    assert any("wrong places" in note for note in laid.notes) == told
    # As DeepSpeed's own file has it at this stage and world size: in the order of the data.
    assert list(value(laid, "mp_rank_00_model_states.pt")["param_shapes"][0]) == ["a.w", "c.w", "b.w"]


@pytest.mark.parametrize(("numel", "most"), [(1, 1), (2, 1), (3, 2), (17, 3), (135, 10)])
def test_the_most_ranks_that_all_hold_a_part_of_a_small_group(numel: int, most: int) -> None:
    laid = laid_out({"a.w": Tensor((numel,))}, [["a.w"]])
    (note,) = (note for note in laid.notes if "IndexError" in note)
    assert f"on more than {most} {'rank' if most == 1 else 'ranks'} one" in note
    for ranks in range(1, most + 2):
        part = -(-numel // (2 * ranks)) * 2
        assert ((ranks - 1) * part < numel) == (ranks <= most)


def test_other_optimizers_than_adam_s_kind_are_told_and_other_scalars_refused() -> None:
    momentum = laid_out({"a.w": Tensor((500,), slots=("momentum_buffer",))}, [["a.w"]])
    assert any("keeps momentum_buffer, step" in note and "stage 1 or 2" in note for note in momentum.notes)
    with pytest.raises(UnsupportedError, match=r"'factor' for a\.w"):
        laid_out({"a.w": Tensor((500,), scalars={"factor": 1.0})}, [["a.w"]])


def test_a_parameter_without_state_among_others_gets_zeros_and_their_step() -> None:
    laid = laid_out({"a.w": Tensor((5,)), "b.w": Tensor((3, 2), None)}, [["a.w", "b.w"]])
    zeros = value(laid, "zero/b.w/exp_avg.pt")["param"]
    assert (zeros.shape, zeros.dtype, zeros.placed) == ((3, 2), torch.float32, ())
    assert value(laid, "zero/b.w/step.pt").item() == 10
    assert any("no state yet for b" in note for note in laid.notes)
    assert not laid.certificate.exact  # zeros at step 10 are no state that the run was in


def test_state_of_a_frozen_parameter_has_no_place() -> None:
    checkpoint = planned({"a.w": Tensor((5,)), "b.w": Tensor((3,), None, "frozen")}, [["a.w", "b.w"]])
    slots = {**checkpoint.framework_state["slots"], "b.w": ["exp_avg", "exp_avg_sq"]}
    checkpoint = replace(checkpoint, framework_state={**checkpoint.framework_state, "slots": slots})
    with pytest.raises(UnsupportedError, match=r"state of frozen parameters \(b\)"):
        universal_layout(checkpoint, Target("universal"))


def test_parameters_of_one_group_keep_the_same() -> None:
    with pytest.raises(UnsupportedError, match="differ in their optimizer state"):
        laid_out({"a.w": Tensor((5,)), "b.w": Tensor((3,), slots=("exp_avg",))}, [["a.w", "b.w"]])


def without_engine(*args: Any, **kwargs: Any) -> Checkpoint:
    """A state as of FSDP2, tensor or pipeline parallelism: no counters, and facts of no engine."""
    checkpoint = planned(*args, **kwargs)
    state = {**checkpoint.framework_state, "counters": {}}
    return replace(checkpoint, framework="dtensor", framework_state=state, facts={})


def test_a_run_without_an_engine_leaves_to_the_next_one_what_its_configuration_says() -> None:
    tensors = {"a.w": Tensor((500,)), "b.w": Tensor((3,), None, "frozen"), "c.n": Tensor((), None, "buffer")}
    flags = {"fused": True, "foreach": None, "param_names": ["a.w"]}
    laid = universal_layout(without_engine(tensors, [["a.w"]], hyper=[{"lr": 0.1, **flags}]), Target("universal"))
    state, model = value(laid, "zero/optimizer_state.pt"), value(laid, "mp_rank_00_model_states.pt")
    assert state.keys() & {"loss_scaler", "dynamic_loss_scale", "clip_grad"} == set()
    assert state["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert "global_samples" not in model and model["global_steps"] == 10
    assert (model["buffer_names"], [*model["frozen_param_shapes"]], model["ds_config"]) == (["c.n"], ["b.w"], {})
    assert any("load_lr_scheduler_states=False" in line for line in laid.load)
    assert not any("layout 'deepspeed'" in note for note in laid.notes)  # which is refused of such a run
    assert any("bring it to step 10" in note for note in laid.notes)


@pytest.mark.parametrize(
    ("dtype", "fits"), [("F32", True), ("BF16", True), ("F16", True), ("F64", False), ("I8", False)]
)
def test_weights_and_moments_of_a_run_without_an_engine_become_fp32_or_are_refused(dtype: str, fits: bool) -> None:
    checkpoint = without_engine({"a.w": Tensor((500,)), "b.w": Tensor((5,), None)}, [["a.w", "b.w"]])
    extents = [replace(one, dtype=dtype) for (one,) in checkpoint.index.names().values()]
    checkpoint = replace(checkpoint, index=FragmentIndex(extents))
    if not fits:
        with pytest.raises(UnsupportedError, match=r"of a\.w is in \w+, and DeepSpeed's master weights"):
            universal_layout(checkpoint, Target("universal"))
        return
    laid = universal_layout(checkpoint, Target("universal"))
    found = {value(laid, f"zero/{fqn}/{slot}.pt")["param"].dtype for fqn in ["a.w", "b.w"] for slot in ALL}
    assert found == {torch.float32}


@pytest.mark.parametrize(
    ("groups", "counters", "error", "told"),
    [
        ([{"member": 0}, {"member": 1}], {}, UnsupportedError, "several optimizers (Muon + AdamW)"),
        ([{}], {"global_steps": 10}, UnsupportedError, "PipelineModule"),  # an engine's, of which facts are not known
        ([], {}, MergeError, "no optimizer state"),
    ],
)
def test_what_no_engine_of_one_optimizer_can_load_is_refused(
    groups: list[Any], counters: dict[str, int], error: type[Exception], told: str
) -> None:
    checkpoint = without_engine({"a.w": Tensor((5,))}, [["a.w"]])
    described = [{"params": [], "hyper": {}, **group} for group in groups]
    own = {"param_groups": described, "optimizer": "Muon + AdamW", "counters": counters}
    state = {**checkpoint.framework_state, **own}
    with pytest.raises(error, match=re.escape(told)):
        universal_layout(replace(checkpoint, framework_state=state), Target("universal"))


SCALERS = {
    "static": {"class": "LossScaler", "cur_scale": 128.0},
    "dynamic": {**vars(DynamicLossScaler(2**16, 2, 1.0, 2, False)), "class": "DynamicLossScaler"},
}


@pytest.mark.parametrize("scaler", [None, *SCALERS])
def test_the_lines_set_every_group_s_hyperparameters_and_unpickle_nothing_else(
    tmp_path: Path, scaler: str | None
) -> None:
    """The real file, and the lines as they are printed, with a stand-in for the engine's optimizer."""
    tensors = {"a.w": Tensor((500,)), "b.w": Tensor((500,)), "c.f": Tensor((3,), None, "frozen")}
    checkpoint = planned(tensors, [["a.w"], ["b.w"]], hyper=[{"lr": 0.1}, {"lr": 0.2, "betas": (0.5, 0.75)}])
    state = {**checkpoint.framework_state, "loss_scaler": SCALERS.get(scaler or "")}
    laid = universal_layout(replace(checkpoint, framework_state=state), Target("universal"))
    assert not any("weights_only=False" in text for text in (*laid.load, *laid.notes))
    path = tmp_path / TAG / "zero" / "optimizer_state.pt"
    path.parent.mkdir(parents=True)
    (container,) = (file.container for file in laid.files if file.path.endswith("optimizer_state.pt"))
    assert container.make(path) == ()
    container.seal(path, {})
    lines = [line.format(out=str(tmp_path)) for line in laid.load]
    begin = next(i for i, line in enumerate(lines) if line.startswith("from "))
    end = next(i for i, line in enumerate(lines) if ".update(" in line)
    groups: list[dict[str, Any]] = [{"params": [0]}, {"params": [1]}]
    engine = SimpleNamespace(optimizer=SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups)))
    exec("\n".join([lines[0], *lines[begin : end + 1]]), {"torch": torch, "engine": engine})
    assert groups == [{"params": [0], "lr": 0.1}, {"params": [1], "lr": 0.2, "betas": (0.5, 0.75)}]


def test_the_lines_are_python() -> None:
    tensors = {"a.w": Tensor((500,)), "b.w": Tensor((500,)), "c.f": Tensor((3,), None, "frozen")}
    laid = laid_out(tensors, [["a.w"], ["b.w"]], hyper=[{"lr": 0.1}, {"lr": 0.2}])
    text = "\n".join(line.format(out="/some where/it's") for line in laid.load)
    compile(text, "lines", "exec")
    assert "{{" not in text and '"/some where/it\'s"' in text
