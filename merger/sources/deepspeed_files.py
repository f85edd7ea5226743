"""Tags, rank files of one save, their consistency.

The files of one DeepSpeed checkpoint: which ranks' there have to be, read and found to be of one save.

Structure only, no tensor. It does not know how a ZeRO stage lays out its tensors.

Whether DeepSpeed's files are of one save: what they count, and whether working weights are the masters' casts.

A fixed tag that is overwritten, and interrupted, leaves files of two saves under one name, and nothing in them names
the save. Steps are compared, and samples of weights. A sample can miss another save where no sampled element
differs in the working dtype: tiny updates, embeddings of tokens that did not occur, a parameter not used. It says
nothing about the optimizer's slots but that they lie in the same file as the masters.

Directories of DeepSpeed's checkpoints: a tag each, and a file that names the newest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from merger.checkpoint import Checkpoint
from merger.io.blocks import Block, Extent
from merger.sources.base import FileTensor, Nest, plain_name, read_name
from merger.sources.torch_file import STAND_INS, Kept, attributes, read_pt
from merger.tensors import memory_of, torch_dtype
from store.errors import DamagedError, MergeError, UnsupportedError
from store.names import WEIGHTS
from store.storage.local import LocalFiles
from store.text import counted, listed

_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")

WHOLE_MODEL = "mp_rank_00_model_states.pt"

_STRANGE = {
    r"layer_\d+_expert_\d+_.*\.pt|expert_\d+_.*\.pt|expp_rank_.*\.pt": "experts of a mixture (MoE)",
    r"layer_\d+-model.*\.pt": "a pipeline",
    r"offloaded_tensors": "optimizer state on NVMe",
}

SAMPLE = 512
"""Elements compared at the begin, the middle and the end of what each rank holds of a parameter."""

CHUNK = 1 << 24
"""Bytes read at once where a whole record has to be checked."""

_STEP_TAG = re.compile(r"global_step(\d{1,18})(_universal)?")


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


def step_problems(model: Nest, optimizer: str, steps: Iterable[float | None]) -> list[str]:
    """What is doubtful about the optimizer's steps, against those that the engine took.

    model: model states. optimizer: the file with the steps, for messages. steps: of each flat partition, None where
    the optimizer keeps none; those that never stepped agree with anything. MergeError where the optimizer counts
    more steps than the engine took: no run has that, but for one more, which older releases counted when they made
    the state. Fewer is what a run has that loaded weights alone.
    """
    taken = model.at("global_steps").natural() - model.at("skipped_steps").natural()
    found = sorted({step for step in steps if step})
    if not found:
        return []
    if found[-1] > taken + 1:
        raise MergeError(
            f"{optimizer} counts {counted(found[-1], 'step')} of the optimizer, and {model.where} says that {taken} "
            "were taken: they are of different saves; name a tag whose files are of one save"
        )
    if found[-1] != taken:
        return [
            (
                f"the optimizer counts {counted(found[-1], 'step')}, the engine {taken}: the optimizer's state was "
                f"made anew during the run, or {optimizer} is of another save than {model.where}"
            )
        ]
    if len(found) > 1:
        counts = listed((f"{step:g}" for step in found), 6)
        return [
            f"param groups of {optimizer} count different steps ({counts}): some were trained for a part of the run"
        ]
    return []


def step_in(scalars: Mapping[str, Any], hyper: Mapping[str, Any]) -> float | None:
    """The steps that an optimizer counts for a flat partition, in its state or in the param group; None for none."""
    for values in (scalars, hyper):
        step = values.get("step")
        if isinstance(step, torch.Tensor) and step.numel() == 1:
            return float(step)
        if isinstance(step, int | float) and not isinstance(step, bool):
            return float(step)
    return None


def weight_problems(module: Mapping[str, Any], extents: Iterable[Extent]) -> list[str]:
    """Compare samples of the working weights with the masters, cast. Returns what could not be compared.

    module: working weights as saved, by fqn. MergeError, naming the parameter, where they differ; DamagedError where
    they do because a record is damaged; StorageError.
    """
    skipped = {}
    for extent in extents:
        weights = module.get(extent.fqn)
        if extent.slot != WEIGHTS or not isinstance(weights, FileTensor):
            continue
        if not weights.contiguous or weights.lazy:
            skipped[extent.fqn] = weights.where
            continue
        for start, stop in samples(extent.start, extent.stop):
            _require_cast(
                weights.extent(extent.fqn, "working", extent.start, extent.stop, extent.start), extent, start, stop
            )
    return [
        f"{where}, the working weights of {fqn}, could not be compared with the optimizer's copy"
        for fqn, where in skipped.items()
    ]


def samples(start: int, stop: int) -> list[tuple[int, int]]:
    """The begin, the middle and the end of elements [start, stop); all of a few."""
    if stop - start <= 3 * SAMPLE:
        return [(start, stop)]
    middle = (start + stop) // 2
    return [(start, start + SAMPLE), (middle, middle + SAMPLE), (stop - SAMPLE, stop)]


def _require_cast(working: Extent, master: Extent, start: int, stop: int) -> None:
    one, other = elements(working, start, stop), elements(master, start, stop)
    other = other.to(one.dtype)
    if bool(((one == other) | (one.isnan() & other.isnan())).all()):
        return
    for block in (working.block, master.block):
        require_whole(block)
    raise MergeError(
        f"{working.fqn}: the weights in {working.block.name} are not those in {master.block.name} (elements {start} to "
        f"{stop}), as they are within one save: files of different saves are mixed, or weights were changed behind the "
        "optimizer's back; name another tag"
    )


def elements(extent: Extent, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of the parameter, unchecked."""
    out = torch.empty(stop - start, dtype=torch_dtype(extent.dtype))
    at = extent.block.offset + extent.offset + (start - extent.start) * out.element_size()
    extent.block.files.read_into(extent.block.path, at, memory_of(out))
    return out


