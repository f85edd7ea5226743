"""The files of one DeepSpeed checkpoint: which ranks' there have to be, read and found to be of one save.

Structure only, no tensor. It does not know how a ZeRO stage lays out its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from merger.sources.deepspeed_classes import STAND_INS, Kept, attributes
from merger.sources.nest import Nest
from merger.sources.pt import read_pt
from merger.sources.tensor import FileTensor
from store.errors import MergeError, UnsupportedError
from store.files import LocalFiles
from store.text import counted, listed

_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
WHOLE_MODEL = "mp_rank_00_model_states.pt"
_STRANGE = {
    r"layer_\d+_expert_\d+_.*\.pt|expert_\d+_.*\.pt|expp_rank_.*\.pt": "experts of a mixture (MoE)",
    r"layer_\d+-model.*\.pt": "a pipeline",
    r"offloaded_tensors": "optimizer state on NVMe",
}


@dataclass(frozen=True)
class RankFiles:
    """What the files of a checkpoint hold.

    models: of each rank at ZeRO-3, else one. optims: of each rank, the optimizer's state alone; of rank 0 only in a
    universal checkpoint. stage: of ZeRO. world_size: number of ranks that saved. bf16: whether the working weights
    are.
    """

    folder: Path
    models: tuple[Nest, ...]
    optims: tuple[Nest, ...]
    stage: int
    world_size: int
    bf16: bool

    @property
    def model(self) -> Nest:
        """Rank 0's model states."""
        return self.models[0]


def is_checkpoint(folder: Path) -> bool:
    """Whether a directory holds model states of DeepSpeed's, and is no universal checkpoint."""
    return _has_models(folder) and not is_universal(folder)


def is_universal(folder: Path) -> bool:
    """Whether a directory is a universal checkpoint: one directory per parameter, in ``zero``."""
    return _has_models(folder) and (folder / "zero").is_dir()


def _has_models(folder: Path) -> bool:
    return folder.is_dir() and any(_MODEL.fullmatch(name) for name in LocalFiles(folder).list_dir(""))


def read_files(folder: Path) -> RankFiles:
    """Read a checkpoint's files. MergeError, naming it, for a file that is missing, one too many or of another save;
    UnsupportedError for what is not handled; DamagedError, StorageError."""
    files = LocalFiles(folder)
    names = files.list_dir("")
    _refuse_strange(folder, names)
    models, optims, bf16 = _by_rank(folder, names)
    if not optims:
        raise UnsupportedError(
            f"{folder} has no optimizer files of ZeRO: a checkpoint of stage 0 does not say which optimizer state is "
            "of which parameter. Rebuild it from a store, or save it with ZeRO stage 1"
        )
    nests, sharded = _read_models(files, models)
    world_size = nests[0].at("dp_world_size").natural()
    _require_ranks(folder, optims, world_size, f"{'bf16_' if bf16 else ''}zero_pp_rank_{{}}_mp_rank_00_optim_states.pt")
    read = tuple(_nest(files, optims[rank]) for rank in range(world_size))
    states = tuple(nest.at("optimizer_state_dict") for nest in read)
    found = RankFiles(folder, nests, states, _stage(nests[0], states[0], sharded), world_size, bf16)
    _require_one_save(found, read)
    return found


def read_universal(folder: Path) -> RankFiles:
    """The same for a universal checkpoint, but for the parameters' own files."""
    files = LocalFiles(folder)
    names = files.list_dir("")
    _refuse_strange(folder, names)
    # Some hold both kinds of model states; the one for ZeRO-1/2 has everything in it.
    whole = [name for name in names if name == WHOLE_MODEL]
    nests, sharded = _read_models(files, _by_rank(folder, whole or names)[0])
    state = _nest(files, "zero/optimizer_state.pt")
    half = nests[0].at("ds_config").get("bf16") or nests[0].at("ds_config").get("bfloat16")
    bf16 = half is not None and half.mapping().get("enabled") is True
    world_size = nests[0].at("dp_world_size").natural()
    found = RankFiles(folder, nests, (state,), _stage(nests[0], state, sharded), world_size, bf16)
    _require_one_save(found, ())
    return found


def _read_models(files: LocalFiles, models: dict[int, str]) -> tuple[tuple[Nest, ...], bool]:
    """Model states in the order of ranks, and whether each rank has its own."""
    first = _nest(files, models[min(models)])
    sharded = models[min(models)].startswith("zero_pp_rank_")
    if sharded:
        world_size = first.at("dp_world_size").natural()
        _require_ranks(files.root, models, world_size, "zero_pp_rank_{}_mp_rank_00_model_states.pt")
    return (first, *(_nest(files, models[rank]) for rank in sorted(models)[1:])), sharded


