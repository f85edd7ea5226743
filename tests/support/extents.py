"""Tensors in blocks of real files, as any source may lay them out, and transfers of them into output files."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from merger.checkpoint import Placement, PlannedTensor
from merger.io.blocks import Block, Crc32, Damage, Extent, xxh3
from merger.io.output_file import Hole
from merger.io.transfer import TransferResult, check_hole, checksums, plan_transfer, transfer
from merger.tensors import dtype_name, memory_of
from store.fragments import FragmentIndex
from store.names import Fragment, SaveId, Unit
from store.resolve import RejectedVersion
from store.storage.local import LocalFiles

SLOT = "fp32"

Files = Sequence[Sequence[tuple[int, PlannedTensor]]]
"""By file: planned tensors and their offsets."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8)


def values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values that every dtype here can hold differently, from a seed."""
    made = torch.randint(-100, 100, (numel,), generator=torch.Generator().manual_seed(seed))
    return (made % 2).to(dtype) if dtype == torch.bool else (made.abs() if dtype == torch.uint8 else made).to(dtype)


@dataclass
class Spread:
    """Files with tensors in them, below ``root``. ``flaw`` makes the next blocks ones that something may stand for."""

    root: Path
    extents: list[Extent] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def block(
        self,
        pieces: Sequence[tuple[str, int, torch.Tensor]],
        *,
        gap: int = 0,
        before: int = 0,
        crc: bool = False,
        flaw: Damage | None = None,
    ) -> Block:
        """A file with one block: (fqn, first element, elements) behind one another, ``gap`` bytes before each."""
        path = f"source-{len(self.blocks)}"
        data, places = bytearray(), []
        for fqn, start, elements in pieces:
            data += b"\xaa" * gap
            places.append((fqn, start, elements, len(data)))
            data += bytes(memory_of(elements.contiguous()))
        (self.root / path).write_bytes(b"\xbb" * before + bytes(data) + b"\xcc" * 7)
        digest = f"{zlib.crc32(data):08x}" if crc else xxhash.xxh3_128_hexdigest(bytes(data))
        made = Block(
            LocalFiles(self.root), path, before, len(data), Crc32 if crc else xxh3, digest, f"block {path}", flaw
        )
        self.blocks.append(made)
        for fqn, start, elements, offset in places:
            stop = start + elements.numel()
            self.extents.append(Extent(fqn, SLOT, start, stop, dtype_name(elements.dtype), made, offset))
        return made

    def tensor(self, fqn: str, elements: torch.Tensor, **how: object) -> Block:
        """A whole tensor in a block of its own."""
        self.tensors[fqn] = elements
        return self.block([(fqn, 0, elements)], **how)  # type: ignore[arg-type]

    @property
    def index(self) -> FragmentIndex[Extent]:
        return FragmentIndex(self.extents)

    def damage(self, block: Block, position: int) -> None:
        """Flip a byte of a block in its file."""
        path = self.root / block.path
        data = bytearray(path.read_bytes())
        data[block.offset + position] ^= 0x40
        path.write_bytes(data)

    def expected(self, stored: PlannedTensor) -> bytes:
        """The bytes that a planned tensor should get."""
        out = torch.zeros(stored.numel, dtype=stored.dtype)
        for placed in stored.placed:
            piece = self.tensors[placed.fragment.fqn].reshape(-1)[placed.fragment.start : placed.fragment.stop]
            out[placed.offset : placed.offset + placed.fragment.numel] = piece.to(stored.dtype)
        return bytes(memory_of(out))


def wanted(numel: int, dtype: torch.dtype, *pieces: tuple[str, int, int, int]) -> PlannedTensor:
    """A flat planned tensor: (fqn, first element, number, offset in it)."""
    return PlannedTensor(
        (numel,), dtype, tuple(Placement(Fragment(fqn, SLOT, start, count), at) for fqn, start, count, at in pieces)
    )


def all_of(fqn: str, elements: torch.Tensor, dtype: torch.dtype | None = None) -> PlannedTensor:
    """The whole tensor, flat."""
    return wanted(elements.numel(), dtype or elements.dtype, (fqn, 0, elements.numel(), 0))


def some_flaw(root: Path) -> Damage:
    """A version that something could stand in for."""
    return Damage(root, RejectedVersion(SaveId(10, 1), Unit("layers.0", SLOT)))


def run_transfer(
    spread: Spread, files: Files, *, workers: int = 1, reported: list[int] | None = None
) -> tuple[list[Path], TransferResult]:
    """Write empty files, transfer the planned tensors into them, and return the files and the result."""
    paths, holes = [], []
    for number, content in enumerate(files):
        path = spread.root / f"out-{number}"
        path.write_bytes(bytes(max((offset + stored.nbytes for offset, stored in content), default=0)))
        paths.append(path)
        holes += [(number, Hole(offset, stored)) for offset, stored in content]
    plan = plan_transfer(spread.index, holes)
    moved = transfer(plan, paths, workers, (reported if reported is not None else []).append)
    if reported is not None:
        assert sum(reported) == plan.bytes_to_read
    return paths, moved


def require_transferred(spread: Spread, files: Files, paths: Sequence[Path], moved: TransferResult) -> None:
    """Check the bytes of every planned tensor in the files, and their checksums."""
    assert not moved.flaws
    for number, content in enumerate(files):
        data = paths[number].read_bytes()
        holes = [Hole(offset, stored) for offset, stored in content]
        crcs = checksums(moved.pieces.get(number, ()), holes)
        for hole in holes:
            found = data[hole.offset : hole.offset + hole.stored.nbytes]
            assert found == spread.expected(hole.stored)
            assert crcs[hole.offset] == zlib.crc32(found)
            check_hole(paths[number], hole, crcs[hole.offset])
