"""Checkpoints by their records alone, for what compares and certifies without reading a byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from merger.io.blocks import Block, Extent, xxh3
from store.certificate import Certificate, CertifiedUnit
from store.fragments import FragmentIndex
from store.schema import LayerRecord, TensorRecord
from store.storage.local import LocalFiles

MOMENTS = ("exp_avg", "exp_avg_sq")


def record(layer: str, shape: Sequence[int], kind: str = "trainable", aliases: Sequence[str] = ()) -> TensorRecord:
    return TensorRecord(layer=layer, shape=tuple(shape), dtype="BF16", kind=kind, aliases=tuple(aliases))


def small_model() -> dict[str, TensorRecord]:
    """An embedding, two blocks of two tensors, a frozen head."""
    return {
        "embed.weight": record("embed", (10, 4)),
        "layers.0.up.weight": record("layers.0", (4, 4)),
        "layers.0.norm.weight": record("layers.0", (4,)),
        "layers.1.up.weight": record("layers.1", (4, 4)),
        "layers.1.norm.weight": record("layers.1", (4,)),
        "head.weight": record("head", (4, 10), "frozen"),
    }


def checkpoint(
    origin: str,
    tensors: Mapping[str, TensorRecord],
    *,
    step: int = 10,
    slots: Sequence[str] = MOMENTS,
    groups: Sequence[Sequence[str]] | None = None,
    scalars: Sequence[str] = ("step",),
    slot_dtype: str = "F32",
    exact: bool = True,
) -> Checkpoint:
    """All units of one step, stored raw; drift as recorded is 0."""
    moving = [fqn for fqn, one in tensors.items() if one.kind == "trainable"]
    names = [
        (fqn, slot)
        for fqn, one in tensors.items()
        for slot in (SLOT_OF_KIND[one.kind], *(slots if fqn in moving else ()))
    ]
    layers = dict.fromkeys(one.layer for one in tensors.values())
    units = dict.fromkeys((tensors[fqn].layer, slot) for fqn, slot in names)
    state = {
        "param_groups": [{"params": list(group), "hyper": {}} for group in (groups or [moving])],
        "scalars": {fqn: dict.fromkeys(scalars, step) for fqn in moving},
        "slots": {fqn: list(slots) for fqn in moving},
    }
    return Checkpoint(
        origin=origin,
        framework="torch",
        step=step,
        tensors=tensors,
        layers=tuple(LayerRecord(name=name, block=name.startswith("layers.")) for name in layers),
        index=FragmentIndex(_extent(fqn, slot, tensors[fqn], slot_dtype) for fqn, slot in names),
        framework_state=state,
        facts={},
        run_states={},
        certificate=Certificate(
            store_id=f"id of {origin}",
            save=f"save-{step}",
            step=step,
            exact=exact,
            units=tuple(
                CertifiedUnit(
                    layer, slot, step, f"save-{step}", 0, "raw", 0.0, slot != "frozen", False, 100, source=origin
                )
                for layer, slot in units
            ),
            problems=(),
        ),
    )


def _extent(fqn: str, slot: str, tensor: TensorRecord, dtype: str) -> Extent:
    numel = 1
    for size in tensor.shape:
        numel *= size
    block = Block(LocalFiles(Path("/nowhere")), fqn, 0, 4 * numel, xxh3, "", f"{fqn}/{slot}")
    return Extent(fqn, slot, 0, numel, dtype, block, 0)
