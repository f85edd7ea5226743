"""``driftpoint rescue`` and ``driftpoint memory``, on what a dead job left."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from store.memory.index import SeenStore, scan_node
from store.names import SaveId
from store.schema import to_bytes
from store.session import claim_epoch
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.cli import Here
from tests.support.jobs import Job
from tests.support.kept import abandoned, catalog_of, kept_step, memory, tier_of


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def shm(store: Path) -> Path:
    return store.parent / "shm"


def job(store: Path) -> Job:
    one = Job(store, every=4, memory=memory(store))
    one.ckpt.resume()
    for _ in range(7):
        kept_step(one)
    return one


def test_rescue_commits_and_says_so(here: Here, store: Path, shm: Path) -> None:
    abandoned(job(store))
    first = here("rescue", store, "--memory", shm, columns=200)
    assert (first.code, first.err) == (0, "") and first.out.startswith("Committed step 7 from memory")
    assert verify(catalog_of(store)).ok
    second = here("rescue", store, "--memory", shm, "--json")
    assert second.code == 0
    assert (second.json["outcome"], second.json["save"]) == ("nothing", None)


def test_rescue_of_a_living_job_is_refused(here: Here, store: Path, shm: Path) -> None:
    one = job(store)
    told = here("rescue", store, "--memory", shm)
    assert told.code == 11 and "lives" in told.err
    one.ckpt.close()


def test_rescue_where_another_job_claimed_the_store(here: Here, store: Path, shm: Path) -> None:
    abandoned(job(store))
    claim_epoch(LocalFiles(store), catalog_of(store).store_id)
    told = here("rescue", store, "--memory", shm, "--json")
    assert told.code == 11 and told.json["error"]["type"] == "FencedError"


def test_rescue_of_what_is_damaged(here: Here, store: Path, shm: Path) -> None:
    abandoned(job(store))
    for held in scan_node(tier_of(store)).versions.values():
        data = bytearray(held[0].payload.read_bytes())
        data[4] ^= 1
        held[0].payload.write_bytes(data)
    told = here("rescue", store, "--memory", shm, "--json")
    assert told.code == 12 and told.json["error"]["type"] == "DamagedError"


def test_memory_lists_what_there_is(here: Here, store: Path, shm: Path) -> None:
    one = job(store)
    row = here("memory", "--memory", shm, "--json").json["stores"][0]
    assert (row["step"], row["ranks"], row["world_size"], row["alive"], row["store"]) == (7, 1, 1, True, None)
    SeenStore(shm).seen(tier_of(store).store_id, store)
    abandoned(one)
    listed = here("memory", "--memory", shm, "--json").json
    assert (listed["stores"][0]["alive"], listed["stores"][0]["store"]) == (False, str(store))
    assert listed["nbytes"] > 0
    text = here("memory", "--memory", shm, columns=200).out
    assert str(store) in text and "dead" in text


def test_what_is_of_another_node_is_listed_and_not_rescued(here: Here, store: Path, shm: Path) -> None:
    """Its rank may live."""
    abandoned(job(store))
    for held in scan_node(tier_of(store)).versions.values():
        record = held[0].payload.with_suffix(".json")
        record.write_bytes(to_bytes(held[0].record.replace(replica=True)))
    row = here("memory", "--memory", shm, "--json").json["stores"][0]
    assert (row["step"], row["ranks"], row["replicas"]) == (7, 1, 1)
    assert "1 of 1, 1 as replicas" in here("memory", "--memory", shm, columns=200).out
    told = here("rescue", store, "--memory", shm, columns=200)
    assert told.code == 1 and "ranks [0] of 1 are not in the memory of this node" in told.out


def test_nothing_in_memory(here: Here, tmp_path: Path) -> None:
    assert here("memory", "--memory", tmp_path).out == "There are no snapshots in memory.\n"
    assert here("memory", "clear", "--all", "--yes", "--memory", tmp_path, "--json").json["freed_bytes"] == 0


def test_clear_never_takes_what_lives(here: Here, store: Path, shm: Path) -> None:
    one = job(store)
    assert here("memory", "clear", "--all", "--yes", "--memory", shm).code == 0
    assert SaveId(7, 1) in scan_node(tier_of(store)).versions
    abandoned(one)
    told = here("memory", "clear", store, "--yes", "--memory", shm, "--json").json
    assert told["freed_bytes"] > 0 and told["stores"] == [tier_of(store).store_id]
    assert not scan_node(tier_of(store)).versions


def test_what_jobs_on_copies_left_is_listed_and_cleared_by_itself(here: Here, store: Path, shm: Path) -> None:
    first = Job(store, every=1)
    first.step()
    first.step()
    first.ckpt.close()
    copy = store.with_name("copy")
    shutil.copytree(store, copy)
    abandoned(job(store))
    two = Job(copy, every=50, memory=memory(store))
    two.ckpt.resume()
    for _ in range(12):
        kept_step(two)
    abandoned(two)
    row = here("memory", "--memory", shm, "--json").json["stores"][0]
    assert (row["step"], row["steps"]) == (14, [14, 9])
    assert "14, 9" in here("memory", "--memory", shm, columns=200).out
    assert here("memory", "clear", copy, "--yes", "--memory", shm, "--json").json["freed_bytes"] > 0
    assert here("memory", "--memory", shm, "--json").json["stores"][0]["steps"] == [9]
    assert here("rescue", store, "--memory", shm, columns=200).out.startswith("Committed step 9 from memory")
    assert here("memory", "clear", tier_of(store).store_id, "--yes", "--memory", shm).code == 0
    assert not scan_node(tier_of(store)).versions


def test_clear_asks(here: Here, store: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned(job(store))
    for said in ("", "n\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        told = here("memory", "clear", "--all", "--memory", shm)
        assert (told.code, told.out) == (130, "") and "[y/N]" in told.err
        assert scan_node(tier_of(store)).versions
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert here("memory", "clear", "--all", "--memory", shm).code == 0
    assert not scan_node(tier_of(store)).versions


@pytest.mark.parametrize("args", [(), ("somewhere", "--all"), ("f" * 32,)])
def test_clear_needs_to_know_of_what(here: Here, store: Path, shm: Path, args: tuple[str, ...]) -> None:
    abandoned(job(store))
    assert here("memory", "clear", *args, "--yes", "--memory", shm).code == 2
