"""Taking a store over by hard links: its bytes once, each one hashed, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import merger.import_checkpoint
import merger.io.blocks
import merger.io.output_dir
from merger.import_checkpoint import import_checkpoint, plan_import
from merger.merge import merge
from merger.sources.store import StoreSource
from store.catalog import open_catalog
from store.errors import DamagedError, StorageError, UsageError
from store.location import place_of
from store.names import SaveId
from store.retention import Retention, execute, plan_prune
from store.segment import read_part
from store.session import claim_epoch
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.imports import IN_PLACES, alike, begin, left, payloads
from tests.support.mounts import shared_memory
from tests.support.plain_stores import PlainStore, rebuilt, same
from tests.support.stores import flip_byte


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target" / "store"


def room(*roots: Path) -> int:
    """Bytes on the disk. A file with several names counts once."""
    found = {(p.stat().st_dev, p.stat().st_ino): p.stat().st_size for root in roots for p in payloads(root)}
    return sum(found.values())


def test_two_runs_from_one_base_take_its_bytes_once(store: PlainStore, tmp_path: Path) -> None:
    """A composite over two epochs: ages, drift and run state come along, and no file is written twice."""
    store.save(10)
    store.restart()
    store.save(20, layers=["layers.1"], drift=0.0125)
    runs = [tmp_path / "one", tmp_path / "two"]
    for run in runs:
        found = import_checkpoint(plan_import(store.root, link=True), run)
        assert (found.save.step, found.certificate.exact, found.certificate.max_staleness) == (20, False, 10)
        assert verify(open_catalog(LocalFiles(run))).ok
    assert room(store.root, *runs) == room(store.root) == sum(p.stat().st_size for p in payloads(store.root))
    assert {p.stat().st_nlink for p in payloads(store.root)} == {3}
    wanted = StoreSource(store.root).checkpoint(None, frozenset())
    for run in runs:
        copy = StoreSource(run).checkpoint(None, frozenset())
        assert alike(copy.run_states[1].user, wanted.run_states[1].user)
        assert [(u.step, u.staleness, u.drift) for u in copy.certificate.units] == [
            (u.step, u.staleness, u.drift) for u in wanted.certificate.units
        ]
        merge(run, tmp_path / f"{run.name}.out")
    merge(store.root, tmp_path / "out")
    assert same(rebuilt(tmp_path / "one.out"), rebuilt(tmp_path / "out"))
    catalog = open_catalog(LocalFiles(runs[0]))
    epoch = claim_epoch(catalog.files, catalog.store_id).epoch
    assert epoch == catalog.saves()[0].epoch + 1 > 2, "later than every segment's"


def test_what_happens_to_one_store_and_to_the_shared_bytes(store: PlainStore, target: Path) -> None:
    store.save(10)
    import_checkpoint(plan_import(store.root, link=True), target)
    store.save(20)
    catalog = open_catalog(LocalFiles(store.root))
    execute(catalog.files, plan_prune(catalog, Retention(keep_last=1, log_spaced=False)))
    assert [p.parent.name for p in payloads(store.root)] == ["00000020-000001"] * 2
    assert verify(open_catalog(LocalFiles(target))).ok, "deletion takes a name, and no bytes"
    other = target.parent / "other"
    import_checkpoint(plan_import(target, link=True), other)
    part = read_part(LocalFiles(target), open_catalog(LocalFiles(target)).store_id, SaveId(10, 2), 0)
    flip_byte(payloads(target)[0], part.header_bytes)
    for root in (target, other):
        assert not verify(open_catalog(LocalFiles(root))).ok, "one file, found by its hash in both"
    assert verify(open_catalog(LocalFiles(store.root))).ok
    with pytest.raises(DamagedError, match=r"store, too: name another commit with --step"):
        import_checkpoint(plan_import(target, link=True), target.parent / "third")
    assert sorted(path.name for path in target.parent.iterdir()) == ["other", "store"]


@IN_PLACES
@pytest.mark.parametrize("trouble", ["damage", "change", "interrupt"])
def test_a_link_that_fails_half_way_leaves_nothing(store: PlainStore, target: Path, begun: bool, trouble: str) -> None:
    """In the second of two groups, when the first one is linked; and the second try succeeds."""
    store.save(10)
    last, epochs = store.payload(store.save(20, slots=["fp32"]), 1), begin(target, begun)
    data, plan, told = last.read_bytes(), plan_import(store.root, link=True), list[int]()

    def progress(count: int) -> None:
        told.append(count)
        if trouble == "interrupt" and len(told) == 3:
            raise KeyboardInterrupt
        if trouble == "change" and len(told) == 2:
            last.unlink()  # a prune in the source

    if trouble == "damage":
        flip_byte(last, 2000)
    error = {"damage": DamagedError, "change": StorageError, "interrupt": KeyboardInterrupt}[trouble]
    text = {"damage": "name another commit with --step", "change": "changed meanwhile: import it again"}
    with pytest.raises(error, match=text.get(trouble)):
        import_checkpoint(plan, target, progress)
    assert len(told) >= 2, "the first group"
    assert left(target, begun) == [] and {p.stat().st_nlink for p in payloads(store.root)} == {1}
    last.unlink(missing_ok=True)
    last.write_bytes(data)
    assert import_checkpoint(plan_import(store.root, link=True), target).save == SaveId(20, 2 + epochs)
    assert verify(open_catalog(LocalFiles(target))).ok


@IN_PLACES
def test_an_interrupted_link_is_begun_again(
    store: PlainStore, target: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    store.save(10)
    store.save(20, slots=["fp32"])
    begin(target, begun)
    real = merger.import_checkpoint.commit
    monkeypatch.setattr(merger.import_checkpoint, "commit", lambda *_: os._exit(9))
    if (child := os.fork()) == 0:
        import_checkpoint(plan_import(store.root, link=True), target)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert target.exists() is begun and {p.stat().st_nlink for p in payloads(store.root)} == {2}
    monkeypatch.setattr(merger.import_checkpoint, "commit", real)
    import_checkpoint(plan_import(store.root, link=True), target)
    assert verify(open_catalog(LocalFiles(target))).ok
    assert {p.stat().st_nlink for p in payloads(store.root)} == {2}, "what was left is gone"


def test_only_a_store_on_the_same_filesystem_is_linked(store: PlainStore, tmp_path: Path) -> None:
    """All else is refused in one sentence that says what to do, before anything is made."""
    store.save(10)
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.named_parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    folder = tmp_path / "folder"  # of the Trainer, with an index that cannot be read
    folder.mkdir()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "model.safetensors.index.json").write_text("{")
    advice = "leave --link out, and the import copies the bytes"
    for source in (tmp_path / "a.pt", folder):
        with pytest.raises(UsageError, match=f"a checkpoint of kind torch, and only stores are linked: {advice}"):
            plan_import(source, link=True)
    for url in ("s3://bucket/run", "gs://bucket/run"):  # refused before any request
        with pytest.raises(UsageError, match=f"{url} is in a bucket, where there are no hard links: {advice}"):
            plan_import(place_of(url), link=True)
        with pytest.raises(UsageError, match=f"{url} is in a bucket, where there are no hard links: {advice}"):
            import_checkpoint(plan_import(store.root, link=True), place_of(url))
    for place in (tmp_path / "a.pt", tmp_path / "a.pt" / "run"):
        with pytest.raises(UsageError, match=r"a\.pt is a file: name a new directory with --store"):
            import_checkpoint(plan_import(store.root, link=True), place)
    with shared_memory("driftpoint-link-") as elsewhere:
        if elsewhere.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is no second filesystem")
        with pytest.raises(UsageError, match=rf"cannot be linked \(the two stores are on different files.*: {advice}"):
            import_checkpoint(plan_import(store.root, link=True), elsewhere / "store")
        assert list(elsewhere.iterdir()) == []
