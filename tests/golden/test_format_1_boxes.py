"""Every release reads fragments that are boxes, and the run state of pipeline stages, as format 1 has them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from merger.sources.store import StoreSource
from store.catalog import open_catalog
from store.fragments import FragmentReader
from store.names import Box, Fragment, SaveId
from store.resolve import resolve
from store.storage.local import LocalFiles
from store.verify import verify
from tests.golden.make_format_1_boxes import SHAPES

GOLDEN = Path(__file__).parent / "store-format-1-boxes"
EXPECTED = json.loads(GOLDEN.with_name("store-format-1-boxes.expected.json").read_text())
SHAPE_OF = {
    f"{name}.{kind}": shape[: 1 + (kind == "weight")] for name, shape in SHAPES.items() for kind in ("weight", "bias")
}


def test_it_verifies_and_needs_a_reader_of_boxes() -> None:
    catalog = open_catalog(LocalFiles(GOLDEN))
    assert verify(catalog).ok
    manifest = catalog.manifest(SaveId(1, 1))
    assert manifest.reader == 4
    assert {unit.layer for unit in manifest.units if unit.boxes} == {"first"}


def test_every_value_in_any_region() -> None:
    files = LocalFiles(GOLDEN)
    index = resolve(open_catalog(files), SaveId(1, 1)).index
    assert {"/".join(name) for name in index.names()} == EXPECTED.keys()
    for name, values in EXPECTED.items():
        fqn, slot = name.split("/")
        shape, whole = SHAPE_OF[fqn], np.array(values, np.float32)
        wanted = {Fragment(fqn, slot, 0, whole.size): whole}
        if len(shape) == 2:
            columns = Box((1, 1), (shape[0] - 1, 2), shape)
            wanted[Fragment.of_box(fqn, slot, columns)] = whole.reshape(shape)[1:, 1:3].reshape(-1)
        for fragment, meant in wanted.items():
            target = np.empty(4 * fragment.numel, np.uint8)
            for copy in index.cover(fragment):
                chunks = FragmentReader(files, copy.source).chunks()
                copy.place(np.concatenate([chunk.view(np.uint8) for chunk in chunks]), target, 4)
            assert target.view(np.float32).tolist() == meant.tolist(), fragment


def test_the_stages_have_one_optimizer() -> None:
    state = StoreSource(GOLDEN).checkpoint(None, frozenset()).framework_state
    (group,) = state["param_groups"]
    assert group["params"] == [*SHAPE_OF]
    assert {fqn: float(kept["step"]) for fqn, kept in state["scalars"].items()} == dict.fromkeys(SHAPE_OF, 1.0)
