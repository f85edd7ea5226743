"""Values that must not become infinite in another dtype: found while they are moved, and told by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import merger.io.blocks
from merger.io.output_file import Hole
from merger.io.transfer import plan_transfer, transfer
from store.errors import UsageError
from tests.support.extents import Spread, all_of, some_flaw, values


def moved(spread: Spread, elements: torch.Tensor, target: torch.dtype, *, stays_finite: bool = True) -> torch.Tensor:
    """What the file holds after a transfer in small chunks."""
    stored = replace(all_of("a", elements, target), stays_finite=stays_finite)
    out = spread.root / "out"
    out.write_bytes(bytes(stored.nbytes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merger.io.blocks, "READ", 64)
        found = transfer(plan_transfer(spread.index, [(0, Hole(0, stored))]), [out], 2, lambda _: None)
    assert bool(found.flaws) != bool(found.pieces)
    return torch.frombuffer(bytearray(out.read_bytes()), dtype=target)


@pytest.mark.parametrize(
    ("source", "target", "value", "ways"),
    [
        (torch.float32, torch.float16, 65520.0, "name --dtype bfloat16 or float32"),
        (torch.bfloat16, torch.float16, -1e30, "name --dtype bfloat16 or float32"),
        (torch.float32, torch.bfloat16, 3.4e38, "name --dtype float32"),
        (torch.float64, torch.float32, 1e300, "leave --dtype out"),
        (torch.float32, torch.float8_e5m2, 1e6, "name --dtype float16 or bfloat16 or float32"),
    ],
)
@pytest.mark.parametrize("place", [0, 20, 99])
def test_a_value_too_large(
    tmp_path: Path, source: torch.dtype, target: torch.dtype, value: float, ways: str, place: int
) -> None:
    spread, elements = Spread(tmp_path), values(100, source, 1).nan_to_num(0, 1, -1).clamp(-1, 1)
    elements[place] = value
    spread.tensor("a", elements)
    with pytest.raises(UsageError, match=rf"^a holds .*e?\+?.*, which {str(target)[6:]} cannot .*: {ways}$"):
        moved(spread, elements, target)
    assert not moved(spread, elements, target, stays_finite=False)[place].float().isfinite()


def test_what_was_not_finite_before_and_the_largest_that_fits_pass(tmp_path: Path) -> None:
    spread = Spread(tmp_path)
    elements = torch.tensor([torch.inf, -torch.inf, torch.nan, 65504.0, 65519.0, -65504.0])
    spread.tensor("a", elements)
    assert moved(spread, elements, torch.float16).tolist()[3:] == [65504.0, 65504.0, -65504.0]


def test_bytes_that_rotted_are_damage_and_not_values(tmp_path: Path) -> None:
    """An older version can stand in for damage, so what damage looks like is not told."""
    spread, elements = Spread(tmp_path), torch.full((100,), 2.0)
    flaw = some_flaw(tmp_path)
    block = spread.tensor("a", elements, flaw=flaw)
    (data := bytearray((tmp_path / block.path).read_bytes()))[block.offset + 3] = 0x7E
    (tmp_path / block.path).write_bytes(data)
    stored = replace(all_of("a", elements, torch.float16), stays_finite=True)
    (tmp_path / "out").write_bytes(bytes(stored.nbytes))
    found = transfer(plan_transfer(spread.index, [(0, Hole(0, stored))]), [tmp_path / "out"], 1, lambda _: None)
    assert found.flaws.keys() == {flaw}
