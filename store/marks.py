"""Commits that jobs died of: the marks, and the order in which commits are resumed from where there are any.

A mark says that jobs which resumed from a commit (or from a version in memory, which is named alike) died before they
committed anything. ``driftpoint run`` sets it, and withdraws it where falling back did not help. It takes no commit
away, it only puts others before it, so that a wrong mark costs a little training and a missing one nothing. One that
cannot be read counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

from store.errors import DamagedError, ExistsError, MissingError, StorageError
from store.layout import SUSPECT, parse_save_file, suspect_path
from store.names import SaveId
from store.schema import SuspectRecord, from_bytes, to_bytes
from store.storage.atomic import ensure_dir, is_temporary, write_new
from store.storage.local import Files

_LIMIT = 1 << 16


@dataclass(frozen=True)
class Suspects:
    """The marked commits, each with what jobs died of. problems: marks that cannot be read."""

    why: Mapping[SaveId, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def saves(self) -> Set[SaveId]:
        """The marked commits."""
        return self.why.keys()

    def told(self, chosen: SaveId, saves: Sequence[SaveId]) -> Iterator[str]:
        """What there is to say where ``chosen`` of all ``saves`` is resumed from."""
        if chosen in self.why:
            yield f"{chosen} is suspect ({self.why[chosen]}), but no other commit can be resumed"
        for save in saves:
            if save > chosen and save in self.why:
                yield f"{save} is suspect ({self.why[save]}): older commits are resumed from first"


def mark_suspect(files: Files, store_id: str, save: SaveId, why: str) -> None:
    """Record that jobs which resumed from the commit died. Durable on return. A second mark changes nothing."""
    ensure_dir(files, SUSPECT)
    data = to_bytes(SuspectRecord(store_id=store_id, save=save.name, why=why))
    with suppress(ExistsError):
        write_new(files, suspect_path(save), lambda file: file.write(data))


def withdraw_suspect(files: Files, save: SaveId) -> None:
    """Take the mark back, durably. Nothing happens where there is none."""
    with suppress(MissingError):
        files.unlink(suspect_path(save))
        files.sync_dir(SUSPECT)


def read_suspects(files: Files, store_id: str) -> Suspects:
    """All marks of the store. Raises nothing that a disk or a damaged file may cause: it is in ``problems``."""
    why: dict[SaveId, str] = {}
    problems: list[str] = []
    try:
        names = files.list_dir(SUSPECT)
    except MissingError:
        return Suspects()
    except StorageError as error:
        return Suspects(problems=(f"{error}; no commit is taken for a suspect",))
    for name in sorted(names):
        save = parse_save_file(name)
        if save is None:
            if not is_temporary(name):
                problems.append(f"{SUSPECT}/{name} is not a mark's name, and counts for nothing")
            continue
        try:
            why[save] = _read(files, store_id, save).why
        except MissingError:  # withdrawn or pruned just now
            continue
        except (DamagedError, StorageError) as error:
            problems.append(f"{error}; the mark counts for nothing")
    return Suspects(why, tuple(problems))


def resume_order(saves: Sequence[SaveId], suspects: Set[SaveId], proven: Set[SaveId]) -> list[SaveId]:
    """The order to resume in, of ``saves``, newest first: suspects last.

    One suspect costs no more than the way to the commit before it. Where the two newest are suspect the state was bad
    before them: then those go first that a job once resumed from and took a step.
    """
    leading = sum(1 for _ in takewhile(suspects.__contains__, saves))
    sound = [save for save in saves if save not in suspects]
    if leading > 1:
        sound.sort(key=lambda save: save not in proven)
    return sound + [save for save in saves if save in suspects]


def _read(files: Files, store_id: str, save: SaveId) -> SuspectRecord:
    path = suspect_path(save)
    found = from_bytes(SuspectRecord, files.read(path, _LIMIT), path)
    if (found.store_id, found.save) != (store_id, save.name):
        raise DamagedError(f"{path} is the mark of {found.save} of store {found.store_id}: it was copied or renamed")
    return found
