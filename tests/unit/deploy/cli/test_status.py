from __future__ import annotations

from pathlib import Path

import pytest

from deploy.store_status import open_store, store_status
from store.catalog import open_or_create
from store.session import StoreLock
from store.storage.local import LocalFiles
from tests.support.cli import Here, driftpoint
from tests.support.processes import holding_lock
from tests.support.stores import FakeLayer, StoreBuilder, flip_byte


@pytest.fixture
def builder(tmp_path: Path) -> StoreBuilder:
    return StoreBuilder(tmp_path / "store", policy="parity")


def test_exact(here: Here, builder: StoreBuilder) -> None:
    save = builder.save(10)
    answer = here("status", builder.root, "--json")
    assert answer.code == 0
    assert answer.json["store_id"] == builder.store_id
    assert answer.json["commits"] == [save.name]
    assert answer.json["resume"] == {
        "save": save.name,
        "step": 10,
        "effective_step": 10.0,
        "goes_on_at": 10,
        "journal": None,
        "exact": True,
        "max_staleness": 0,
        "max_drift": 0.0,
        "lossy": [],
        "fallbacks": [],
        "proven": False,
        "as_found": False,
    }
    assert (answer.json["in_use"], answer.json["in_use_by"], answer.json["problems"]) == (False, None, [])
    assert answer.json["size_bytes"] == sum(p.stat().st_size for p in builder.root.rglob("*") if p.is_file())


def test_why_a_commit_of_one_step_is_not_exact(here: Here, builder: StoreBuilder) -> None:
    builder.save(10, differs=("layers.0 changed while it was saved", "and more"))
    assert here("status", builder.root, "--json").json["resume"]["exact"] is False
    wanted = "not exact: as the job found when it saved: layers.0 changed while it was saved"
    for command in ("status", "show"):
        text = " ".join(here(command, builder.root, columns=200).out.split())
        assert wanted in text and "composite" not in text


