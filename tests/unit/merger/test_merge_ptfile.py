from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from pathlib import Path

import pytest
import torch

from merger.ptfile import fingerprint, read_pt, write_pt
from store.errors import MergeError, StorageError


class Colour(Enum):
    RED = 1
    BLUE = 2


class Thing:
    def __init__(self, size: int) -> None:
        self.size = size


VALUE = {
    "tensors": OrderedDict(a=torch.arange(6.0).view(2, 3), b=torch.zeros(0, dtype=torch.bfloat16), c=torch.tensor(3)),
    "plain": [1, 2.5, None, True, "x", b"y", (1, 2), {3}, float("nan"), torch.Size([2, 3]), torch.float32],
    5: Colour.RED,
    "thing": Thing(4),
}


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    assert write_pt(path, lambda: VALUE, (Colour, Thing)) == path.stat().st_size
    found = read_pt(path, (Colour, Thing))
    assert fingerprint(found) == fingerprint(VALUE)
    assert found["thing"].size == 4 and found[5] is Colour.RED


def test_a_class_that_is_not_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="cannot be read back"):
        write_pt(tmp_path / "x.pt", lambda: VALUE, (Colour,))


def test_a_name_that_is_taken_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_text("mine")
    with pytest.raises(StorageError, match="cannot write"):
        write_pt(tmp_path / "x.pt", lambda: VALUE, (Colour, Thing))
    assert (tmp_path / "x.pt").read_text() == "mine"


@pytest.mark.parametrize(
    "other",
    [
        {**VALUE, 5: Colour.BLUE},
        {**VALUE, "thing": Thing(5)},
        {**VALUE, "plain": [*VALUE["plain"][:-1], torch.float64]},  # type: ignore[index]
        {**VALUE, "tensors": {**VALUE["tensors"], "c": torch.tensor(3.0)}},  # type: ignore[dict-item]
        {**VALUE, "tensors": OrderedDict(VALUE["tensors"], a=torch.arange(6.0).view(3, 2))},  # type: ignore[call-overload]
        {**VALUE, "tensors": OrderedDict(VALUE["tensors"], c=torch.tensor(4))},  # type: ignore[call-overload]
        {key: value for key, value in VALUE.items() if key != 5},
    ],
)
def test_every_difference_shows(other: object) -> None:
    assert fingerprint(other) != fingerprint(VALUE)
