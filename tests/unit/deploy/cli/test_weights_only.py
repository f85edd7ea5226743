"""Weights-only commits from the command line: pruned to, shown, verified, merged; refused where state is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from store.catalog import open_catalog
from store.errors import DamagedError, UnsupportedError, UsageError
from store.names import SaveId
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
    assert here("verify", store.root).code == 12, "damaged, and a job can resume"
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
