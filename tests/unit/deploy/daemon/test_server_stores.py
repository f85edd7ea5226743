"""One daemon, several stores: one that hangs does not hold up the others, and a copy is not the store."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from deploy.daemon.node import Jobs
from store.daemon_protocol import Register
from store.memory.index import SeenStore, seen_stores
from store.session import claim_epoch
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.daemons import catalog_of, daemon, known, report, steps, trainer, until

pytestmark = pytest.mark.slow


def test_a_store_that_does_not_answer_does_not_hold_up_the_rescue_of_another(tmp_path: Path, base: Path) -> None:
    """Each sync of its segments takes long: by then the other job's state is written."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: a store that holds up the rescue of others is NOT tested")
    one, two = tmp_path / "a" / "store", tmp_path / "b" / "store"
    one.parent.mkdir()
    two.parent.mkdir()
    with trainer(one, base, 7) as first, trainer(two, base, 7) as second:
        slow = ("strace", "-f", "-qq", "-o", "/dev/null", "-P", str(one / "segments"))
        inject = ("-e", "trace=fsync", "-e", "inject=fsync:delay_enter=15000000")
        with daemon(base, prefix=(*slow, *inject)) as beside:
            known(base, 2)
            first.kill()
            until(lambda: (found := report(base)) and "rescuing" in {job.state for job in found.jobs}, "a rescue")
            second.kill()
            beside.rescued(2)
            found = report(base)
            assert found is not None
            assert [one.outcome for one in found.rescues] == ["written", "written"]
            assert [one.store for one in found.rescues] == [str(two), str(one)]
    assert steps(one) == steps(two) == [7, 4]
    assert verify(catalog_of(one)).ok and verify(catalog_of(two)).ok


def test_of_a_store_and_its_copy_each_is_rescued_into_its_own(tmp_path: Path, base: Path) -> None:
    """They have one identity; the copy is further in its epochs, which is nothing to the store."""
    store, copy = tmp_path / "a" / "store", tmp_path / "b" / "store"
    store.parent.mkdir()
    with trainer(store, base, 4, daemon={"enabled": False}) as first:
        first.told("close")
    shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=shutil.ignore_patterns("trainer-*"))
    claim_epoch(LocalFiles(copy), catalog_of(copy).store_id)
    with daemon(base) as beside, trainer(copy, base, 9) as other, trainer(store, base, 7) as one:
        known(base, 2)
        one.kill()
        assert beside.rescued() == "written"
        assert steps(store) == [7, 4] and steps(copy) == [8, 4]
        other.kill()
        assert beside.rescued(2) == "written"
        assert steps(store) == [7, 4] and steps(copy) == [9, 8, 4]
    assert verify(catalog_of(store)).ok and verify(catalog_of(copy)).ok


def test_a_copy_takes_no_ones_place_in_the_table() -> None:
    jobs = Jobs()
    hello = Register(pid=1, rank=0, world_size=1, store="/a", store_id="ab" * 16, epoch=2, base="/shm")
    mine, member, _ = jobs.join(hello, 1)
    jobs.join(replace(hello, store="/copy", epoch=5), 2)
    assert [job.hello.store for job in jobs] == ["/a", "/copy"]
    assert jobs.join(hello, 1)[0] is mine
    _, _, older = jobs.join(replace(hello, epoch=3), 3)
    assert older == [mine] and [job.hello.store for job in jobs] == ["/copy", "/a"]
    assert not jobs.ended(mine, member)


def test_a_store_and_its_copies_are_remembered(base: Path, tmp_path: Path) -> None:
    """By the next daemon, and files of releases that knew one place for each are read."""
    seen, store_id = SeenStore(base), "ab" * 16
    (base / f"driftpoint-{os.getuid()}").mkdir()
    for name in ("store", "copy", "store"):
        seen.seen(store_id, tmp_path / name)
    assert SeenStore(base).places(store_id) == [tmp_path / "copy", tmp_path / "store"]
    assert seen_stores(base) == {store_id: tmp_path / "store"}
    (base / f"driftpoint-{os.getuid()}" / "stores.json").write_text(f'{{"{store_id}": "{tmp_path}"}}')
    assert SeenStore(base).places(store_id) == [tmp_path]
