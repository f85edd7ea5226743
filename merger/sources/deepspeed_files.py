"""Find and read the files of one DeepSpeed checkpoint, and check that all ranks' files are of one save.

An interrupted save under a fixed tag leaves files of two saves under one name, and no file names its save. So step
counts are compared, and samples of the working weights with the masters' casts. A sample can miss another save if no
sampled element differs in the working dtype: tiny updates, embeddings of unseen tokens, unused parameters. It covers
the optimizer's slots only as far as they lie in the same file as the masters."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from merger.io.blocks import Block, Extent, read_chunks
from merger.sources.base import FileTensor, Nest
from merger.sources.torch_file import StandIn, read_pt
from merger.tensors import memory_of, torch_dtype
from store.errors import MergeError, UnsupportedError
from store.storage.local import LocalFiles
from store.text import counted, listed

T = TypeVar("T")
_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
WHOLE_MODEL = "mp_rank_00_model_states.pt"

_UNSUPPORTED = {
    r"layer_\d+_expert_\d+_.*\.pt|expert_\d+_.*\.pt|expp_rank_.*\.pt": "experts of a mixture (MoE)",
    r"layer_\d+-model.*\.pt": "a pipeline",
    r"offloaded_tensors": "optimizer state on NVMe",
}

SAMPLE = 512  # elements compared at the start, the middle and the end of each rank's part of a parameter
CHUNK = 1 << 24  # bytes read at a time to check a whole record
_STEP_TAG = re.compile(r"global_step(\d{1,18})(_universal)?")


@dataclass(frozen=True)
class RankFiles:
    """Contents of the files of a checkpoint."""

    folder: Path
    models: tuple[Nest, ...]  # of each rank at ZeRO-3, else one
    optims: tuple[Nest, ...]  # optimizer state of each rank; of rank 0 only in a universal checkpoint
    stage: int  # ZeRO stage
    world_size: int  # number of ranks that saved
    bf16: bool  # whether the working weights are bf16

    @property
    def model(self) -> Nest:
        return self.models[0]


def is_checkpoint(folder: Path) -> bool:
    """Return whether a directory holds DeepSpeed model states and is not a universal checkpoint."""
    return _has_models(folder) and not is_universal(folder)


def is_universal(folder: Path) -> bool:
    """Return whether a directory is a universal checkpoint: one directory per parameter, in ``zero``."""
    return _has_models(folder) and (folder / "zero").is_dir()


def _has_models(folder: Path) -> bool:
    return folder.is_dir() and any(_MODEL.fullmatch(name) for name in LocalFiles(folder).list_dir(""))


def read_files(folder: Path) -> RankFiles:
    """Read the files of a checkpoint.

    Raises MergeError if a file is missing, surplus or of another save; UnsupportedError, DamagedError or StorageError
    if it cannot be read."""
    files = LocalFiles(folder)
    names = files.list_dir("")
    _require_supported(folder, names)
    models, optims, bf16 = _by_rank(folder, names)
    if not optims:
        raise UnsupportedError(
            f"{folder} has no ZeRO optimizer files, and a checkpoint of stage 0 does not map optimizer state to "
            "parameters. Rebuild it from a store, or save it with ZeRO stage 1"
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
    """Read a universal checkpoint, except for the parameters' own files."""
    files = LocalFiles(folder)
    names = files.list_dir("")
    _require_supported(folder, names)
    # Some hold both kinds of model states; the one for ZeRO-1/2 is complete.
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
    """Return the model states in the order of ranks, and whether each rank has its own."""
    first = _nest(files, models[min(models)])
    sharded = models[min(models)].startswith("zero_pp_rank_")
    if sharded:
        world_size = first.at("dp_world_size").natural()
        _require_ranks(files.root, models, world_size, "zero_pp_rank_{}_mp_rank_00_model_states.pt")
    return (first, *(_nest(files, models[rank]) for rank in sorted(models)[1:])), sharded


