"""Writes ``store-format-1-encodings``: a store for each lossy encoding, one that is packed, one with differences.

    python tests/golden/make_format_1_encodings.py DIRECTORY

Stores that are there already stay as they are: those of earlier releases are not written again. Beside each store lies
``NAME.expected.json``: the bits that a reader must get (:func:`bits`). Before encoding, values follow from
:func:`value`.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store.catalog import open_catalog, open_or_create
from store.commit import Expected, commit, hint_latest, wait_for_group
from store.encoding import CHUNK, ENCODINGS
from store.encoding.base import Bytes
from store.encoding.stream import EncodedEntry, Packing
from store.fragments import FragmentReader, Source
from store.names import SaveId, Unit
from store.resolve import resolve
from store.schema import GroupRecord, LayerRecord, ManifestRecord, TensorRecord, UnitRecord
from store.segment import SegmentDraft, StagedFragment, write_segment
from store.session import claim_epoch
from store.storage.local import LocalFiles
from tests.support.entries import iter_chunks
from tests.support.reference_encodings import encode_chunk

PLAN = "0123456789abcdef0123456789abcdef"
NUMEL = {"block.weight": 130, "block.bias": 1, "long.weight": CHUNK + 3, "grid.weight": 3001}
"""fqn -> elements: two blocks and a rest; one; one chunk and a rest, of which nearly all are zero; powers of two."""


@dataclass(frozen=True)
class Kept:
    """How a unit is stored. packed: at the first save; at later ones, where there are any, it is a difference."""

    encoding: str
    packed: bool = False


STORES: dict[str, tuple[tuple[int, ...], dict[Unit, Kept]]] = {
    "bf16": ((10,), {Unit("block", "fp32"): Kept("bf16")}),
    "bf16-int8": ((10,), {Unit("block", "fp32"): Kept("bf16+int8")}),
    "int8-block": ((10,), {Unit("block", "exp_avg"): Kept("int8-block")}),
    "int8-sqrt-block": ((10,), {Unit("block", "exp_avg_sq"): Kept("int8-sqrt-block")}),
    "packed": (
        (10,),
        {
            Unit("block", "fp32"): Kept("bf16+int8", True),
            Unit("block", "exp_avg"): Kept("int8-block", True),
            Unit("block", "exp_avg_sq"): Kept("int8-sqrt-block", True),
            Unit("long", "fp32"): Kept("raw", True),
            Unit("long", "exp_avg"): Kept("bf16", True),
        },
    ),
    "differences": (
        (10, 20, 30),
        {
            Unit("block", "fp32"): Kept("bf16", True),
            Unit("block", "exp_avg"): Kept("int8-block"),
            Unit("block", "exp_avg_sq"): Kept("int8-sqrt-block", True),
            Unit("long", "fp32"): Kept("raw", True),
            Unit("long", "exp_avg"): Kept("bf16+int8", True),
        },
    ),
    "chain": (
        (10, 20, 30, 40),
        {
            Unit("block", "fp32"): Kept("int16-shared-exponent", True),
            Unit("block", "exp_avg"): Kept("int8-shared-exponent-128"),
            Unit("grid", "exp_avg_sq"): Kept("int8-log2", True),
            Unit("long", "fp32"): Kept("raw", True),
        },
    ),
    "int8-log2": (
        (10, 20),
        {Unit("block", "exp_avg_sq"): Kept("int8-log2"), Unit("long", "exp_avg_sq"): Kept("int8-log2", True)},
    ),
    "int8-shared-exponent": (
        (10, 20),
        {
            Unit("block", "exp_avg"): Kept("int8-shared-exponent"),
            Unit("long", "exp_avg"): Kept("int8-shared-exponent", True),
        },
    ),
    "int8-shared-exponent-128": (
        (10, 20),
        {
            Unit("block", "exp_avg"): Kept("int8-shared-exponent-128"),
            Unit("long", "exp_avg"): Kept("int8-shared-exponent-128", True),
        },
    ),
    "int16-shared-exponent": (
        (10, 20),
        {
            Unit("block", "fp32"): Kept("int16-shared-exponent"),
            Unit("grid", "fp32"): Kept("int16-shared-exponent"),
            Unit("long", "fp32"): Kept("int16-shared-exponent", True),
        },
    ),
    "split-planes": (
        (10, 20),
        {Unit("grid", "fp32"): Kept("bf16", True), Unit("grid", "exp_avg_sq"): Kept("int8-log2", True)},
    ),
    "sparse": ((10, 20), {Unit("long", "fp32"): Kept("raw", True), Unit("long", "exp_avg"): Kept("bf16", True)}),
}
"""Directory -> (steps saved, units)."""


def value(fqn: str, slot: str, step: int) -> NDArray[np.float32]:
    """The flattened tensor before it is encoded. Integer arithmetic up to the last step, so it is the same anywhere."""
    numel = NUMEL[fqn]
    if fqn.startswith("long"):
        found = np.zeros(numel, np.float32)
        found[[0, CHUNK - 1, CHUNK, CHUNK + 2]] = [1, step, -step / 16, 0.1]
        return np.abs(found) if slot == "exp_avg_sq" else found
    if fqn.startswith("grid"):  # most of them move by less than an octave, a few by far more
        places = np.arange(numel) * 40503 % 64
        moved = np.where(places == 5, step, np.where(places < 20, places % 3 * step // 20, 0))
        return np.ldexp(np.float32(1), places - 60 + moved).astype(np.float32)
    words = np.arange(7, 7 + numel, dtype=np.uint64) * np.uint64(2654435761 + len(slot)) % np.uint64(1 << 32)
    moved = np.where(np.arange(numel) % 5 == 0, step, 0).astype(np.uint64) * np.uint64(40503)
    signed = ((words + moved) % np.uint64(1 << 32)).astype(np.int64) - (1 << 31)
    found = (signed / (1 << 34)).astype(np.float32)
    if numel > 100:
        found[64:67] = [0.0, -0.0, 2.0**-130]
    return np.abs(found) if slot == "exp_avg_sq" else found


def names(unit: Unit) -> list[str]:
    """The tensors of a unit."""
    return [fqn for fqn in NUMEL if fqn.startswith(unit.layer)]


def write(root: Path, steps: tuple[int, ...], units: Mapping[Unit, Kept]) -> None:
    """Each save holds all units; what follows the first is the difference to it, or in ``chain`` to the one before."""
    files = LocalFiles(root)
    store_id = open_or_create(files).store_id
    epoch = claim_epoch(files, store_id).epoch
    saves = [SaveId(step, epoch) for step in steps]
    groups: dict[str, GroupRecord] = {}
    for number, save in enumerate(saves):
        bases = () if save == saves[0] else tuple(saves[:number][::-1]) if root.name == "chain" else (saves[0],)
        staged = [_staged(unit, kept, fqn, save, bases) for unit, kept in units.items() for fqn in names(unit)]
        write_segment(files, SegmentDraft(store_id, save, 0, 1, PLAN, staged, None, (), {}))
        group = wait_for_group(files, Expected(store_id, save, 1, PLAN), timeout=0)
        groups[save.name] = group.record
        manifest = ManifestRecord(
            store_id=store_id, step=save.step, epoch=epoch, commits=saves.index(save) + 1, world_size=1,
            framework="golden", policy="full", created="2025-01-01T00:00:00+00:00",
            previous=None if save == saves[0] else saves[saves.index(save) - 1].name, bytes_avoided=0,
            layers=tuple(LayerRecord(name=layer, block=True) for layer in dict.fromkeys(u.layer for u in units)),
            tensors={fqn: TensorRecord(layer=unit.layer, shape=(NUMEL[fqn],), dtype="F32", kind="trainable")
                     for unit in units for fqn in names(unit)},
            groups={one.name: groups[one.name] for one in (save, *bases)},
            units=tuple(_record(unit, kept, save, bases, group.parts[0].entries) for unit, kept in units.items()),
        )  # fmt: skip
        commit(files, manifest)
        hint_latest(files, save)
    (root.parent / f"{root.name}.expected.json").write_text(json.dumps(dict(_read(files)), indent=1) + "\n")


def _staged(unit: Unit, kept: Kept, fqn: str, save: SaveId, bases: tuple[SaveId, ...]) -> StagedFragment:
    encoding, numel = ENCODINGS[kept.encoding], NUMEL[fqn]

    def chunks(step: int = save.step) -> list[Bytes]:
        return [encode_chunk(encoding, chunk) for chunk in iter_chunks(value(fqn, unit.slot, step))]

    packing = Packing(3) if kept.packed else None
    if bases:
        packing = Packing(3, chunks(bases[0].step))
    data = EncodedEntry(encoding, numel, "F32", chunks, packing, tuple(base.name for base in bases))
    return StagedFragment(unit.layer, unit.slot, fqn, 0, numel, "F32", kept.encoding, data)


def _record(unit: Unit, kept: Kept, save: SaveId, bases: tuple[SaveId, ...], entries: tuple[Any, ...]) -> UnitRecord:
    return UnitRecord(
        layer=unit.layer, slot=unit.slot, save=save.name, encoding=kept.encoding,
        numel=sum(NUMEL[fqn] for fqn in names(unit)), drift=0.001, staleness=0, moving=True, error=0.001,
        nbytes=sum(entry.nbytes for entry in entries if entry.unit == unit),
        bases=tuple(base.name for base in bases),
    )  # fmt: skip


def bits(found: NDArray[np.float32]) -> str:
    """All bytes of a short tensor, little-endian; of a long one, the words that are not zero, by position."""
    if found.size < CHUNK:
        return found.astype("<f4").tobytes().hex()
    words = found.view(np.uint32)
    return " ".join(f"{at}:{words[at]:08x}" for at in np.flatnonzero(words))


def values_of(files: LocalFiles, source: Source) -> NDArray[np.float32]:
    """What a reader gets."""
    return np.concatenate([chunk.view(np.float32) for chunk in FragmentReader(files, source).chunks()])


def _read(files: LocalFiles) -> Iterator[tuple[str, str]]:
    catalog = open_catalog(files)
    for save in sorted(catalog.saves()):
        for source in resolve(catalog, save).sources():
            yield f"{save}/{source.fqn}/{source.slot}", bits(values_of(files, source))


if __name__ == "__main__":
    socket.gethostname = lambda: "golden"
    for name, (steps, units) in STORES.items():
        if not (Path(sys.argv[1]) / name).exists():
            write(Path(sys.argv[1]) / name, steps, units)
