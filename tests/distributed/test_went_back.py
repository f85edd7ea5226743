"""A job that DeepSpeed's own ``load_checkpoint`` takes back, and that ends at the step of a commit made before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize(
    ("stage", "back", "wait", "settings"),
    [(2, 3, True, {}), (3, 3, False, {}), (2, 3, False, {"journal": {"enabled": True}}), (2, 1, True, {})],
)
def test_its_last_step_is_saved(tmp_path: Path, stage: int, back: int, wait: bool, settings: dict[str, Any]) -> None:
    """back: by how many steps. wait: or the save is written while the older checkpoint is loaded."""
    pytest.importorskip("deepspeed")
    case = {"kind": "zero", "stage": stage, "precision": "bf16", "width": 12}
    done = torchrun("went_back.py", 2, {"case": case, "back": back, "wait": wait, "settings": settings}, tmp_path)
    assert done.code == 0, done.output[-6000:]
    for rank in range(2):
        told = done.one("ended", rank=rank)
        assert (told["step"], told["differs"], told["equal"]) == (2 + back, True, True)
