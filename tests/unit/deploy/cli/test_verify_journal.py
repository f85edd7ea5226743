"""``driftpoint verify`` and ``merge`` of a store with a journal: how far it leads, and what is damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.catalog import open_catalog
from store.names import SaveId
from store.segment import SegmentDraft, write_segment
from store.storage.local import LocalFiles
from tests.support.cli import Here
from tests.support.journaled import DAMAGE, Job, damage

VERIFIED: dict[str, tuple[str | None, int, int, int | None]] = {
    "whole": (None, 0, 11, None),
    "flipped": ("flipped", 12, 9, 11),
    "part flipped": ("part flipped", 12, 9, 11),
    "torn": ("torn", 12, 9, 11),
    "lost in the middle": ("gone", 0, 9, 11),
    "part lost in the middle": ("part lost", 0, 9, 11),
}


@pytest.mark.parametrize("case", VERIFIED)
def test_verify_reads_the_journal(tmp_path: Path, case: str, here: Here) -> None:
    """The chain that a resume takes, from the commit of step 8 on, with the record of step 10 in trouble."""
    how, code, leads_to, beyond = VERIFIED[case]
    store, job = tmp_path / "store", Job()
    job.run(job.attach(store), 11)
    payload = sum(one.stat().st_size for one in store.rglob("*.safetensors"))
    if how is not None:
        DAMAGE[how](store / "journal/segments/00000010-000001")
    answer = here("verify", store, "--json")
    assert answer.code == code
    assert answer.json["ok"] == (code == 0)
    assert answer.json["journal"] == {"step": leads_to, "beyond": beyond}
    assert {one["state"] for one in answer.json["commits"]} == {"ok"}
    assert len(answer.json["problems"]) == (1 if code else 0)
    assert all("journal: " in one and "00000010-000001" in one for one in answer.json["problems"])
    text = here("verify", store)
    assert text.code == code
    said = " ".join(text.out.split())
    assert f"The journal leads to step {leads_to}" in said
    assert ("not to its records up to step 11" in said) == (beyond is not None)
    if how is None:
        assert answer.json["bytes_read"] > 0.5 * payload
    if how != "flipped":  # status reads no payload
        assert here("status", store, "--json").json["resume"]["journal"] == leads_to
        shown = " ".join(here("status", store).out.split())
        assert f"from step 8, exact; the journal leads to step {leads_to}" in shown
    again = Job(seed=2)
    ckpt = again.attach(store)
    assert ckpt.resume() == leads_to
    ckpt.finish(clean=False)


@pytest.mark.parametrize("torn", ["rank-00000.json", "rank-00000.safetensors"])
def test_a_torn_tail_is_no_damage(tmp_path: Path, torn: str, here: Here) -> None:
    """A crash leaves a temporary file, or one of the two files."""
    store, job = tmp_path / "store", Job()
    job.run(job.attach(store), 7)
    last = store / "journal/segments/00000007-000001"
    (last / torn).rename(last / f".tmp-0123456789ab-{torn}")
    answer = here("verify", store, "--json")
    assert (answer.code, answer.json["problems"]) == (0, [])
    assert answer.json["journal"] == {"step": 6, "beyond": None}


def test_a_record_that_only_the_second_rank_wrote_is_no_damage(tmp_path: Path, here: Here) -> None:
    """The first one met a full disk, or was killed."""
    store, job = tmp_path / "store", Job()
    job.run(job.attach(store), 7)
    catalog = open_catalog(LocalFiles(store))
    record = SegmentDraft(catalog.store_id, SaveId(8, 1), 1, 2, "0" * 32, (), {}, (), {})
    write_segment(catalog.files.below("journal"), record)
    answer = here("verify", store, "--json")
    assert (answer.code, answer.json["problems"]) == (0, [])
    assert answer.json["journal"] == {"step": 7, "beyond": None}


def test_verify_of_a_composite_reads_the_records_that_it_needs(tmp_path: Path, here: Here) -> None:
    store, job = tmp_path / "store", Job()
    job.run(job.attach(store, every=2, policy={"name": "parity", "k": 2}), 8)
    assert here("verify", store, "--json").json["journal"] == {"step": 8, "beyond": None}
    assert here("status", store, "--json").json["resume"]["journal"] == 8  # and there it is exact
    damage(store / "journal/segments/00000007-000001/rank-00000.safetensors")
    assert here("verify", store, "--json").code == 12


def test_verify_of_a_damaged_commit_says_where_a_resume_ends(tmp_path: Path, here: Here) -> None:
    """A fragment of step 8 falls back to step 4, from where the records lead on."""
    store, job = tmp_path / "store", Job()
    job.run(job.attach(store), 11)
    damage(store / "segments/00000008-000001/rank-00000.safetensors")
    led = here("verify", store, "--json").json["journal"]["step"]
    ckpt = Job(seed=2).attach(store)
    assert ckpt.resume() == led == 11
    ckpt.finish(clean=False)


def test_merge_takes_a_step_of_the_journal_and_labels_it(tmp_path: Path, here: Here) -> None:
    store, job = tmp_path / "store", Job()
    job.run(job.attach(store), 7)
    refused = here("merge", store, "--layout", "hf", "--step", "8", "--out", tmp_path / "out")
    assert refused.code != 0
    assert "has no checkpoint 8, and its journal does not lead there; there is step 4" in " ".join(refused.err.split())
    made = here("merge", store, "--layout", "dcp", "--step", "6", "--out", tmp_path / "out")
    said = " ".join(made.out.split())
    assert made.code == 0
    assert "not exact: 1 problem" in said
    assert "the steps after 4 were taken again from the journal" in said
    again = Job(seed=2)
    ckpt = again.attach(store)
    ckpt.resume(step=6)
    ckpt.finish(clean=False)
    exact = here("merge", store, "--layout", "dcp", "--step", "6", "--out", tmp_path / "exact")
    assert exact.code == 0
    assert "not exact" not in exact.out


def test_a_store_without_a_journal_has_none_to_verify(tmp_path: Path, here: Here) -> None:
    store, job = tmp_path / "store", Job()
    job.run(job.attach(store, journal={"enabled": False}), 5)
    assert here("verify", store, "--json").json["journal"] == {"step": None, "beyond": None}
    assert "journal" not in here("verify", store).out
    assert here("status", store, "--json").json["resume"]["journal"] is None
    assert "the journal leads" not in here("status", store).out
