"""What a layout has no use for is refused, never dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from merger.layouts import layout_for
from merger.layouts.base import Target
from store.errors import UsageError
from tests.support.described import described, tensor

SETTINGS: dict[str, Any] = {
    "zero_stage": 1,
    "world_size": 2,
    "dtype": "F32",
    "shard_bytes": 5 * 10**9,
    "files": Path("folder"),
}
USED = {
    ("native", "torch"): set(),
    ("native", "deepspeed"): {"zero_stage", "world_size"},
    ("torch", "deepspeed"): set(),
    ("deepspeed", "deepspeed"): {"zero_stage", "world_size"},
    ("universal", "deepspeed"): set(),
    ("hf", "torch"): {"dtype", "shard_bytes", "files"},
    ("dcp", "torch"): {"shard_bytes"},
    ("trainer", "torch"): {"world_size", "files"},
    ("trainer", "deepspeed"): {"zero_stage", "world_size", "files"},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("layout", "framework"), USED)
def test_a_setting_is_used_or_refused(layout: str, framework: str, setting: str) -> None:
    if framework == "deepspeed":
        pytest.importorskip("deepspeed")
    checkpoint = described({"w": tensor(2)}, framework=framework)
    target = Target(layout, **{setting: SETTINGS[setting]})
    if setting in USED[layout, framework]:
        layout_for(checkpoint, target)
        return
    option = {"shard_bytes": "--shard-size"}.get(setting, f"--{setting.replace('_', '-')}")
    written = {"native": framework}.get(layout, layout)
    with pytest.raises(UsageError, match=rf"^{option} is for layouts? .*'{written}'.*: leave it out"):
        layout_for(checkpoint, target)


def test_all_that_is_of_no_use_is_told_at_once() -> None:
    with pytest.raises(UsageError, match=r"^--zero-stage .*; --dtype .*"):
        layout_for(described({"w": tensor(2)}), Target("torch", zero_stage=1, dtype="F32"))
