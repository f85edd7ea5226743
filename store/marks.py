"""Mark suspect commits, and order commits for a resume.

A mark records that jobs which resumed from a commit (or from the in-memory version of that name) died before they
committed. ``driftpoint run`` sets it, and withdraws it if falling back did not help. A marked commit stays resumable
but comes after others, so a wrong mark costs a little training. Unreadable marks are ignored.
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
    """The marked commits, each with the cause of the jobs' deaths. ``problems``: unreadable marks."""

    why: Mapping[SaveId, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def saves(self) -> Set[SaveId]:
        return self.why.keys()

    def messages(self, chosen: SaveId, saves: Sequence[SaveId]) -> Iterator[str]:
        """Yield messages about marks that affect a resume from ``chosen`` of all ``saves``."""
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
    """Remove the mark, durably, if there is one."""
    with suppress(MissingError):
        files.unlink(suspect_path(save))
        files.sync_dir(SUSPECT)


def read_suspects(files: Files, store_id: str) -> Suspects:
    """Read all marks of the store. Storage errors and damage are listed in ``problems`` instead of raised."""
    why: dict[SaveId, str] = {}
    problems: list[str] = []
    try:
        names = files.list_dir(SUSPECT)
    except MissingError:
        return Suspects()
    except StorageError as error:
        return Suspects(problems=(f"{error}; no commit counts as suspect",))
    for name in sorted(names):
        save = parse_save_file(name)
        if save is None:
            if not is_temporary(name):
                problems.append(f"{SUSPECT}/{name} is not a mark's name; it is ignored")
            continue
        try:
            why[save] = _read(files, store_id, save).why
        except MissingError:  # withdrawn or pruned just now
            continue
        except (DamagedError, StorageError) as error:
            problems.append(f"{error}; the mark is ignored")
    return Suspects(why, tuple(problems))


def resume_order(saves: Sequence[SaveId], suspects: Set[SaveId], proven: Set[SaveId]) -> list[SaveId]:
    """Return ``saves`` (newest first) in the order to resume from: suspects last.

    If only the newest commit is suspect, the one before it comes first. If the two newest are suspect, the state was
    bad before them, so proven commits come first.
    """
    leading = sum(1 for _ in takewhile(suspects.__contains__, saves))
    sound = [save for save in saves if save not in suspects]
    if leading > 1:
        sound.sort(key=lambda save: save not in proven)
    return sound + [save for save in saves if save in suspects]


def _read(files: Files, store_id: str, save: SaveId) -> SuspectRecord:
    path = suspect_path(save)
    mark = from_bytes(SuspectRecord, files.read(path, _LIMIT), path)
    if (mark.store_id, mark.save) != (store_id, save.name):
        raise DamagedError(f"{path} is the mark of {mark.save} of store {mark.store_id}: it was copied or renamed")
    return mark
