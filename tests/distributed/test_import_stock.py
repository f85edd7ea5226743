"""Every kind of checkpoint that stock DeepSpeed writes here, imported: what a merge makes of the store is, to the last
bit, what it makes of the checkpoint itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from source_cases import ADAPTERS, CASES

from merger.checkpoint import Checkpoint
from merger.import_checkpoint import import_checkpoint, plan_import
from merger.io.output_dir import CERTIFICATE
from merger.merge import merge
from merger.sources import open_source
from store.catalog import open_catalog
from store.errors import UsageError
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.foreign import directory_differences, train_stock

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EVERY = (*CASES, *ADAPTERS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("deepspeed")
    directory = tmp_path_factory.mktemp("foreign")
    train_stock(directory, 2, EVERY)
    return directory


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_checkpoint_without_its_frozen_parameters_is_not_imported_as_exact(
    trained: Path, tmp_path: Path, case: str
) -> None:
    with pytest.raises(UsageError, match=r"not exact.*without its frozen parameters"):
        plan_import(trained / case / "saved")


@pytest.mark.parametrize("case", CASES)
def test_a_merge_of_the_store_is_a_merge_of_the_checkpoint(trained: Path, tmp_path: Path, case: str) -> None:
    saved = trained / case / "saved"
    found = import_checkpoint(plan_import(saved), tmp_path / "store")
    assert found.certificate.as_found and found.save.step == 3
    assert verify(open_catalog(LocalFiles(tmp_path / "store"))).ok
    direct, through = merge(saved, tmp_path / "direct"), merge(tmp_path / "store", tmp_path / "through")
    assert (direct.tag, direct.notes) == (through.tag, through.notes)
    (direct.out / CERTIFICATE).unlink()  # each names its own source
    assert directory_differences(direct.out, through.out) == []


@pytest.mark.parametrize("case", ["zero1-bf16", "zero3-fp32"])
def test_what_is_not_tensors(trained: Path, tmp_path: Path, case: str) -> None:
    saved = trained / case / "saved"
    import_checkpoint(plan_import(saved, "global_step2"), tmp_path / "store")
    before = open_source(saved).checkpoint(2, frozenset())
    after = open_source(tmp_path / "store").checkpoint(None, frozenset())
    assert (before.step, before.tensors, before.layers) == (after.step, after.tensors, after.layers)
    assert before.client_state == after.client_state == {"mine": {"list": [1, 2.5, "three"]}}
    assert _plain(before.framework_state) == _plain(after.framework_state)
    assert units(before) == units(after)


def units(checkpoint: Checkpoint) -> list[tuple[str, str, bool, int]]:
    """A store has no units without elements."""
    return sorted((u.layer, u.slot, u.moving, u.nbytes) for u in checkpoint.certificate.units if u.nbytes)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_plain, value)]
    return (str(value.dtype), value.tolist()) if hasattr(value, "tolist") else (type(value).__name__, value)
