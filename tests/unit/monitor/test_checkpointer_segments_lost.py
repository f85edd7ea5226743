"""Files of old saves that a running job still needs are removed: by hand, or by a filesystem that purges by age."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.jobs import job, same

SETTINGS: dict[str, dict[str, Any]] = {
    "differences": {"packing": 1, "differences": True},
    "turns": {"policy": {"name": "parity", "k": 3}},
}


def lose(save: Path, folder: bool) -> None:
    """A filesystem that purges by age keeps folders."""
    if folder:
        shutil.rmtree(save)
        return
    for file in save.iterdir():
        file.unlink()


def needed_next(store: Path, name: str) -> Path:
    """Segments that the next commit needs: of a base, or of the layers that were saved last."""
    catalog = open_catalog(LocalFiles(store))
    manifest = catalog.manifest(catalog.saves()[0])
    bases = {base for unit in manifest.units for base in unit.bases}
    assert (name == "differences") == bool(bases)
    return store / "segments" / min(bases or {manifest.save.name})


@pytest.mark.parametrize("folder", [False, True])
def test_a_save_that_is_asked_for_needs_no_other(tmp_path: Path, folder: bool) -> None:
    store, settings = tmp_path / "store", SETTINGS["differences"]
    with job(store, width=64, **settings) as one:
        one.optimizer.param_groups[0]["lr"] = 1e-7  # so that differences are small
        for _ in range(4):
            one.step()
        lose(needed_next(store, "differences"), folder)
        one.ckpt.save(wait=True)
        kept = one.weights()
    with job(store, width=64, **settings) as two:
        assert two.ckpt.resume() == 4
        assert two.ckpt.certificate is not None
        assert two.ckpt.certificate.exact
        assert same(kept, two.weights())


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_save_after_a_failed_one_writes_anew_what_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, folder: bool
) -> None:
    store, settings = tmp_path / "store", SETTINGS[name]
    with job(store, width=64, **settings) as one:
        one.optimizer.param_groups[0]["lr"] = 1e-7  # so that differences are small
        for _ in range(4):
            one.step()
        lose(needed_next(store, name), folder)
        for _ in range(2):
            one.step()
        assert "whose segments are gone" in caplog.text
        assert "the newest commit is" not in caplog.text
        kept = one.weights()
    with job(store, width=64, **settings) as two:
        assert two.ckpt.resume() == 6
        certificate = two.ckpt.certificate
        assert certificate is not None
        assert not any(unit.fallback for unit in certificate.units)
        assert name == "turns" or (certificate.exact and same(kept, two.weights()))