def _nest(files: LocalFiles, name: str) -> Nest:
    value, archive = read_pt(files, name)
    where, saved_as = str(files.root / name), f"{archive}.pt"
    if saved_as != name and (_OPTIM.fullmatch(saved_as) or _MODEL.fullmatch(saved_as)):
        raise MergeError(f"{where} was saved as {saved_as}, so it holds another rank's state; restore its name")
    nest = Nest(value, where)
    nest.mapping()
    return nest


def _require_supported(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        for pattern, what in _UNSUPPORTED.items():
            if re.fullmatch(pattern, name):
                raise UnsupportedError(f"{folder / name} is of {what}, which is not supported")
        optim, model = _OPTIM.fullmatch(name), _MODEL.fullmatch(name)
        if (optim and int(optim[3])) or (model and int(model[2])):
            raise UnsupportedError(f"{folder / name} is of tensor or pipeline parallelism, which is not supported")


def _by_rank(folder: Path, names: Sequence[str]) -> tuple[dict[int, str], dict[int, str], bool]:
    """Return (model files, optimizer files) by data-parallel rank, and whether the latter are bf16."""
    models: dict[int, str] = {}
    optims: dict[int, str] = {}
    for name in names:
        optim = _OPTIM.fullmatch(name)
        match = optim or _MODEL.fullmatch(name)
        if match is None:
            continue
        by_rank, rank = (optims, int(match[2])) if optim else (models, int(match[1] or 0))
        if rank in by_rank:
            raise MergeError(f"{folder} has {by_rank[rank]} and {name} of rank {rank}: remove that of the other run")
        by_rank[rank] = name
    if not models:
        raise MergeError(f"{folder} has no model states (mp_rank_00_model_states.pt), so name another tag")
    prefixes = {name.partition("zero_")[0] for name in optims.values()}
    if len({name.startswith("zero_pp_rank_") for name in models.values()}) > 1 or len(prefixes) > 1:
        raise MergeError(
            f"{folder} holds files of two different runs ({listed(sorted([*models.values(), *optims.values()]), 6)}): "
            "remove those of the other run"
        )
    return models, optims, prefixes == {"bf16_"}


def _require_ranks(folder: Path, found: dict[int, str], world_size: int, name: str) -> None:
    for rank in range(world_size):
        if rank not in found:
            raise MergeError(
                f"{folder / name.format(rank)} is missing, but the files of all {counted(world_size, 'rank')} are "
                "needed. The save may have been interrupted: name an older tag"
            )
    for rank, extra in found.items():
        if rank >= world_size:
            raise MergeError(
                f"{folder / extra} is of rank {rank}, but {counted(world_size, 'rank')} saved this checkpoint: remove "
                "this file of another save"
            )


def _stage(model: Nest, optim: Nest, sharded: bool) -> int:
    zero = model.at("ds_config").get("zero_optimization")
    saved = optim.get("zero_stage") or (zero and zero.at("stage"))  # BF16_Optimizer does not store it
    stage = 1 if saved is None else saved.natural()
    if stage not in (1, 2, 3) or (stage == 3) != sharded:
        raise MergeError(f"{model.where} and {optim.where} are of two ZeRO stages, so of two runs; name another tag")
    return stage


def _require_one_save(files: RankFiles, optims: Sequence[Nest]) -> None:
    equal: dict[str, Callable[[Nest], Any]] = {
        "global_steps": lambda nest: nest.at("global_steps").natural(),
        "dp_world_size": lambda nest: nest.at("dp_world_size").natural(),
        "param_shapes": lambda nest: nest.at("param_shapes").value,
    }
    for name, value in equal.items():
        require_equal(files.models, name, value)
    require_equal((*files.models, *optims), "ds_version", lambda nest: nest.at("ds_version").text())
    for name in ("zero_stage", "partition_count", "dynamic_loss_scale", "clip_grad", "loss_scaler"):
        require_equal(files.optims, name, lambda nest, name=name: comparable(nest.mapping().get(name)))  # type: ignore[misc]


def require_equal(nests: Sequence[Nest], name: str, value: Callable[[Nest], T]) -> T:
    """Return the value that all ranks' files have in common. MergeError, naming two files, if they differ in it."""
    first = value(nests[0])
    for nest in nests[1:]:
        if value(nest) != first:
            raise MergeError(
                f"{nests[0].where} and {nest.where} differ in {name}, so they are of different saves; name another tag"
            )
    return first


def comparable(value: Any) -> Any:
    """Return a value whose equality is by content: objects by attributes, tensors by dtype and values."""
    if isinstance(value, FileTensor):
        return comparable(value.read())
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, StandIn):
        return type(value).__name__, vars(value)
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return [comparable(item) for item in value] if isinstance(value, list | tuple) else value


