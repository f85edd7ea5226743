from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from store.errors import DamagedError
from store.names import (
    Fragment,
    SaveId,
    Unit,
    epoch_path,
    manifest_path,
    parse_epoch,
    parse_rank_file,
    parse_save_dir,
    parse_save_file,
    part_path,
    payload_path,
    proven_path,
)
from store.schema import ManifestRecord, from_bytes, seal, to_bytes

STEPS = st.integers(0, 10**12 - 1)
EPOCHS = st.integers(0, 10**9 - 1)
SAVES = st.builds(SaveId, STEPS, EPOCHS)

NOT_A_SAVE = [
    "", "1-1", "00000120", "00000120-3", "0000120-000003", "000000120-000003", "00000120-0000003", "00000120-000003 ",
    "00000120-000003\n", " 00000120-000003", "+0000120-000003", "-0000120-000003", "0000012०-000003", "00000120_000003",
    "00000120-000003.json", "../00000120-000003",
]  # fmt: skip


@given(SAVES)
def test_save_names_round_trip(save: SaveId) -> None:
    assert SaveId.parse(save.name) == save
    assert str(save) == save.name
    assert parse_save_dir(save.name) == save
    assert parse_save_file(manifest_path(save).rpartition("/")[2]) == save
    assert parse_save_file(proven_path(save).rpartition("/")[2]) == save


@pytest.mark.parametrize("name", NOT_A_SAVE, ids=repr)
def test_what_is_no_save_name(name: str) -> None:
    with pytest.raises(ValueError, match="00000120-000003"):
        SaveId.parse(name)
    assert parse_save_dir(name) is None
    assert parse_save_file(name + ".json") is None


@given(SAVES, SAVES)
def test_newer_is_a_later_epoch_then_a_later_step(one: SaveId, other: SaveId) -> None:
    assert (one < other) == ((one.epoch, one.step) < (other.epoch, other.step))
    assert max(one, other).epoch == max(one.epoch, other.epoch)


def test_names_sort_by_step_only_for_people() -> None:
    fenced, current = SaveId(step=900, epoch=1), SaveId(step=100, epoch=2)
    assert current > fenced
    assert current.name < fenced.name


@given(EPOCHS)
def test_epoch_files_round_trip(epoch: int) -> None:
    assert parse_epoch(epoch_path(epoch).rpartition("/")[2]) == epoch


@pytest.mark.parametrize(
    "name", ["3.json", "0000003.json", "000003.json~", "000003", "00000३.json", ".tmp-000003.json"]
)
def test_what_is_no_epoch_file(name: str) -> None:
    assert parse_epoch(name) is None


@given(SAVES, st.integers(0, 10**8 - 1))
def test_rank_files_round_trip(save: SaveId, rank: int) -> None:
    assert parse_rank_file(part_path(save, rank).rpartition("/")[2]) == (rank, "json")
    assert parse_rank_file(payload_path(save, rank).rpartition("/")[2]) == (rank, "safetensors")


@pytest.mark.parametrize(
    "name",
    ["rank-1.json", "rank-000001.json", "rank-00001.pt", "rank-00001.json.bak", "rank-0000१.json", "Rank-00001.json"],
)
def test_what_is_no_rank_file(name: str) -> None:
    assert parse_rank_file(name) is None


def test_fragments_cannot_be_negative() -> None:
    assert Fragment("w", "fp32", 3, 4).stop == 7
    for start, numel in ((-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="must be >= 0"):
            Fragment("w", "fp32", start, numel)


def test_a_unit_reads_as_layer_and_slot() -> None:
    assert str(Unit("model.layers.3", "exp_avg")) == "model.layers.3/exp_avg"


@pytest.mark.parametrize("name", NOT_A_SAVE, ids=repr)
def test_records_believe_only_names_that_parse(name: str) -> None:
    """A record with a right checksum and a wrong name is damage, not a ValueError later on."""
    manifest = ManifestRecord(
        store_id="0" * 32, step=1, epoch=1, commits=1, world_size=1, framework="f", policy="p", created="",
        previous=None, bytes_avoided=0, layers=(), tensors={}, groups={}, units=(),
    )  # fmt: skip
    assert from_bytes(ManifestRecord, to_bytes(manifest), "it") == manifest
    group = {"world_size": 1, "payload_bytes": 0, "parts": "0" * 32}
    unit = {
        "layer": "a", "slot": "b", "save": name, "encoding": "raw", "numel": 1, "nbytes": 4, "drift": None,
        "staleness": 0, "moving": True,
    }  # fmt: skip
    for wrong in ({"previous": name}, {"groups": {name: group}}, {"units": (unit,)}):
        with pytest.raises(DamagedError, match="it is no ManifestRecord"):
            from_bytes(ManifestRecord, seal({**to_builtins(manifest), **wrong}), "it")


def test_a_save_id_keeps_its_fields_in_a_copy_a_pickle_and_a_set() -> None:
    save = SaveId(step=120, epoch=3)
    assert (save.step, save.epoch, save.name) == (120, 3, "00000120-000003")
    copies = [copy.copy(save), copy.deepcopy(save), *(pickle.loads(pickle.dumps(save, at)) for at in range(6))]
    assert {*copies, SaveId.parse(save.name)} == {save} and {(one.step, one.epoch) for one in copies} == {(120, 3)}
    assert SaveId(900, 2) < save < SaveId(121, 3) and repr(save) == "SaveId(step=120, epoch=3)"
