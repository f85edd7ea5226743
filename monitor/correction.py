"""What a resume brought where something else had been foreseen: a file beside the store, for the attempt that follows.

A training loop that fixed its place in the data first cannot go on then; started anew it would foresee the same again,
were it not told. Rank 0 writes and reads. The file says nothing that is not in the store, and may be removed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monitor.config import Config
from store.place import beside, store_place

_log = logging.getLogger("driftpoint")


@dataclass(frozen=True)
class Correction:
    """foreseen: name of the save whose run state was expected. onward: of the one whose run state was taken instead;
    group: its segment group's record."""

    store_id: str
    foreseen: str
    onward: str
    group: Mapping[str, Any]


def read_correction(config: Config, store_id: str) -> Correction | None:
    """The one of this store, if there is any."""
    try:
        found = Correction(**json.loads(_path(config).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _log.warning("%s cannot be read and counts for nothing: %r", _path(config), error)
        return None
    return found if found.store_id == store_id else None


def write_correction(config: Config, correction: Correction) -> None:
    """Tell the next attempt. Where that is not possible it is told to people."""
    try:
        _path(config).write_text(json.dumps(asdict(correction)))
    except OSError as error:
        _log.warning("the next attempt will expect the same again: %s cannot be written: %s", _path(config), error)


def drop_correction(config: Config) -> None:
    """What was foreseen came about."""
    try:
        _path(config).unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s is of no use any more and cannot be removed: %s", _path(config), error)


def _path(config: Config) -> Path:
    return beside(store_place(config.store), ".resume.json")
