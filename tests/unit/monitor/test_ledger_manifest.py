"""A manifest is drawn only over segments that hold each decided element exactly once."""

from __future__ import annotations

import pytest

from monitor.ledger import CommitDraft, JobFacts, build_manifest
from monitor.observe.units import UnitSize
from policies.base import Choice
from store.commit import Group
from store.errors import DamagedError, SaveError
from store.names import SaveId, Unit
from store.schema import Entry, GroupRecord, LayerRecord, MeasureRecord, PartRecord, TensorRecord, members_digest

DIGEST = "0" * 32
UNIT = Unit("block", "fp32")
SAVE = SaveId(10, 1)


def part(rank: int, *spans: tuple[int, int], finite: bool = True, slot: str = "fp32") -> PartRecord:
    entries = tuple(
        Entry(
            layer="block", slot=slot, fqn="w", start=start, numel=numel, dtype="F32", encoding="raw",
            offset=0, nbytes=4 * numel, xxh3_128=DIGEST,
        )
        for start, numel in spans
    )  # fmt: skip
    return PartRecord(
        store_id=DIGEST, step=10, epoch=1, rank=rank, world_size=2, plan=DIGEST, payload_bytes=100, header_bytes=8,
        header_xxh3_128=DIGEST, entries=entries, run_state=None, run_tensors=(),
        measures=(MeasureRecord(layer="block", slot=slot, moved_sq=9.0, reference_sq=4.0, finite=finite),),
    )  # fmt: skip


def drawn(*parts: PartRecord, unit: Unit = UNIT, numel: int = 10) -> object:
    facts = JobFacts(
        DIGEST, "torch", "full", (LayerRecord(name="block", block=True),),
        {"w": TensorRecord(layer="block", shape=(10,), dtype="F32", kind="trainable")},
    )  # fmt: skip
    draft = CommitDraft(
        facts=facts, save=SAVE, world_size=2, commits=1, previous=None, find_kept=dict,
        saved={unit: Choice("raw", "first")},
        sizes={unit: UnitSize(numel, 4 * numel, members_digest({"w": (numel, "F32")}))}, groups={},
    )  # fmt: skip
    return build_manifest(draft, Group(parts, GroupRecord(world_size=2, payload_bytes=100, parts=DIGEST)))


def test_every_element_once_is_drawn() -> None:
    result = drawn(part(0, (0, 5)), part(1, (5, 5)))
    assert result.manifest.units[0].numel == 10  # type: ignore[attr-defined]
    assert result.drift == {UNIT: 1.5}  # type: ignore[attr-defined]


def test_an_overlap_that_makes_up_for_a_hole_is_refused() -> None:
    with pytest.raises(DamagedError, match="overlap"):
        drawn(part(0, (0, 5)), part(1, (4, 5)))


def test_a_hole_is_refused() -> None:
    with pytest.raises(SaveError, match="9 elements of w/fp32"):
        drawn(part(0, (0, 5)), part(1, (5, 4)))


def test_a_hole_in_a_moment_is_refused_though_the_ranks_agreed_on_what_they_have() -> None:
    """It would be committed, and no resume could fill the whole moment."""
    with pytest.raises(SaveError, match="9 elements of w/exp_avg, whose shape is"):
        drawn(part(0, (0, 5), slot="exp_avg"), part(1, (5, 4), slot="exp_avg"), unit=Unit("block", "exp_avg"), numel=9)


def test_what_is_not_finite_on_one_rank_is_not_drawn_without_a_version_before() -> None:
    with pytest.raises(SaveError, match="NaN or Inf"):
        drawn(part(0, (0, 5)), part(1, (5, 5), finite=False))
