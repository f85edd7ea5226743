"""The notebook that reads stores with nothing of ours gets what was written, to the bit, of every one that is kept."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support.notebooks import NOTEBOOKS, cells, executed

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
ENCODED = sorted(path.name for path in (GOLDEN / "store-format-1-encodings").iterdir() if path.is_dir())
OURS = {"monitor", "store", "merger", "policies", "deploy", "torch", "safetensors", "pydantic"}

Names = dict[str, Any]


@pytest.fixture(scope="module")
def names() -> Names:
    """What the notebook leaves behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(NOTEBOOKS)
        found = executed("reading_a_store")
        found["STORE"] = found["STORE"].resolve()
    return found


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """How the store of the notebook came about."""
    spec = importlib.util.spec_from_file_location("golden_format_1", GOLDEN / "make_format_1.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_nothing_of_ours_is_imported() -> None:
    source = "\n".join("".join(cell["source"]) for cell in cells(NOTEBOOKS / "reading_a_store.ipynb"))
    words = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert words == {"base64", "json", "struct", "pathlib", "numpy", "xxhash", "zstandard"}
    assert not words & OURS


def test_the_composite_is_what_was_written(names: Names, made: ModuleType) -> None:
    manifest, state = names["manifest"], names["state"]
    saves = {(unit["layer"], unit["slot"]): made.SaveId.parse(unit["save"]) for unit in manifest["units"]}
    assert len(set(saves.values())) == 2  # a composite
    assert {key[0] for key in state} == set(made.TENSORS)
    for (fqn, slot), found in state.items():
        record = made.TENSORS[fqn]
        expected = made.value(fqn, slot, saves[record.layer, slot])
        if record.dtype == "BF16":  # as its bits there
            expected = (expected.astype(np.uint32) << 16).view(np.float32)
        assert found.shape == record.shape
        assert found.reshape(-1).tobytes() == expected.tobytes(), (fqn, slot)


def test_the_run_state_is_what_was_written(names: Names, made: ModuleType) -> None:
    for rank, part in enumerate(names["parts"]):
        found = names["run_state_of"](names["STORE"], part)
        expected = made.run_state(made.SaveId(part["step"], part["epoch"]), rank)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            same = math.isnan(found[key]) if key == "nan" else np.array_equal(found[key], value)
            assert same or found[key] == value, key


@pytest.mark.parametrize("name", ENCODED)
def test_every_encoding_packing_and_difference(names: Names, name: str) -> None:
    root = GOLDEN / "store-format-1-encodings" / name
    expected = json.loads((root.parent / f"{name}.expected.json").read_text())
    seen = set()
    for path in (root / "manifests").glob("*.json"):
        for (fqn, slot), values in names["state_of"](root, names["manifest_at"](root, path)).items():
            key = f"{path.stem}/{fqn}/{slot}"
            assert bits(values) == expected[key], key
            seen.add(key)
    assert seen == set(expected)


def bits(values: Any) -> str:
    """As ``tests/golden/make_format_1_encodings.py`` writes them."""
    if values.size < 1 << 20:
        return str(values.astype("<f4").tobytes().hex())
    words = values.view(np.uint32)
    return " ".join(f"{at}:{words[at]:08x}" for at in np.flatnonzero(words))


@pytest.mark.parametrize("which", ["STORE.json", "manifests", "part", "payload"])
def test_a_flipped_byte_is_found(names: Names, tmp_path: Path, which: str) -> None:
    root = shutil.copytree(names["STORE"], tmp_path / "store")
    group = root / "segments" / names["newest"]
    path = {
        "STORE.json": root / "STORE.json",
        "manifests": root / "manifests" / f"{names['newest']}.json",
        "part": group / "rank-00001.json",
        "payload": group / "rank-00000.safetensors",
    }[which]
    data = bytearray(path.read_bytes())
    at = names["parts"][0]["header_bytes"] if which == "payload" else len(data) // 3
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises((ValueError, AssertionError)):
        names["state_of"](root, names["manifest_at"](root, root / "manifests" / f"{names['newest']}.json"))
