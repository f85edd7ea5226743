"""The page on the store's format names every key, file, encoding and limit that the code has."""

from __future__ import annotations

import re

import pytest

from store import catalog, segment, session
from store.encoding import BF16_SCALED, ENCODINGS
from store.encoding.base import BLOCK, CHUNK
from store.encoding.stream import PACKING
from store.names import (
    JOURNAL,
    LATEST,
    LOCK,
    PROBE,
    STORE,
    TOP_LEVEL,
    SaveId,
    closed_path,
    epoch_path,
    manifest_path,
    part_path,
    payload_path,
    proven_path,
    segment_dir,
    suspect_path,
    weights_dir,
)
from store.schema import (
    ClosedRecord,
    Entry,
    EpochRecord,
    GroupRecord,
    IncarnationRecord,
    LayerRecord,
    ManifestRecord,
    PartRecord,
    ProvenRecord,
    Record,
    StateTensor,
    StoreRecord,
    SuspectRecord,
    TensorRecord,
    UnitRecord,
)
from tests.support.site import DOCS

PAGE = (DOCS / "store-format.md").read_text()
WORDS = set(re.findall(r"[\w*]+", " ".join(re.findall(r"`([^`]+)`", PAGE.replace("```", "")))))
RECORDS = [
    StoreRecord, EpochRecord, IncarnationRecord, ClosedRecord, ManifestRecord, LayerRecord, TensorRecord, GroupRecord,
    UnitRecord, PartRecord, Entry, StateTensor, ProvenRecord, SuspectRecord,
]  # fmt: skip
"""All that a reader needs; what a rank measured (MeasureRecord) is named as a whole."""


@pytest.mark.parametrize("record", RECORDS)
def test_every_key_is_named(record: type[Record]) -> None:
    assert set(record.__struct_fields__) - WORDS == set()


def test_every_file_is_named() -> None:
    save = SaveId(120, 3)
    paths = [
        STORE, LOCK, LATEST, PROBE, epoch_path(3), closed_path(3),
        part_path(save, 7), payload_path(save, 7), manifest_path(save), proven_path(save),
        suspect_path(save), f"{weights_dir(save)}/", f"{JOURNAL}/{segment_dir(SaveId(121, 3))}/rank-00000.*",
    ]  # fmt: skip
    listed = PAGE.partition("## Files")[2].partition("```text\n")[2].partition("```")[0]
    assert {line.split()[0] for line in listed.splitlines()} == set(paths)
    assert {path.partition("/")[0] for path in paths} == TOP_LEVEL


def test_every_encoding_is_decoded() -> None:
    table = PAGE.partition("## Decoding")[2].partition("## Unpacking")[0]
    assert set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == {*ENCODINGS, BF16_SCALED}
    assert f'`"{PACKING}"`' in PAGE


def test_numbers_are_those_of_the_code() -> None:
    assert CHUNK == 1 << 20 and "2²⁰ elements" in PAGE
    assert BLOCK == 64 and "⌈n/64⌉" in PAGE
    limits = {catalog._STORE_LIMIT, session._LIMIT, catalog._MARK_LIMIT}
    assert limits == {64 << 10} and "64 KiB (`STORE.json`, epochs, marks)" in PAGE
    assert catalog._MANIFEST_LIMIT == 64 << 20 and "64 MiB (manifests)" in PAGE
    assert segment.PART_LIMIT == 256 << 20 and "256 MiB (parts)" in PAGE
