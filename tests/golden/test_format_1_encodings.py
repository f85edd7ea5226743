"""Every release decodes what was encoded, packed and stored as differences in format 1, to the bit."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors import safe_open

from store.catalog import Catalog, open_catalog
from store.certificate import certify
from store.encoding import CHUNK, ENCODINGS
from store.encoding.stream import PACKINGS
from store.names import SaveId, Unit, payload_path
from store.resolve import RejectedVersion, resolve
from store.retention import Retention, execute, plan_prune
from store.storage.local import LocalFiles
from store.verify import verify
from tests.golden.make_format_1_encodings import NUMEL, STORES, bits, names, value, values_of
from tests.support.entries import iter_chunks
from tests.support.error_bounds import error_bound
from tests.support.reference_encodings import encode_chunk

GOLDEN = Path(__file__).parent / "store-format-1-encodings"
SAVES = [(name, SaveId(step, 1)) for name, (steps, _) in STORES.items() for step in steps]


def catalog_of(name: str) -> Catalog:
    return open_catalog(LocalFiles(GOLDEN / name))


@pytest.mark.parametrize("name", STORES)
def test_it_verifies(name: str) -> None:
    report = verify(catalog_of(name))
    assert report.ok, report
    assert [commit.save.step for commit in report.commits] == list(STORES[name][0])[::-1]


def test_everything_is_there() -> None:
    """Each encoding, unpacked and packed, and as a difference to either; raw unpacked has a store of its own."""
    found: Counter[tuple[str, bool, str]] = Counter()
    for name, save in SAVES:
        for source in resolve(catalog_of(name), save).sources():
            base = "" if source.base is None else source.base.entry.packing or "unpacked"
            found[source.entry.encoding, source.entry.packing is not None, base] += 1
    assert {encoding for encoding, packed, _ in found if not packed} == set(ENCODINGS) - {"raw"}
    assert {encoding for encoding, packed, base in found if packed and not base} == set(ENCODINGS)
    assert {encoding for encoding, _, base in found if base} == set(ENCODINGS)
    assert {base for _, _, base in found} == {"", "unpacked", *PACKINGS}


@pytest.mark.parametrize(("name", "save"), SAVES, ids=str)
def test_every_bit(name: str, save: SaveId) -> None:
    """What is decoded is what was decoded then, and lies within the bound of what was encoded."""
    expected = json.loads((GOLDEN / f"{name}.expected.json").read_text())
    catalog = catalog_of(name)
    resolution = resolve(catalog, save)
    assert resolution.problems == ()
    seen = set()
    for source in resolution.sources():
        key = f"{save}/{source.fqn}/{source.slot}"
        found = values_of(LocalFiles(GOLDEN / name), source)
        assert bits(found) == expected[key], key
        meant = value(source.fqn, source.slot, save.step)
        encoding = ENCODINGS[source.entry.encoding]
        for got, wanted in zip(iter_chunks(found), iter_chunks(meant), strict=True):
            assert (np.abs(got.astype(np.float64) - wanted) <= error_bound(encoding, wanted)).all(), key
        seen.add((Unit(source.entry.layer, source.slot), source.fqn))
    assert seen == {(unit, fqn) for unit in STORES[name][1] for fqn in names(unit)}


@pytest.mark.parametrize(("name", "save"), SAVES, ids=str)
def test_the_same_values_encode_to_the_same_bytes(name: str, save: SaveId) -> None:
    """How they pack may change, what is packed may not."""
    for source in resolve(catalog_of(name), save).sources():
        state = xxhash.xxh3_128()
        for chunk in iter_chunks(value(source.fqn, source.slot, save.step)):
            state.update(encode_chunk(ENCODINGS[source.entry.encoding], chunk).tobytes())
        assert state.hexdigest() == (source.entry.encoded_xxh3_128 or source.entry.xxh3_128), source.fqn


def test_more_than_a_chunk_is_among_them() -> None:
    assert NUMEL["long.weight"] > CHUNK == 1 << 20
    entries = [source.entry for source in resolve(catalog_of("packed"), SaveId(10, 1)).sources()]
    assert max(entry.numel for entry in entries) == (1 << 20) + 3


def test_the_library_opens_its_payloads() -> None:
    with safe_open(GOLDEN / "bf16" / payload_path(SaveId(10, 1), 0), framework="np") as payload:
        assert payload.get_slice("block.weight/fp32/0").get_dtype() == "BF16"
    for name, save in SAVES:
        with safe_open(GOLDEN / name / payload_path(save, 0), framework="np") as payload:
            for source in resolve(catalog_of(name), save).sources():
                found = payload.get_slice(f"{source.fqn}/{source.slot}/0")
                assert found.get_shape() == [source.entry.nbytes // (2 if found.get_dtype() == "BF16" else 1)]


def test_its_certificates_say_that_it_is_not_exact() -> None:
    for name, save in SAVES:
        certificate = certify(resolve(catalog_of(name), save))
        assert (certificate.exact, certificate.max_staleness, certificate.max_drift) == (False, 0, 0.001)


def test_a_prune_keeps_what_the_newest_rests_on(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "differences", tmp_path / "store")
    files = LocalFiles(tmp_path / "store")
    plan = plan_prune(open_catalog(files), Retention(keep_last=1, log_spaced=False))
    assert (plan.keep, plan.groups) == ((SaveId(30, 1),), (SaveId(20, 1),))
    execute(files, plan)
    assert verify(open_catalog(files)).ok


def test_a_damaged_difference_falls_back() -> None:
    unit = Unit("block", "fp32")
    resolution = resolve(catalog_of("differences"), SaveId(30, 1), {RejectedVersion(SaveId(30, 1), unit)})
    assert {version.record.unit: version.save.step for version in resolution.fallbacks} == {unit: 20}
