"""Define layouts, their target, and the names of a state dict without the wrappers of training."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from merger.checkpoint import Checkpoint
from merger.io.output_file import OutFile
from store.certificate import Certificate
from store.errors import MergeError, UsageError

LAYOUTS = ("native", "deepspeed", "universal", "hf", "dcp", "trainer", "torch")
SHARD_BYTES = 5 * 10**9  # default size of files in bytes, as in transformers
MOST_RANKS = 1 << 14  # largest world size that is written for: each rank has a file of its own, planned in memory
_COMPILED, _PARALLEL = "_orig_mod", "module."
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """Layout of the output. UsageError for invalid values."""

    layout: str = "native"  # which is a Trainer's folder for a Trainer's source, else the training framework's own
    zero_stage: int | None = None  # of the DeepSpeed engine that will load it; None: the source's
    world_size: int | None = None  # of the DeepSpeed engine that will load it; None: the source's
    dtype: str | None = None  # safetensors name for ``hf`` weights; None: the working dtype
    shard_bytes: int | None = None  # largest file of ``hf`` and ``dcp``; None: `SHARD_BYTES`
    files: Path | None = None  # directory with configuration, tokenizer and trainer state; None: the source's

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UsageError(f"layout {self.layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
        if self.zero_stage is not None and self.zero_stage not in (1, 2, 3):
            raise UsageError(f"ZeRO stage {self.zero_stage} cannot be written; use 1, 2 or 3")
        if self.world_size is not None and self.world_size < 1:
            raise UsageError(f"world size {self.world_size} is invalid; it must be at least 1")
        if self.world_size is not None and self.world_size > MOST_RANKS:
            raise UsageError(f"world size {self.world_size} is invalid; this release writes for {MOST_RANKS} at most")
        if self.shard_bytes is not None and self.shard_bytes < 1:
            raise UsageError(f"shard_bytes {self.shard_bytes} is invalid; it must be at least 1")

    @property
    def file_bytes(self) -> int:
        return SHARD_BYTES if self.shard_bytes is None else self.shard_bytes


@dataclass(frozen=True)
class LayoutResult:
    """All files of an output, planned."""

    tag: str  # name of the checkpoint inside the directory
    files: tuple[OutFile, ...]  # relative to the output directory
    load: tuple[str, ...]  # lines of Python that load it: ``{out}`` is the directory, ``{out:FILE}`` a file in it
    notes: tuple[str, ...] = ()  # facts to know before loading it, each with a remedy
    certificate: Certificate | None = None  # of the output; None if it is the checkpoint's own


Layout = Callable[[Checkpoint, Target], LayoutResult]
"""Plans the files of a checkpoint in a form that a framework loads by itself. Reads no tensor, writes nothing.

MergeError if the checkpoint lacks state, UnsupportedError if the layout cannot hold it."""


def canonical_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the canonical fqn of every name in the model's state dict, in its order; tied ones under each name."""
    canonical = {alias: fqn for fqn, record in checkpoint.tensors.items() for alias in record.aliases}
    if (names := checkpoint.facts.get("state_dict_names")) is None:
        names = [*checkpoint.tensors, *canonical]
    return {name: canonical.get(name, name) for name in names}


def share_tied(names: Mapping[str, str], tensor: Callable[[str], T]) -> dict[str, T]:
    """Return ``tensor(fqn)`` by name, the same object for all names of one fqn."""
    by_fqn = {fqn: tensor(fqn) for fqn in dict.fromkeys(names.values())}
    return {name: by_fqn[fqn] for name, fqn in names.items()}


def model_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return :func:`canonical_names` without the prefixes of wrappers. MergeError if two tensors would share a name."""
    names = canonical_names(checkpoint)
    out: dict[str, str] = {}
    for fqn, bare in zip(names.values(), strip_wrappers(names), strict=True):
        if out.setdefault(bare, fqn) != fqn:
            raise MergeError(
                f"without wrapper prefixes two tensors of {checkpoint.origin} have the name {bare}: {out[bare]} and "
                f"{fqn}; merge it with its native layout instead"
            )
    return out


def strip_wrappers(names: Iterable[str]) -> list[str]:
    """Return ``names`` without the prefixes of wrappers.

    ``torch.compile`` puts ``_orig_mod`` into names, DistributedDataParallel puts ``module.`` before them. ``module.``
    is removed only if all names begin with it, since a model may have such a module itself."""
    found = [".".join(part for part in name.split(".") if part != _COMPILED) for name in names]
    while found and all(name.startswith(_PARALLEL) for name in found):
        found = [name.removeprefix(_PARALLEL) for name in found]
    return found


def require_folder(files: Path) -> None:
    """Raise UsageError unless it is a directory."""
    if not files.is_dir():
        raise UsageError(f"{files} is not a directory: name the one that holds config.json and the tokenizer (--files)")


def grouped(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Group items, in order, into files of about ``most`` bytes; at least one file."""
    files, size = list[list[T]]([[]]), 0
    for item in items:
        if files[-1] and size + nbytes(item) > most:
            files.append([])
            size = 0
        files[-1].append(item)
        size += nbytes(item)
    return files
