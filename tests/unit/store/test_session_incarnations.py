"""Interruptions and hours, as the epochs of real and simulated stores tell them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from store.catalog import Catalog, open_catalog, open_or_create
from store.names import closed_path, epoch_path
from store.schema import IncarnationRecord
from store.session import (
    IncarnationCount,
    claim_epoch,
    count_incarnations,
    mark_closed,
    new_incarnation,
    newest_epoch,
    read_epoch,
)
from tests.crash.damage import flip, put, remove
from tests.crash.simulated import SimulatedFiles
from tests.crash.workload import Job, Memory

HOUR = 3600.0
"""All commits of these jobs are of midnight, 1 January 2000."""


class Counted(Job):
    """An incarnation that counts, which began some seconds before its commits as far as the records tell."""

    def __init__(self, files: SimulatedFiles, ago: float, world_size: int = 4) -> None:
        super().__init__(files, Memory())
        began = (datetime(2000, 1, 1, tzinfo=UTC) - timedelta(seconds=ago)).isoformat(timespec="milliseconds")
        found = new_incarnation(count_incarnations(self.catalog), world_size)
        self.incarnation = found.replace(began=began)
        self.epoch = claim_epoch(files, self.catalog.store_id, self.incarnation).epoch


def of(files: SimulatedFiles) -> IncarnationCount:
    return count_incarnations(open_catalog(files))


def test_a_new_store_has_neither(files: SimulatedFiles) -> None:
    assert count_incarnations(open_or_create(files)) == IncarnationCount(0, 0.0)


def test_what_ended_without_being_closed_was_interrupted_and_ran_up_to_its_last_commit(files: SimulatedFiles) -> None:
    job = Counted(files, ago=HOUR)
    job.save()
    assert of(files) == IncarnationCount(1, 4 * HOUR)


def test_what_was_closed_was_not_interrupted_and_ran_as_long_as_it_says(files: SimulatedFiles) -> None:
    job = Counted(files, ago=HOUR)
    job.save()
    mark_closed(files, job.catalog.store_id, job.epoch, 100.0)
    mark_closed(files, job.catalog.store_id, job.epoch, 999.0)  # changes nothing
    assert of(files) == IncarnationCount(0, 400.0)


def test_they_add_up_over_incarnations_of_several_sizes(files: SimulatedFiles) -> None:
    for world_size, ago in ((4, HOUR), (2, 2 * HOUR)):
        Counted(files, ago, world_size).save()
    closed = Counted(files, ago=0.0, world_size=8)
    mark_closed(files, closed.catalog.store_id, closed.epoch, 50.0)
    assert of(files) == IncarnationCount(2, 4 * HOUR + 2 * 2 * HOUR + 400.0)


def test_an_incarnation_without_a_commit_counts_as_neither(files: SimulatedFiles) -> None:
    Counted(files, ago=HOUR).save()
    for _ in range(3):
        Counted(files, ago=HOUR)
    assert of(files) == IncarnationCount(1, 4 * HOUR)


def test_a_second_epoch_of_the_same_incarnation_is_no_interruption(files: SimulatedFiles) -> None:
    job = Counted(files, ago=HOUR)
    job.save()
    job.epoch = claim_epoch(files, job.catalog.store_id, job.incarnation).epoch
    assert of(files) == IncarnationCount(1, 4 * HOUR)  # its commit is of its first epoch
    mark_closed(files, job.catalog.store_id, job.epoch, 10.0)
    assert of(files) == IncarnationCount(0, 40.0)


def test_what_does_not_count_changes_nothing(files: SimulatedFiles) -> None:
    """Incarnations under ``every: N``, and imports."""
    Counted(files, ago=HOUR).save()
    for _ in range(3):
        Job(files, Memory()).save()
    assert of(files) == IncarnationCount(1, 4 * HOUR)


@pytest.mark.parametrize("what", ["flipped", "gone", "another's"])
def test_what_cannot_be_read_counts_as_not_there(files: SimulatedFiles, what: str) -> None:
    older = Counted(files, ago=HOUR)
    older.save()
    newer = Counted(files, ago=HOUR)
    newer.save()
    path = epoch_path(newer.epoch)
    if what == "flipped":
        flip(files, path, 30)
    elif what == "gone":
        remove(files, path)
    else:
        remove(files, path)
        put(files, path, files.read(epoch_path(older.epoch), 9999))
    assert of(files).interruptions <= 1
    assert new_incarnation(count_incarnations(open_catalog(files)), 4).interruptions <= 1


def test_a_mark_that_is_damaged_or_of_another_epoch_is_none(files: SimulatedFiles) -> None:
    job = Counted(files, ago=HOUR)
    job.save()
    mark_closed(files, job.catalog.store_id, job.epoch, 10.0)
    whole = files.read(closed_path(job.epoch), 9999)
    flip(files, closed_path(job.epoch), 20)
    assert of(files) == IncarnationCount(1, 4 * HOUR)
    newer = Counted(files, ago=HOUR)
    newer.save()
    put(files, closed_path(newer.epoch), whole)
    assert of(files) == IncarnationCount(2, 8 * HOUR)


def test_a_clock_that_was_set_back_gives_no_negative_hours(files: SimulatedFiles) -> None:
    Counted(files, ago=-HOUR).save()
    assert of(files) == IncarnationCount(1, 0.0)


def test_a_mark_takes_no_epoch_and_hides_none(files: SimulatedFiles) -> None:
    catalog: Catalog = open_or_create(files)
    record = claim_epoch(files, catalog.store_id, new_incarnation(IncarnationCount(), 1))
    mark_closed(files, catalog.store_id, record.epoch, 1.0)
    assert newest_epoch(files) == record.epoch
    assert claim_epoch(files, catalog.store_id).epoch == record.epoch + 1


def test_the_record_of_an_epoch_keeps_it(files: SimulatedFiles) -> None:
    catalog = open_or_create(files)
    incarnation: IncarnationRecord = new_incarnation(IncarnationCount(3, 1.5), 16)
    epoch = claim_epoch(files, catalog.store_id, incarnation).epoch
    assert read_epoch(files, epoch).incarnation == incarnation
    assert claim_epoch(files, catalog.store_id).incarnation is None
