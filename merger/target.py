"""What to write: the layout and its few settings, as the user names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from store.errors import UsageError

LAYOUTS = ("native", "deepspeed", "universal", "hf", "dcp", "trainer", "torch")

SHARD_BYTES = 5 * 10**9
"""Size of files where none is asked for: what transformers writes."""


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
