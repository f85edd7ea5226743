"""Layout protocol, Target, state-dict names.

What to write: the layout and its few settings, as the user names them.

What a layout is: one way to write a checkpoint, so that a framework loads it by itself.

Names of a model's state dict without the wrappers that happened to be around the model in training.

``torch.compile`` puts ``_orig_mod`` into names, DistributedDataParallel puts ``module`` before them; whoever loads the
weights has neither. It does not know files or dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from merger.checkpoint import Checkpoint
from merger.io.output_file import OutFile
from store.certificate import Certificate
from store.errors import MergeError, UsageError

LAYOUTS = ("native", "deepspeed", "universal", "hf", "dcp", "trainer", "torch")

SHARD_BYTES = 5 * 10**9
"""Size of files where none is asked for: what transformers writes."""


_COMPILED, _PARALLEL = "_orig_mod", "module."


@dataclass(frozen=True)
class Target:
    """How the output is laid out. UsageError for a value that means nothing.

    layout: ``native`` is the one of the framework that was training, at its own stage and world size.
    zero_stage, world_size: of the DeepSpeed engine that will load it; None takes the source's.
    dtype: of ``hf`` weights, a safetensors name; None takes the working dtype. shard_bytes: largest size of a file of
    ``hf`` and ``dcp``; None takes :data:`SHARD_BYTES`.
    files: a directory to take configuration, tokenizer and trainer state from; None takes the source's.
    """

    layout: str = "native"
    zero_stage: int | None = None
    world_size: int | None = None
    dtype: str | None = None
    shard_bytes: int | None = None
    files: Path | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UsageError(f"layout {self.layout!r} is not known; there are {', '.join(LAYOUTS)}")
        if self.zero_stage is not None and self.zero_stage not in (1, 2, 3):
            raise UsageError(f"ZeRO stage {self.zero_stage} cannot be written; there are 1, 2 and 3")
        if self.world_size is not None and self.world_size < 1:
            raise UsageError(f"a world size of {self.world_size} makes no sense: at least 1")
        if self.shard_bytes is not None and self.shard_bytes < 1:
            raise UsageError("shard_bytes must be at least 1")

    @property
    def file_bytes(self) -> int:
        """Largest size of a file, asked for or not."""
        return SHARD_BYTES if self.shard_bytes is None else self.shard_bytes


@dataclass(frozen=True)
class LayoutResult:
    """All files of an output, planned. tag: the checkpoint's name inside the directory, as its framework says it.

    load: lines of Python that load it, with ``{out}`` for the directory and ``{out:FILE}`` for what is in it.
    notes: what the user has to know before loading it, each with its way out. certificate: of what is laid out, None
    where that is the checkpoint's own.
    """

    tag: str
    files: tuple[OutFile, ...]
    load: tuple[str, ...]
    notes: tuple[str, ...] = ()
    certificate: Certificate | None = None


class Layout(Protocol):
    """Plans the files of one checkpoint. Reads no tensor and writes nothing."""

    def lay_out(self, checkpoint: Checkpoint, target: Target, /) -> LayoutResult:
        """MergeError where the checkpoint lacks what the layout needs, UnsupportedError where it cannot hold it."""
        ...


def model_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Canonical fqn by every name in the model's state dict, wrappers removed, in order; tied ones under each name.

    Buffers that the state dict leaves out are left out. MergeError where two tensors would share a name.
    """
    canonical = {alias: fqn for fqn, record in checkpoint.tensors.items() for alias in record.aliases}
    names = list(checkpoint.facts.get("state_dict_names") or [*checkpoint.tensors, *canonical])
    out: dict[str, str] = {}
    for name, bare in zip(names, unwrapped(names), strict=True):
        fqn = canonical.get(name, name)
        if out.setdefault(bare, fqn) != fqn:
            raise MergeError(
                f"without the wrappers' prefixes two tensors of {checkpoint.origin} are called {bare}: {out[bare]} and "
                f"{fqn}; merge it with its own layout instead (native)"
            )
    return out


def bare_names(checkpoint: Checkpoint) -> dict[str, str]:
    """For every canonical fqn its first name without wrappers."""
    fqns = list(checkpoint.tensors)
    return dict(zip(fqns, unwrapped(fqns), strict=True))


def unwrapped(names: Iterable[str]) -> list[str]:
    """``names`` without wrappers; ``module.`` goes only where all begin with it, since a model may have one itself."""
    found = [".".join(part for part in name.split(".") if part != _COMPILED) for name in names]
    while found and all(name.startswith(_PARALLEL) for name in found):
        found = [name.removeprefix(_PARALLEL) for name in found]
    return found
