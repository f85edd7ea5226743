"""Read and prune the journal: records of optimizer steps, which a resume repeats to reach a later step.

The **record** of step t holds what a resume needs to repeat it on the state of step t - 1: the gradients,
hyperparameters and random states before the step, the buffers and run state after it. It is a segment group in
``journal/``, written like a save's, and counts once all ranks' parts are there; no manifest names it. It names what it
continues: saves, snapshots and record of step t - 1. So records of an abandoned branch never pass for another's.

Reads records only. Removing one is safe at any time: only later steps can then not be reached any more."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from store.catalog import Catalog
from store.commit import Expected, wait_for_group
from store.errors import DamagedError, SaveError, StorageError
from store.fragments import FragmentIndex, Source
from store.names import JOURNAL, SEGMENTS, SaveId, group_by_key, parse_save_dir, segment_dir
from store.resolve import Resolution
from store.schema import GroupRecord, PartRecord
from store.segment import read_part
from store.session import require_newest
from store.storage.atomic import remove_all
from store.storage.local import Files, list_or_empty

CONTINUES = "continues"  # key in the facts of a record: names of the state before it
STEPPED = "journal"  # key in its run state: what the optimizers had before the step
SAMPLE = "sample"  # likewise: some bytes of this rank's weights after it
KIND = "kind"  # key in the param groups of STEPPED: the class of their optimizer, with its module


@dataclass(frozen=True)
class JournalStep:
    """One record: its name, and the group that all ranks must find."""

    save: SaveId
    record: GroupRecord
    continues: frozenset[str]


@dataclass(frozen=True)
class Chain:
    """Records, in order, that lead from the oldest version of a commit to a later step."""

    oldest: int  # step of that version
    steps: tuple[JournalStep, ...]


def journal_catalog(catalog: Catalog) -> Catalog:
    """Return a catalog of the segment groups of the journal."""
    return Catalog(catalog.files.below(JOURNAL), catalog.record)


def recorded(files: Files) -> list[SaveId]:
    """Return the names of all records in the directory of a journal, incomplete ones included."""
    return [save for name in list_or_empty(files, SEGMENTS) if (save := parse_save_dir(name)) is not None]


def find_chain(journal: Catalog, commit: SaveId, versions: Collection[SaveId]) -> Chain | None:
    """Return the records that continue ``commit``; None if there are none.

    If some ``versions`` (of the units that an optimizer updates) are older, the records that lead from the oldest of
    them to ``commit`` come first. Also None if one of those is missing, or a version is of another branch."""
    by_step = group_by_key((save.step, save) for save in sorted(recorded(journal.files), reverse=True))
    oldest = min((save.step for save in versions), default=commit.step)
    names, step, back = frozenset({commit.name}), commit.step, list[JournalStep]()
    first = names
    while True:
        if not {save.name for save in versions if save.step == step} <= names:
            return None
        if step <= oldest:
            break
        record = _first(journal, [save for save in by_step.get(step, ()) if save.name in names])
        if record is None:
            return None
        back.append(record)
        names, step = record.continues, step - 1
    ahead = list(_ahead(journal, commit.step, first, by_step))
    return Chain(oldest, (*reversed(back), *ahead)) if back or ahead else None


def chain_from(journal: Catalog, resolution: Resolution) -> Chain | None:
    """Return the records that continue a commit, if its versions fit: weights need the moments of the same step."""
    moving = {(unit.layer, one.save) for unit, one in resolution.versions.items() if one.record.moving}
    if len({layer for layer, _ in moving}) < len(moving):
        return None
    return find_chain(journal, resolution.manifest.save, {save for _, save in moving})


def _ahead(
    journal: Catalog, step: int, names: frozenset[str], by_step: Mapping[int, list[SaveId]]
) -> Iterator[JournalStep]:
    while True:
        step += 1
        record = _first(journal, by_step.get(step, ()), names)
        if record is None:
            return
        yield record
        names = frozenset({record.save.name})


def _first(journal: Catalog, saves: Collection[SaveId], names: frozenset[str] = frozenset()) -> JournalStep | None:
    """Return the first whole record; if ``names`` are given, of those that continue one of them."""
    for save in saves:
        try:
            first = read_part(journal.files, journal.store_id, save, 0)
            continues = frozenset(map(str, first.facts.get(CONTINUES, ())))
            if names and names.isdisjoint(continues):
                continue
            expected = Expected(journal.store_id, save, first.world_size, first.plan)
            return JournalStep(save, wait_for_group(journal.files, expected, 0.0).record, continues)
        except (DamagedError, SaveError, StorageError):  # torn, damaged or being written: as if it were not there
            continue
    return None


def unreached(journal: Catalog, last: SaveId) -> int | None:
    """Return the newest step with a whole record that the records up to ``last`` do not lead to, if there is one."""
    later = (save for save in recorded(journal.files) if save.epoch >= last.epoch and save.step > last.step + 1)
    return next((save.step for save in sorted(later, reverse=True) if _first(journal, [save])), None)


def fragments_of(parts: Mapping[int, PartRecord]) -> FragmentIndex[Source]:
    """Return the stored fragments of a record."""
    return FragmentIndex(Source(part, entry) for part in parts.values() for entry in part.entries)


def prune_journal(files: Files, store: Files, epoch: int, step: int) -> None:
    """Remove the records up to ``step``. Raises FencedError if another job took the store over."""
    for save in recorded(files):
        if save.step <= step:
            require_newest(store, epoch)
            folder = segment_dir(save)
            remove_all(files, [f"{folder}/{one}" for one in list_or_empty(files, folder)])
            files.remove_dir(folder)
