"""Read DeepSpeed checkpoints at any ZeRO stage and world size, and Trainer folders that hold them.

Files are read as ``engine.save_checkpoint`` wrote them; no DeepSpeed code runs, see :mod:`merger.sources.torch_file`.
The other files of a Trainer's ``checkpoint-N`` folder (configuration, tokenizer, trainer state) stay beside the state.
"""

import re
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from merger.checkpoint import Checkpoint, gradient_clipping, require_whole
from merger.io.blocks import Damage
from merger.sources.certificates import apply_merge_certificates, certificate, describe_tensors
from merger.sources.deepspeed_files import RankFiles, Tags, is_checkpoint, read_files
from merger.sources.deepspeed_model import Model, client_state, engine_state, loss_scaler, run_states
from merger.sources.deepspeed_zero import OptimizerContents, Shape, param_shapes, read_zero3, read_zero12
from store.errors import DamagedError, MergeError, StorageError, UnsupportedError
from store.fragments import FragmentIndex
from store.storage.local import LocalFiles
from store.text import listed

_FOLDER = re.compile(r"checkpoint-(\d{1,18})")
STATE = "trainer_state.json"


def build_checkpoint(
    files: RankFiles, shapes: Sequence[Sequence[Shape]], optimized: OptimizerContents, beside: Path | None
) -> Checkpoint:
    """Build the checkpoint of ordinary or universal DeepSpeed files.

    ``shapes``: of the parameters that the optimizer holds. ``beside``: directory with the files beside the state.

    Raises MergeError for incomplete or contradictory files, UnsupportedError."""
    refuse_parallelism(files)
    model = Model(files, {shape.fqn: shape for group in shapes for shape in group})
    named = model.tensors()
    index = FragmentIndex([*optimized.extents, *model.extents(named)])
    tensors, layers = describe_tensors(named)
    state = {
        "optimizer": _optimizer(files),
        "param_groups": optimized.groups,
        "scalars": optimized.scalars,
        "slots": optimized.slots,
        **engine_state(files),
    }
    step, tag, folder = state["counters"]["global_steps"], files.folder.name, str(files.folder)
    unvouched = frozenset(index.names().keys() - optimized.vouched)
    problems = (*optimized.problems, *model.problems)
    checkpoint = Checkpoint(
        origin=folder,
        framework="deepspeed",
        step=step,
        tensors=tensors,
        layers=layers,
        index=index,
        framework_state=state,
        facts={**_engine_facts(files), **model.facts(named), **optimized.facts},
        run_states=run_states(files),
        certificate=certificate(tag, step, folder, tensors, index, unvouched=len(unvouched), problems=problems),
        files=beside,
        client_state=client_state(files),
        problems=problems,
        unvouched=unvouched,
    )
    require_whole(checkpoint)
    return checkpoint


def refuse_parallelism(files: RankFiles) -> None:
    """Raise UnsupportedError for tensor, pipeline and expert parallelism."""
    if files.model.at("mp_world_size").natural() != 1:
        raise UnsupportedError(f"{files.folder} uses tensor or pipeline parallelism, which is not supported")
    experts = files.model.mapping().get("num_experts")
    if experts:
        raise UnsupportedError(f"{files.folder} is of a model with experts (MoE), which is not supported")


def _optimizer(files: RankFiles) -> str:
    """Return the base optimizer's name from the configuration; the files do not have it."""
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


class DeepSpeedSource:
    """A directory of checkpoints, or one checkpoint. ``files``: directory with the files beside the state, or None."""

    kind = "deepspeed"

    def __init__(self, root: Path, files: Path | None = None) -> None:
        self._tags, self._files = self._tags_in(root.absolute()), files

    def steps(self) -> tuple[int, ...]:
        return self._tags.steps()

    def checkpoint(self, step: int | str | None, _: Set[Damage] = frozenset()) -> Checkpoint:
        files, optimized = self._read(self._tags.folder(step))
        built = build_checkpoint(files, param_shapes(files.model), optimized, self._files)
        return self._tags.verified(apply_merge_certificates(built, files), step)

    def _tags_in(self, root: Path) -> Tags:
        return Tags(root, "latest", is_checkpoint)

    def _read(self, folder: Path) -> tuple[RankFiles, OptimizerContents]:
        files = read_files(folder)
        return files, read_zero3(files) if files.stage == 3 else read_zero12(files)


def trainer_folders(root: Path) -> dict[int, Path]:
    """Return the ``checkpoint-N`` folders by step, newest first, without links."""
    found = {}
    for path in (root / name for name in LocalFiles(root).list_dir("")):
        name = _FOLDER.fullmatch(path.name)
        if name and path.is_dir() and not path.is_symlink():
            found[int(name[1])] = path
    return dict(sorted(found.items(), reverse=True))


class TrainerSource:
    """An output directory of the Trainer with ``checkpoint-N`` folders."""

    kind = "trainer"

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def steps(self) -> tuple[int, ...]:
        return tuple(trainer_folders(self._root))

    def checkpoint(self, step: int | str | None, _: Set[Damage] = frozenset()) -> Checkpoint:
        """Return the state of a folder, given by step or name; None: the newest complete one.

        The Trainer itself chooses the highest number, complete or not."""
        folders = trainer_folders(self._root)
        if step is not None:
            named = next((path for number, path in folders.items() if str(step) in (str(number), path.name)), None)
            if named is None:
                raise MergeError(
                    f"{self._root} has no checkpoint {step}; there are: "
                    f"{listed((path.name for path in folders.values()), 6) or 'none'}"
                )
            return _checkpoint_in(named)
        passed_over: list[str] = []
        for path in folders.values():
            try:
                found = _checkpoint_in(path)
            except (MergeError, DamagedError, StorageError) as error:
                passed_over.append(f"{path.name} is not complete: {error}")
                continue
            return replace(found, problems=(*passed_over, *found.problems))
        raise MergeError(f"{self._root} has no complete checkpoint: {listed(passed_over, 3, '; ')}")


def _checkpoint_in(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder ``checkpoint-N``. MergeError unless it is of step N."""
    found = DeepSpeedSource(path, path).checkpoint(None)
    if path.name != f"checkpoint-{found.step}":
        raise MergeError(
            f"{path} holds {found.origin} of step {found.step}, another than in its name: restore its name, or name "
            "that inner directory to merge it as it is"
        )
    return found
