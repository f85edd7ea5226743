"""From what DeepSpeed's files say to a checkpoint: the part that ordinary and universal ones have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from merger.checkpoint import Checkpoint, require_whole
from merger.gradient_clipping import gradient_clipping
from merger.sources.certified import certificate, described
from merger.sources.deepspeed_files import RankFiles
from merger.sources.deepspeed_model import Model, client_state, engine_state, loss_scaler, run_states
from merger.sources.deepspeed_zero import Optimized, Shape
from store.coverage import FragmentIndex
from store.errors import UnsupportedError


def build(files: RankFiles, shapes: Sequence[Sequence[Shape]], optimized: Optimized, beside: Path | None) -> Checkpoint:
    """The checkpoint. shapes: of the parameters that the optimizer holds. beside: what belongs beside the state.

    MergeError where anything is not whole or contradicts itself, UnsupportedError.
    """
    refuse_parallelism(files)
    model = Model(files, {shape.fqn: shape for group in shapes for shape in group})
    named = model.tensors()
    index = FragmentIndex([*optimized.extents, *model.extents(named)])
    tensors, layers = described(named)
    state = {
        "optimizer": _optimizer(files),
        "param_groups": optimized.groups,
        "scalars": optimized.scalars,
        "slots": optimized.slots,
        **engine_state(files),
    }
    step, tag = state["counters"]["global_steps"], files.folder.name
    problems = (*optimized.problems, *model.problems)
    checkpoint = Checkpoint(
        origin=str(files.folder),
        framework="deepspeed",
        step=step,
        tensors=tensors,
        layers=layers,
        index=index,
        framework_state=state,
        facts={**_engine_facts(files), **model.facts(named), **optimized.facts},
        run_states=run_states(files),
        certificate=certificate(tag, step, str(files.folder), tensors, index, problems=problems, exact=not problems),
        files=beside,
        client_state=client_state(files),
        problems=problems,
    )
    require_whole(checkpoint)
    return checkpoint


def refuse_parallelism(files: RankFiles) -> None:
    """UnsupportedError for tensor, pipeline and expert parallelism."""
    if files.model.at("mp_world_size").natural() != 1:
        raise UnsupportedError(f"{files.folder} is of tensor or pipeline parallelism: not handled")
    experts = files.model.mapping().get("num_experts")
    if experts:
        raise UnsupportedError(f"{files.folder} is of a model with experts (MoE), which is not handled")


def _optimizer(files: RankFiles) -> str:
    """The base optimizer as the configuration names it; the files do not."""
    section = files.model.at("ds_config").get("optimizer")
    kind = None if section is None else section.get("type")
    return "unknown" if kind is None else kind.text()


def _engine_facts(files: RankFiles) -> dict[str, Any]:
    first, config = files.optims[0].mapping(), files.model.at("ds_config")
    half = config.get("fp16")
    fp16 = half is not None and bool(half.mapping().get("enabled"))
    return {
        "framework": "deepspeed",
        "ds_version": files.model.at("ds_version").text(),
        "zero_stage": files.stage,
        "world_size": files.world_size,
        "mp_world_size": 1,
        "dtype": "bf16" if files.bf16 else "fp16" if fp16 else "fp32",
        "ds_config": config.value,
        "optimizer": _optimizer(files),
        "loss_scaler": loss_scaler(files),
        "dynamic_loss_scale": bool(first.get("dynamic_loss_scale", False)),
        "clip_grad": float(first["clip_grad"]) if "clip_grad" in first else gradient_clipping(config.value),
        "elastic_checkpoint": False,
    }