def test_composite_with_its_bounds(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    builder.restart()
    save = builder.save(25, slots=("fp32",), drift=lambda unit: 0.0321 if unit.slot == "exp_avg" else 0.001)
    builder.prove(save)
    resume = here("status", builder.root, "--json").json["resume"]
    assert (resume["exact"], resume["max_staleness"], resume["max_drift"]) == (False, 15, 0.0321)
    assert resume["proven"]
    text = here("status", builder.root).out
    assert "from step 25, composite: layers up to 15 steps old, drift up to 0.0321" in " ".join(text.split())
    assert "2; newest: process" in text


def test_a_composite_of_stale_weights_and_where_a_job_would_go_on(here: Here, tmp_path: Path) -> None:
    store = StoreBuilder(tmp_path / "weights", layers=tuple(FakeLayer(name) for name in "abc"))
    store.save(10)
    store.save(20, layers=("a",))
    store.save(30, layers=("b",))
    resume = here("status", store.root, "--json").json["resume"]
    # a is 10 steps old and c 20, at the same drift: a moved twice as fast
    assert resume["effective_step"] == pytest.approx(30 - (10 * 2 + 20 * 1) / (2 + 1 + 1.5))
    assert (resume["step"], resume["goes_on_at"], resume["exact"]) == (30, 20, False)
    wanted = "effective step 21.1; a job resumes at step 20"
    assert wanted in " ".join(here("status", store.root).out.split())
    assert wanted in " ".join(here("show", store.root, columns=160).out.split())
    shown = here("show", store.root, "--json").json
    assert (shown["effective_step"], shown["goes_on_at"]) == (resume["effective_step"], 20)
    assert "goes on" not in here("show", store.root, "10").out
    assert "goes on" not in here("status", store.root, columns=160).out.replace(wanted, "")


def test_the_newest_commit_is_described(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    save = builder.save(20, layers=("layers.0",))
    newest = here("status", builder.root, "--json").json["newest"]
    assert newest["save"] == save.name
    assert (newest["framework"], newest["policy"], newest["world_size"]) == ("deepspeed", "parity", 2)
    assert newest["layers"] == 6
    assert newest["parameters"] == sum(layer.numel for layer in builder.layers)
    assert newest["bytes_avoided"] == 12 * (newest["parameters"] - 64)
    assert newest["bytes_written"] == sum(builder.payload(save, rank).stat().st_size for rank in (0, 1))


def test_no_store(here: Here, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        answer = here("status", path)
        assert (answer.code, answer.out) == (10, "")
        assert answer.err.startswith("error: ") and answer.err.count("\n") == 1
    (tmp_path / "file").touch()
    assert "is a file" in here("status", tmp_path / "file").err


def test_a_store_next_to_what_was_named_is_pointed_out(here: Here, builder: StoreBuilder) -> None:
    for path in (builder.root.parent, builder.root / "manifests"):
        answer = here("status", path)
        assert answer.code == 10
        assert f"there is one in {builder.root}\n" in answer.err


def test_an_empty_store_has_nothing_to_resume(here: Here, tmp_path: Path) -> None:
    open_or_create(LocalFiles(tmp_path / "store"))
    answer = here("status", tmp_path / "store", "--json")
    assert answer.code == 13
    assert (answer.json["resume"], answer.json["commits"], answer.json["owner"]) == (None, [], None)
    assert "nothing to resume yet" in here("status", tmp_path / "store").out


def test_damage_with_an_older_commit_to_resume_from(here: Here, builder: StoreBuilder) -> None:
    old = builder.save(10)
    flip_byte(builder.manifest(builder.save(20)), 100)
    answer = here("status", builder.root, "--json")
    assert answer.code == 12
    assert answer.json["resume"]["save"] == old.name
    assert len(answer.json["problems"]) == 1
    assert "Problems" in here("status", builder.root).out


def test_an_older_damaged_commit_is_told_too(here: Here, builder: StoreBuilder) -> None:
    old, new = builder.save(10), builder.save(20)
    flip_byte(builder.manifest(old), 100)
    answer = here("status", builder.root, "--json")
    assert (answer.code, answer.json["resume"]["save"]) == (12, new.name)
    assert old.name in answer.json["problems"][0]


def test_a_unit_that_falls_back_is_named(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    middle = builder.save(20, layers=("layers.0",))
    builder.save(30, layers=("norm",))
    builder.payload(middle, 1).unlink()
    answer = here("status", builder.root, "--json")
    assert answer.code == 12
    assert set(answer.json["resume"]["fallbacks"]) == {f"layers.0/{slot}" for slot in builder.slots}
    assert answer.json["resume"]["max_staleness"] == 20
    assert answer.json["resume"]["max_drift"] is None


def test_nothing_left_to_resume(here: Here, builder: StoreBuilder) -> None:
    for save in (builder.save(10), builder.save(20)):
        builder.payload(save, 0).unlink()
    answer = here("status", builder.root)
    assert answer.code == 13
    assert "impossible" in answer.out


@pytest.mark.parametrize("lost", [False, True])
def test_the_store_s_record_is_damaged_or_lost(here: Here, builder: StoreBuilder, lost: bool) -> None:
    builder.save(10)
    flip_byte(builder.root / "STORE.json", 20)
    if lost:
        (builder.root / "STORE.json").unlink()
    answer = here("status", builder.root, "--json")
    assert answer.code == 13
    assert answer.json["error"]["type"] == "NothingToResumeError"
    assert "STORE.json" in (message := answer.json["error"]["message"]) and "doctor --repair" in message


def test_in_use_by_another_process(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    with holding_lock(builder.root) as pid:
        answer = here("status", builder.root, "--json")
        assert (answer.code, answer.json["in_use"], answer.json["in_use_by"]) == (0, True, pid)
        assert f"by process {pid} on this machine" in here("status", builder.root).out
    assert here("status", builder.root, "--json").json["in_use_by"] is None


def test_looking_does_not_take_or_drop_the_lock(builder: StoreBuilder) -> None:
    builder.save(10)
    lock = StoreLock(builder.root, wait_seconds=0)
    try:
        store_status(
            open_store(builder.root), builder.root
        )  # in the process that holds it: closing a descriptor of LOCK would drop it
        assert driftpoint("status", builder.root, "--json").json["in_use"]
    finally:
        lock.release()


def test_a_damaged_epoch_record_is_a_problem(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    flip_byte(builder.root / "epochs" / "000001.json", 30)
    answer = here("status", builder.root, "--json")
    assert (answer.code, answer.json["owner"]) == (12, None)
    assert "epochs/000001.json" in answer.json["problems"][0]


@pytest.mark.parametrize("reason", ["imported as found", "imported from a deepspeed checkpoint"])
def test_an_import_is_as_found_until_the_job_has_saved_over_it(here: Here, tmp_path: Path, reason: str) -> None:
    """As the certificate of the import says: no hash vouches for the files that it read."""
    builder = StoreBuilder(tmp_path / "store", policy="import")
    builder.save(10, reason=reason)
    for command in ("status", "show", "report"):
        text = here(command, builder.root, *(() if command != "report" else ("--out", tmp_path / "page.html"))).out
        found = (tmp_path / "page.html").read_text() if command == "report" else text
        assert "as found" in found, command
    resume = here("status", builder.root, "--json").json["resume"]
    assert (resume["exact"], resume["as_found"]) == (False, True)
    builder.policy = "full"
    builder.save(20)
    resume = here("status", builder.root, "--json").json["resume"]
    assert (resume["exact"], resume["as_found"]) == (True, False)
