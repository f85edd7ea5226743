"""Weights-only commits from the command line: pruned to, shown, verified, merged; refused where state is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from deploy.doctor.store import check_store
from store.catalog import mark_suspect, open_catalog
from store.errors import DamagedError, UnsupportedError, UsageError
from store.names import SaveId, payload_path
from store.retention import Retention, execute, keep_named_weights, plan_prune
from store.storage.local import LocalFiles
from tests.support.cli import Here
from tests.support.plain_stores import PlainStore
from tests.support.stores import flip_byte

RULE = Retention(keep_last=1, log_spaced=False, weights_every=20)


@pytest.fixture
def store(tmp_path: Path) -> PlainStore:
    made = PlainStore(tmp_path / "store")
    made.save(10)
    made.save(20, slots=("fp32",))
    made.save(30)
    made.save(40)
    return made


def age(store: PlainStore) -> None:
    """What a job does under the rule."""
    catalog = open_catalog(LocalFiles(store.root))
    assert keep_named_weights(catalog, plan_prune(catalog, RULE)) == []
    execute(catalog.files, plan_prune(catalog, RULE))


def test_what_is_left_of_a_commit_is_merged_as_it_was(here: Here, store: PlainStore, tmp_path: Path) -> None:
    before = here("merge", store.root, "--step", 20, "--layout", "hf", "--out", tmp_path / "before", "--json").json
    age(store)
    status = here("status", store.root, "--json").json
    assert (status["commits"], status["weights_only"]) == (["00000040-000001"], ["00000020-000001", "00000010-000001"])
    assert "weights only: 00000020-000001, 00000010-000001" in " ".join(here("status", store.root).out.split())
    for step, name in ((20, "after"), ("00000020-000001", "named"), ("< 30", "bound")):
        after = here("merge", store.root, "--step", step, "--layout", "hf", "--out", tmp_path / name, "--json").json
        assert after["certificate"]["exact"] is before["certificate"]["exact"] is True
        found, meant = (load_file(tmp_path / one / "model.safetensors") for one in (name, "before"))
        assert found.keys() == meant.keys()
        assert all(found[fqn].numpy().tobytes() == meant[fqn].numpy().tobytes() for fqn in meant)
    sizes = [
        sum(p.stat().st_size for p in (store.root / place).rglob("*.safetensors")) for place in ("segments", "weights")
    ]
    assert sizes[1] < sizes[0], "two of them are smaller than one commit"


def test_nothing_takes_it_for_a_training_state(here: Here, store: PlainStore, tmp_path: Path) -> None:
    age(store)
    shown = here("show", store.root, 20, "--json").json
    assert (shown["weights_only"], shown["resumable"], shown["goes_on_at"]) == (True, False, None)
    assert "weights only, cannot be resumed but exported; exact" in here("show", store.root, 20).out
    answer = here("merge", store.root, "--step", 20, "--out", tmp_path / "out")
    assert answer.code == UnsupportedError.exit_code and "holds weights only" in answer.err
    answer = here("import", store.root, "--step", 20, "--store", tmp_path / "other")
    assert answer.code == UnsupportedError.exit_code and not (tmp_path / "other").exists()
    inner = store.root / "weights" / "00000020-000001"
    assert "it holds weights only" in here("show", inner).err
    assert here("show", store.root, 15).code == UsageError.exit_code


def test_a_bound_passes_over_it_where_more_is_needed(here: Here, store: PlainStore, tmp_path: Path) -> None:
    store.prove(SaveId(10, 1))
    age(store)
    answer = here("merge", store.root, "--step", "<= 30", "--out", tmp_path / "out", "--json").json
    assert answer["certificate"]["save"] == "00000010-000001"


def test_an_unknown_step_is_refused_with_the_known_ones_newest_first(
    here: Here, store: PlainStore, tmp_path: Path
) -> None:
    """Also where commits that stay in full are older than weights-only ones."""
    store.prove(SaveId(10, 1))
    age(store)
    assert [save.step for save in open_catalog(LocalFiles(store.root)).saves()] == [40, 10]
    out = ("--layout", "hf", "--out", tmp_path / "out")
    for command in (("merge", store.root, "--step", 77, *out), ("export", store.root, "me/tiny", "--step", 77)):
        answer = here(*command)
        assert answer.code == UsageError.exit_code
        assert "has no checkpoint 77; there are steps 40, 20, 10" in " ".join(answer.err.split())
    names = "00000040-000001, 00000020-000001, 00000010-000001"
    assert f"there is {names}" in " ".join(here("show", store.root, 77).err.split())
    answer = here("import", store.root, "--step", 77, "--store", tmp_path / "other")
    assert f"the newest are: {names}" in " ".join(answer.err.split())


def test_a_step_is_that_of_the_newest_epoch_whichever_kind_its_commit_is_of(
    here: Here, store: PlainStore, tmp_path: Path
) -> None:
    store.prove(SaveId(20, 1))
    store.restart()
    store.newest = SaveId(10, 1)
    for step in (20, 30, 40):
        store.save(step)
    age(store)
    assert "00000020-000001" in here("status", store.root, "--json").json["commits"]
    assert here("show", store.root, 20, "--json").json["save"] == "00000020-000002"
    out = tmp_path / "out"
    assert here("merge", store.root, "--step", 20, "--layout", "hf", "--out", out, "--json").json["certificate"][
        "save"
    ] == "00000020-000002"  # fmt: skip


def test_a_suspect_mark_is_told_of_weights_too(here: Here, store: PlainStore, tmp_path: Path) -> None:
    age(store)
    catalog = open_catalog(LocalFiles(store.root))
    mark_suspect(catalog.files, catalog.store_id, SaveId(20, 1), "exit code 1")
    age(store)
    assert here("status", store.root, "--json").json["suspects"] == ["00000020-000001"]
    assert "suspect: 00000020-000001; weights only: 00000020-000001" in " ".join(here("status", store.root).out.split())
    assert here("show", store.root, 20, "--json").json["suspect"] == "exit code 1"
    found = here("verify", store.root, "--json").json["commits"]
    assert [one["suspect"] for one in found] == [False, True, False]
    merged = here("merge", store.root, "--step", 20, "--layout", "hf", "--out", tmp_path / "out", "--json").json
    told = "00000020-000001 is suspect: jobs that resumed from it died (exit code 1)"
    assert merged["problems"] == [told] and merged["certificate"]["exact"]
    newest = here("merge", store.root, "--layout", "hf", "--out", tmp_path / "newest", "--json").json
    assert newest["certificate"]["save"] == "00000040-000001" and newest["problems"] == []
    assert all(one.state == "ok" for one in check_store(store.root, RULE)), "a job resumes none of them"


def test_a_prune_by_hand_copies_the_weights_first(here: Here, store: PlainStore) -> None:
    rule = ("--keep-last", 1, "--no-log-spaced", "--weights-every", 20)
    dry = here("prune", store.root, *rule, "--dry-run", "--json").json
    assert (dry["delete"]["commits"], dry["weights_to_copy"]) == ([], ["00000010-000001", "00000020-000001"])
    text = " ".join(here("prune", store.root, *rule, "--dry-run").out.split())
    assert "Kept only until their weights are copied: 00000020-000001, 00000010-000001" in text
    assert not (store.root / "weights").exists()
    done = here("prune", store.root, *rule, "--json").json
    assert done["delete"]["commits"] == ["00000010-000001", "00000020-000001", "00000030-000001"]
    assert (done["weights_to_copy"], done["keep"]) == ([], ["00000040-000001"])
    status = here("status", store.root, "--json").json
    assert status["weights_only"] == ["00000020-000001", "00000010-000001"]
    assert here("verify", store.root).code == 0


def test_a_prune_by_hand_lists_the_weights_that_it_deletes(here: Here, store: PlainStore) -> None:
    age(store)
    rule = ("--keep-last", 1, "--no-log-spaced", "--weights-every", 1000)
    dry = here("prune", store.root, *rule, "--dry-run", "--json").json
    assert dry["delete"]["weights"] == ["00000020-000001"] and dry["freed_bytes"] > 0
    assert "Would delete no commit; 1 weights-only commit: 00000020-000001" in " ".join(
        here("prune", store.root, *rule, "--dry-run").out.split()
    )
    assert len(here("status", store.root, "--json").json["weights_only"]) == 2
    assert here("prune", store.root, *rule, "--json").json["freed_bytes"] == dry["freed_bytes"]
    assert here("status", store.root, "--json").json["weights_only"] == ["00000010-000001"]


def test_a_prune_by_hand_takes_the_next_commit_for_a_damaged_one(here: Here, store: PlainStore) -> None:
    catalog, save = open_catalog(LocalFiles(store.root)), SaveId(10, 1)
    part = catalog.group(save, catalog.manifest(save).groups[save.name]).parts[0]
    entry = next(entry for entry in part.entries if entry.slot == "fp32")
    flip_byte(store.root / payload_path(save, 0), part.header_bytes + entry.offset)
    answer = here("prune", store.root, "--keep-last", 1, "--no-log-spaced", "--weights-every", 40)
    assert "the weights of commit 00000010-000001 are not kept" in " ".join(answer.out.split())
    status = here("status", store.root, "--json").json
    assert (status["commits"], status["weights_only"]) == (["00000040-000001"], ["00000020-000001"])


def test_verify_reads_them(here: Here, store: PlainStore) -> None:
    age(store)
    found = here("verify", store.root, "--json")
    assert found.code == 0
    assert [(one["save"], one["state"], one["weights_only"]) for one in found.json["commits"]] == [
        ("00000040-000001", "ok", False),
        ("00000020-000001", "ok", True),
        ("00000010-000001", "ok", True),
    ]
    assert "weights only, cannot be resumed" in here("verify", store.root).out
    payload = next((store.root / "weights" / "00000020-000001").rglob("rank-00001.safetensors"))
    flip_byte(payload)
    told = here("verify", store.root, "--json")
    assert told.code == 12, "damaged, and a job can resume"
    assert all(one.startswith("weights/00000020-000001: ") for one in told.json["problems"]), told.json["problems"]
    (store.root / "weights" / "00000010-000001" / "STORE.json").unlink()
    states = [one["state"] for one in here("verify", store.root, "--json").json["commits"]]
    assert states == ["ok", "damaged", "damaged"]
    assert SaveId(40, 1).name in here("show", store.root).out


def test_a_link_in_their_place_is_not_followed(here: Here, store: PlainStore, tmp_path: Path) -> None:
    other = PlainStore(tmp_path / "other")
    other.save(10)
    (store.root / "weights").mkdir()
    (store.root / "weights" / "00000010-000001").symlink_to(other.root)
    with pytest.raises(DamagedError, match="symbolic link"):
        age(store)
    assert here("verify", other.root).code == 0