def _nest(files: LocalFiles, name: str) -> Nest:
    content = read_pt(files, name, STAND_INS)
    saved_as = f"{content.archive}.pt"
    if saved_as != name and (_OPTIM.fullmatch(saved_as) or _MODEL.fullmatch(saved_as)):
        raise MergeError(
            f"{files.root / name} was saved as {saved_as}: it holds another rank's state under this name; give it its "
            "own name back"
        )
    nest = Nest(content.value, str(files.root / name))
    nest.mapping()
    return nest


def _refuse_strange(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        for pattern, what in _STRANGE.items():
            if re.fullmatch(pattern, name):
                raise UnsupportedError(f"{folder / name}: {what}, which is not handled; a dense model is")
        optim, model = _OPTIM.fullmatch(name), _MODEL.fullmatch(name)
        if (optim and int(optim[3])) or (model and int(model[2])):
            raise UnsupportedError(f"{folder / name} is of tensor or pipeline parallelism, which is not handled")


def _by_rank(folder: Path, names: Sequence[str]) -> tuple[dict[int, str], dict[int, str], bool]:
    """(model files, optimizer files) by rank of data parallelism, and whether the latter are of bf16."""
    models: dict[int, str] = {}
    optims: dict[int, str] = {}
    prefixes = set()
    for name in names:
        optim, model = _OPTIM.fullmatch(name), _MODEL.fullmatch(name)
        if optim:
            prefixes.add(optim[1] or "")
            _put(folder, optims, int(optim[2]), name)
        elif model:
            _put(folder, models, int(model[1] or 0), name)
    if not models:
        raise MergeError(f"{folder} has no model states (mp_rank_00_model_states.pt): it is not a whole checkpoint")
    if len({name.startswith("zero_pp_rank_") for name in models.values()}) > 1 or len(prefixes) > 1:
        raise MergeError(
            f"{folder} holds files of two different runs ({listed(sorted([*models.values(), *optims.values()]), 6)}): "
            "remove those that do not belong to it"
        )
    return models, optims, prefixes == {"bf16_"}


def _put(folder: Path, found: dict[int, str], rank: int, name: str) -> None:
    if rank in found:
        raise MergeError(
            f"{folder} has two files of rank {rank}, {found[rank]} and {name}: remove the one of the other run"
        )
    found[rank] = name


def _require_ranks(folder: Path, found: dict[int, str], world_size: int, name: str) -> None:
    for rank in range(world_size):
        if rank not in found:
            raise MergeError(
                f"{folder / name.format(rank)} is missing: {counted(world_size, 'rank')} saved this checkpoint, and "
                "all their files are needed. The save may have been interrupted: name an older tag"
            )
    for rank, extra in found.items():
        if rank >= world_size:
            raise MergeError(
                f"{folder / extra} is of rank {rank}, and {counted(world_size, 'rank')} saved this checkpoint: it is "
                "left from another save; remove it"
            )


def _stage(model: Nest, optim: Nest, sharded: bool) -> int:
    saved = optim.get("zero_stage")
    if saved is None:  # the wrapper for bf16 does not say
        zero = model.at("ds_config").get("zero_optimization")
        stage = 1 if zero is None else zero.at("stage").natural()
    else:
        stage = saved.natural()
    if stage not in (1, 2, 3) or (stage == 3) != sharded:
        raise MergeError(f"{model.where} and {optim.where} are of different ZeRO stages: files of two runs are mixed")
    return stage


def _require_one_save(files: RankFiles, optims: Sequence[Nest]) -> None:
    alike: dict[str, Callable[[Nest], Any]] = {
        "global_steps": lambda nest: nest.at("global_steps").natural(),
        "dp_world_size": lambda nest: nest.at("dp_world_size").natural(),
        "param_shapes": lambda nest: nest.at("param_shapes").value,
    }
    for name, value in alike.items():
        _require_alike(files.models, name, value)
    _require_alike((*files.models, *optims), "ds_version", lambda nest: nest.at("ds_version").text())
    for name in ("zero_stage", "partition_count", "dynamic_loss_scale", "clip_grad", "loss_scaler"):
        _require_alike(files.optims, name, _item(name))


def _item(name: str) -> Callable[[Nest], Any]:
    return lambda nest: comparable(nest.mapping().get(name))


def _require_alike(nests: Sequence[Nest], name: str, value: Callable[[Nest], Any]) -> None:
    for nest in nests[1:]:
        if value(nest) != value(nests[0]):
            raise MergeError(
                f"{nests[0].where} and {nest.where} differ in {name}: they are of different saves; name a tag whose "
                "files are of one save"
            )


def comparable(value: Any) -> Any:
    """A plain value in a form in which equal ones are equal: objects by attributes, tensors by dtype and values."""
    if isinstance(value, FileTensor):
        return comparable(value.read())
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, Kept):
        return type(value).__name__, attributes(value)
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    return value
