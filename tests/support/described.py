"""Checkpoints that are described and hold no bytes: enough for a layout, which reads none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merger.checkpoint import Checkpoint, RankState
from merger.io.blocks import Extent
from store.certificate import Certificate
from store.fragments import FragmentIndex
from store.schema import LayerRecord, TensorRecord


def tensor(*shape: int, dtype: str = "BF16", kind: str = "trainable", aliases: tuple[str, ...] = ()) -> TensorRecord:
    """One parameter or buffer."""
    return TensorRecord(layer="all", shape=shape, dtype=dtype, kind=kind, aliases=aliases)


def described(
    tensors: Mapping[str, TensorRecord],
    *,
    state: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    files: Path | None = None,
    framework: str = "torch",
    step: int = 10,
    run_states: Mapping[int, RankState] | None = None,
) -> Checkpoint:
    """A checkpoint of these tensors. state: its framework state."""
    empty: FragmentIndex[Extent] = FragmentIndex([])
    return Checkpoint(
        origin="a described checkpoint",
        framework=framework,
        step=step,
        tensors=tensors,
        layers=(LayerRecord(name="all", block=False),),
        index=empty,
        framework_state=state or {"param_groups": [], "scalars": {}, "slots": {}},
        facts=facts or {},
        run_states=run_states or {},
        certificate=Certificate("s", "00000010-000001", step, exact=True, units=(), problems=()),
        files=files,
    )
