"""Blocks and files that cannot be read: collected as flaws if an older version can replace them, errors otherwise."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from merger.io.blocks import READ, Block, Extent
from store.errors import DamagedError, StorageError
from tests.support.extents import Spread, all_of, require_transferred, run_transfer, some_flaw, values


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("place", [0, READ + 5, 2 * READ + 99])
def test_damage_is_an_error_if_no_older_version_can_replace_the_block(spread: Spread, place: int, workers: int) -> None:
    elements = values(READ // 4 * 2 + 100, torch.float32, 6)
    block = spread.tensor("a", elements, before=50)
    spread.damage(block, place)
    with pytest.raises(DamagedError, match=rf"bytes 50 to {50 + block.nbytes} of source-0"):
        run_transfer(spread, [[(0, all_of("a", elements))]], workers=workers)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("place", [0, 2 * READ + 99])
def test_damage_is_collected_if_an_older_version_can_replace_the_block(
    spread: Spread, place: int, workers: int, crc: bool
) -> None:
    elements = values(READ // 4 * 2 + 100, torch.float32, 7)
    flaw = some_flaw(spread.root)
    bad = spread.tensor("bad", elements, crc=crc, flaw=flaw)
    others = {f"good{i}": values(1000 + i, torch.float32, i) for i in range(6)}
    for fqn, tensor in others.items():
        spread.tensor(fqn, tensor, crc=crc)
    spread.damage(bad, place)
    content = [[(0, all_of("bad", elements))], *([(0, all_of(fqn, tensor))] for fqn, tensor in others.items())]
    paths, moved = run_transfer(spread, content, workers=workers, reported=[])
    (problem,) = moved.flaws.values()
    assert moved.flaws.keys() == {flaw}
    assert "source-0 do not match their checksum" in problem
    assert 0 not in moved.pieces  # damaged bytes are not counted as written
    moved.flaws.clear()
    require_transferred(spread, [[], *content[1:]], paths, moved)


def test_all_flaws_are_collected(spread: Spread, tmp_path: Path) -> None:
    flaws = [some_flaw(tmp_path / str(i)) for i in range(5)]
    for i, flaw in enumerate(flaws):
        block = spread.tensor(f"t{i}", values(10, torch.float32, i), flaw=flaw)
        spread.damage(block, i)
    _, moved = run_transfer(spread, [[(0, all_of(f"t{i}", spread.tensors[f"t{i}"])) for i in range(5)][:1]])
    assert moved.flaws.keys() == {flaws[0]}  # blocks outside the plan are not read
    content = [[(100 * i, all_of(f"t{i}", spread.tensors[f"t{i}"])) for i in range(5)]]
    assert run_transfer(spread, content, workers=4)[1].flaws.keys() == set(flaws)


@pytest.mark.parametrize("with_flaw", [False, True])
def test_a_source_file_that_is_too_short(spread: Spread, with_flaw: bool) -> None:
    elements = values(100, torch.float32, 8)
    block = spread.tensor("a", elements, flaw=some_flaw(spread.root) if with_flaw else None)
    os.truncate(spread.root / block.path, 200)
    content = [[(0, all_of("a", elements))]]
    if with_flaw:
        assert "source-0 ends at byte 200" in next(iter(run_transfer(spread, content)[1].flaws.values()))
    else:
        with pytest.raises(DamagedError, match=r"source-0.* 200"):
            run_transfer(spread, content)


def test_a_missing_source_file_is_named(spread: Spread) -> None:
    elements = values(100, torch.float32, 8)
    block = spread.tensor("a", elements)
    (spread.root / block.path).unlink()
    with pytest.raises(StorageError, match="source-0"):
        run_transfer(spread, [[(0, all_of("a", elements))]])


class FailingFiles:
    """Raises a plain OSError when read."""

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("with_flaw", [False, True])
def test_an_os_error_while_reading_names_the_source(spread: Spread, with_flaw: bool) -> None:
    elements = values(10, torch.float32, 8)
    block = spread.tensor("a", elements, flaw=some_flaw(spread.root) if with_flaw else None)
    spread.extents = [replace(spread.extents[0], block=replace(block, files=FailingFiles()))]
    content = [[(0, all_of("a", elements))]]
    if with_flaw:
        problems = run_transfer(spread, content)[1].flaws.values()
        assert "cannot read source-0: Input/output error" in next(iter(problems))
    else:
        with pytest.raises(StorageError, match="block source-0: cannot read source-0"):
            run_transfer(spread, content)


def test_two_blocks_with_the_same_bytes_are_checked_separately(spread: Spread) -> None:
    """Two blocks may name the same bytes: each is read and checked against its own hash."""
    elements = values(10, torch.float32, 1)
    one = spread.tensor("a", elements)
    other = Block(one.files, one.path, one.offset, one.nbytes, one.checksum, "0" * 32, "the other")
    spread.extents.append(Extent("b", "fp32", 0, 10, "F32", other, 0))
    spread.tensors["b"] = elements
    require_transferred(spread, [[(0, all_of("a", elements))]], *run_transfer(spread, [[(0, all_of("a", elements))]]))
    with pytest.raises(DamagedError, match="the other"):
        run_transfer(spread, [[(0, all_of("b", elements))]])
