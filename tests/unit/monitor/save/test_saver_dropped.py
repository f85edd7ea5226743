"""What a report says was saved is what the commit holds: units that the health gate refused are not among it."""

from __future__ import annotations

from pathlib import Path

import torch

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.jobs import job


def test_a_save_that_was_waited_for_names_only_what_it_committed(tmp_path: Path) -> None:
    with job(tmp_path / "s", every=1000) as one:
        one.ckpt.resume()
        one.step()
        assert one.ckpt.save(wait=True).skipped is None
        one.update()
        one.ckpt.step()
        with torch.no_grad():
            one.model.head.weight[0, 0] = float("nan")
        report = one.ckpt.save(wait=True)
        assert report.skipped is None and report.saved is not None
        catalog = open_catalog(LocalFiles(tmp_path / "s"))
        save = catalog.saves()[0]
        assert save.step == 2
        units = catalog.manifest(save).units
        assert set(report.saved) == {record.unit for record in units if record.version == save}
        assert {unit.layer for unit in report.saved} == {"embed", "blocks.0", "blocks.1", "blocks.2"}
        with torch.no_grad():
            one.model.head.weight[0, 0] = 0.0
        one.update()
        one.ckpt.step()
        assert "head" in {unit.layer for unit in one.ckpt.save(wait=True).saved or {}}