def require_whole(block: Block) -> None:
    """Read a block, however large, in pieces. DamagedError unless it matches its checksum; StorageError."""
    running = block.checksum()
    for at in range(0, block.nbytes, CHUNK):
        data = memoryview(bytearray(min(CHUNK, block.nbytes - at)))
        block.files.read_into(block.path, block.offset + at, data)
        running.update(data)
    if running.hexdigest() != block.digest:
        raise DamagedError(f"{block.name}: the bytes of the record do not match its checksum")


@dataclass(frozen=True)
class Tags:
    """A directory that checkpoints were saved to, or one checkpoint's own.

    latest: name of the file that names the newest. is_one: whether a directory is a checkpoint.
    """

    root: Path
    latest: str
    is_one: Callable[[Path], bool]

    def all(self) -> list[str]:
        """Names of all checkpoints in the directory; links are none."""
        paths = (self.root / name for name in LocalFiles(self.root).list_dir(""))
        return [path.name for path in paths if not path.is_symlink() and self.is_one(path)]

    def steps(self) -> tuple[int, ...]:
        """Steps of those whose tag says it, newest first."""
        tags = [self.root.name] if self.is_one(self.root) else self.all()
        found = {step for step in map(step_of, tags) if step is not None}
        return tuple(sorted(found, reverse=True))

    def folder(self, step: int | str | None) -> Path:
        """The directory of the checkpoint at a step or tag, or of the newest for None.

        MergeError, naming those that are there, for one that is not, and for a name that leads elsewhere.
        """
        if self.is_one(self.root):
            if step is not None and not _means(step, self.root.name):
                raise MergeError(f"{self.root} is one checkpoint, and not {step}; name the directory above it")
            return self.root
        name = self._newest() if step is None else plain_name(self._tag(step), "the tag asked for")
        folder = self.root / name
        if folder.is_symlink() or not self.is_one(folder):
            by = f", which {self.latest} names" if step is None else ""
            raise MergeError(f"{self.root} has no checkpoint {name}{by}; there are: {self._told()}")
        return folder

    def verified(self, checkpoint: Checkpoint, step: int | str | None) -> Checkpoint:
        """The checkpoint found for ``step``, if its own counter says the step that its directory's name says.

        MergeError, naming both, if not; a problem where the directory itself was named, and so no step was meant.
        """
        tag = checkpoint.certificate.save
        told = step_of(tag)
        if told in (None, checkpoint.step):
            return checkpoint
        line = f"{checkpoint.origin} is called after step {told} and holds step {checkpoint.step}"
        if step is None and self.is_one(self.root):
            return replace(checkpoint, problems=(*checkpoint.problems, line))
        raise MergeError(f"{line}: give it its own name back, or name that directory itself to take it as it is")

    def _newest(self) -> str:
        found = read_name(self.root, self.latest)
        if found is None:
            raise MergeError(f"{self.root} has no file {self.latest!r}: name one of its checkpoints, {self._told()}")
        return found

    def _tag(self, step: int | str) -> str:
        return next((tag for tag in self.all() if _means(step, tag)), str(step))

    def _told(self) -> str:
        return listed(self.all(), 6) or "none"


def step_of(tag: str) -> int | None:
    """The step that a tag of DeepSpeed's own naming says."""
    found = _STEP_TAG.fullmatch(tag)
    return int(found[1]) if found else None


def _means(step: int | str, tag: str) -> bool:
    return str(step) == tag or (step_of(tag) is not None and str(step) == str(step_of(tag)))
