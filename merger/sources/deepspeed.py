"""DeepSpeed's own checkpoints as a source, as ``engine.save_checkpoint`` wrote them, at any stage and world size.

Nothing of them is prepared, and nothing of DeepSpeed runs: see :mod:`merger.sources.pt`. It knows tags and puts
together what the other files of its name read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from merger.blocks import Flaw
from merger.checkpoint import Checkpoint, require_whole
from merger.sources.certified import certificate, described
from merger.sources.deepspeed_files import RankFiles, is_checkpoint, read_files
from merger.sources.deepspeed_model import Model, client_state, engine_state, loss_scaler, run_states
from merger.sources.deepspeed_zero import Optimized, param_shapes
from merger.sources.deepspeed_zero3 import zero3
from merger.sources.deepspeed_zero12 import zero12
from merger.sources.folder import plain_name, read_name
from store.coverage import FragmentIndex
from store.errors import MergeError, UnsupportedError

_STEP_TAG = re.compile(r"global_step(\d{1,18})")


class DeepSpeedSource:
    """A directory that checkpoints were saved to, or one checkpoint's own directory.

    files: a directory with what belongs beside the state, or None.
    """

    kind = "deepspeed"

    def __init__(self, root: Path, files: Path | None = None) -> None:
        self.root, self._files = root.absolute(), files

    def steps(self) -> tuple[int, ...]:
        """See :class:`merger.sources.base.Source`."""
        if is_checkpoint(self.root):
            return (read_files(self.root).model.at("global_steps").natural(),)
        found = (_STEP_TAG.fullmatch(tag) for tag in self.tags())
        return tuple(sorted((int(tag[1]) for tag in found if tag), reverse=True))

    def tags(self) -> list[str]:
        """Names of all checkpoints in the directory."""
        folders = (path for path in self.root.iterdir() if not path.is_symlink())
        return sorted(path.name for path in folders if is_checkpoint(path))

    def checkpoint(self, step: int | str | None, _: Set[Flaw] = frozenset()) -> Checkpoint:
        """See :class:`merger.sources.base.Source`. None: the one that ``latest`` names."""
        folder = self._folder(step)
        return _checkpoint(read_files(folder), self._files)

    def _folder(self, step: int | str | None) -> Path:
        if is_checkpoint(self.root):
            tag = _STEP_TAG.fullmatch(self.root.name)
            if step not in (None, self.root.name, tag and int(tag[1]), tag and tag[1]):
                raise MergeError(f"{self.root} is one checkpoint, and not {step}; name the directory above it")
            return self.root
        tag_name = self._latest() if step is None else self._tag(step)
        folder = self.root / tag_name
        if folder.is_symlink() or not is_checkpoint(folder):
            raise MergeError(
                f"{self.root} has no checkpoint {tag_name}{' (named by latest)' if step is None else ''}; there are: "
                f"{', '.join(self.tags()) or 'none'}"
            )
        return folder

    def _latest(self) -> str:
        found = read_name(self.root, "latest")
        if found is None:
            raise MergeError(f"{self.root} has no file `latest`: name one of its checkpoints, {', '.join(self.tags())}")
        return found

    def _tag(self, step: int | str) -> str:
        text = str(step)
        tags = self.tags()
        return plain_name(text, "the tag") if text in tags or not text.isdecimal() else f"global_step{int(text)}"


def _checkpoint(files: RankFiles, beside: Path | None) -> Checkpoint:
    _refuse_parallelism(files)
    optimized = zero3(files) if files.stage == 3 else zero12(files)
    trained = {shape.fqn: shape for group in param_shapes(files.model) for shape in group}
    model = Model(files, trained)
    named = model.tensors()
    index = FragmentIndex([*optimized.extents, *model.extents(named)])
    tensors, layers = described(named)
    state = _framework_state(files, optimized)
    step, tag = state["counters"]["global_steps"], files.folder.name
    checkpoint = Checkpoint(
        origin=str(files.folder),
        framework="deepspeed",
        step=step,
        tensors=tensors,
        layers=layers,
        index=index,
        framework_state=state,
        facts=_facts(files, optimized, model.facts(named)),
        run_states=run_states(files),
        certificate=certificate(tag, step, str(files.folder), tensors, index, problems=model.problems),
        files=beside,
        client_state=client_state(files),
        problems=tuple(model.problems),
    )
    require_whole(checkpoint)
    return checkpoint


def _refuse_parallelism(files: RankFiles) -> None:
    if files.model.at("mp_world_size").natural() != 1:
        raise UnsupportedError(f"{files.folder} is of tensor or pipeline parallelism: not handled")
    experts = files.model.mapping().get("num_experts")
    if experts:
        raise UnsupportedError(f"{files.folder} is of a model with experts (MoE), which is not handled")


def _framework_state(files: RankFiles, optimized: Optimized) -> dict[str, Any]:
    return {
        "optimizer": _optimizer(files),
        "param_groups": optimized.groups,
        "scalars": optimized.scalars,
        "slots": optimized.slots,
        **engine_state(files),
    }


def _optimizer(files: RankFiles) -> str:
    """The base optimizer as the configuration names it; the files do not."""
    section = files.model.at("ds_config").get("optimizer")
    kind = None if section is None else section.get("type")
    return "unknown" if kind is None else kind.text()


def _facts(files: RankFiles, optimized: Optimized, model: Mapping[str, Any]) -> dict[str, Any]:
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
        "clip_grad": float(first.get("clip_grad", 0.0)),
        "elastic_checkpoint": False,
        **model,
        **optimized.facts,
    }