def step_problems(model: Nest, optimizer: str, steps: Iterable[float | None]) -> Iterator[str]:
    """Yield what is doubtful about the optimizer's steps, given those that the engine took.

    An optimizer counts at most one more than the engine (older releases, as they created the state), and fewer in a run
    that loaded weights alone.

    ``optimizer``: file with the steps, for messages. ``steps``: of each flat partition, None if the optimizer keeps
    none; a step of 0 is not compared. Raises MergeError if the optimizer counts more steps than possible."""
    taken = model.at("global_steps").natural() - model.at("skipped_steps").natural()
    found = sorted({step for step in steps if step})
    if found and found[-1] > taken + 1:
        raise MergeError(
            f"{optimizer} counts {counted(found[-1], 'step')} of the optimizer, but {model.where} counts {taken}, so "
            "they are of different saves; name another tag"
        )
    if found and found[-1] != taken:
        yield (
            f"the optimizer counts {counted(found[-1], 'step')}, the engine {taken}: the optimizer's state was made "
            f"anew during the run, or {optimizer} is of another save than {model.where}"
        )
    elif len(found) > 1:
        counts = listed((f"{step:g}" for step in found), 6)
        yield f"param groups of {optimizer} count different steps ({counts}): some were trained for a part of the run"


def stored_step(scalars: Mapping[str, Any], hyper: Mapping[str, Any]) -> float | None:
    """Return the steps that an optimizer counts for a flat partition, in its state or param group; None: none."""
    for values in (scalars, hyper):
        step = values.get("step")
        if isinstance(step, torch.Tensor) and step.numel() == 1:
            return float(step)
        if isinstance(step, int | float) and not isinstance(step, bool):
            return float(step)
    return None


def sample_ranges(start: int, stop: int) -> list[tuple[int, int]]:
    """Return the start, the middle and the end of elements [start, stop); all if they are few."""
    if stop - start <= 3 * SAMPLE:
        return [(start, stop)]
    middle = (start + stop) // 2
    return [(start, start + SAMPLE), (middle, middle + SAMPLE), (stop - SAMPLE, stop)]


def require_cast(working: Extent, master: Extent, start: int, stop: int) -> None:
    """Raise MergeError unless elements [start, stop) of the working weights are the cast masters; as :func:`refuse`."""
    one, other = read_elements(working, start, stop), read_elements(master, start, stop)
    other = other.to(one.dtype)
    if bool(((one == other) | (one.isnan() & other.isnan())).all()):
        return
    refuse(
        (working.block, master.block),
        f"{working.fqn}: the weights in {working.block.name} are not the cast of those in {master.block.name} "
        f"(elements {start} to {stop}): files of different saves are mixed, or weights were changed outside the "
        "optimizer; name another tag",
    )


def read_elements(extent: Extent, start: int, stop: int) -> torch.Tensor:
    """Read elements [start, stop) of the parameter, unchecked."""
    out = torch.empty(stop - start, dtype=torch_dtype(extent.dtype))
    at = extent.block.offset + extent.offset + (start - extent.start) * out.element_size()
    extent.block.files.read_into(extent.block.path, at, memory_of(out))
    return out


def refuse(blocks: Iterable[Block], why: str) -> NoReturn:
    """Raise MergeError for values that were read unchecked; DamagedError if a damaged block is the reason."""
    for block in blocks:
        for _ in read_chunks(block, memoryview(bytearray(min(CHUNK, block.nbytes)))):
            pass
    raise MergeError(why)


def step_of(tag: str) -> int | None:
    """Return the step in a tag of DeepSpeed's own naming."""
    found = _STEP_TAG.fullmatch(tag)
    return int(found[1]) if found else None
