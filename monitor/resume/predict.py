"""Predict the resume step before the model exists (HF Trainer).

What a resume brought where something else had been foreseen: a file beside the store, for the attempt that follows.

A training loop that fixed its place in the data first cannot go on then; started anew it would foresee the same again,
were it not told. Rank 0 writes and reads. The file says nothing that is not in the store, and may be removed.

What a resume will bring, told before there is a model: for training loops that fix their place in the data first.

It goes through the records as a resume does, memory tier included, and reads run states, but no tensor of the model.
So two things it cannot know: payload that turns out to be damaged, and a model that what is stored does not fit.
Whoever builds on it compares with what the resume has brought. Changes nothing, owns nothing. Training thread;
collective.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monitor.config.load import Config
from monitor.distributed import Group, run_on_all_ranks, run_on_rank0
from monitor.memory.recovery import find_newest_snapshot
from monitor.resume.resume import memory_or_store
from monitor.resume.select import ResumePoint, read_run_state, resolved, select_commit, select_run_state, slots_of
from monitor.run_state import UserState
from monitor.save.store_session import open_existing_store
from store.catalog import Catalog
from store.location import beside, store_place
from store.memory.layout import Tier
from store.names import SaveId
from store.resolve import RejectedVersion
from store.schema import GroupRecord

_log = logging.getLogger("driftpoint")


@dataclass(frozen=True)
class PredictionOverride:
    """foreseen: name of the save whose run state was expected. onward: of the one whose run state was taken instead;
    group: its segment group's record."""

    store_id: str
    foreseen: str
    onward: str
    group: Mapping[str, Any]


def read_override(config: Config, store_id: str) -> PredictionOverride | None:
    """The one of this store, if there is any."""
    try:
        found = PredictionOverride(**json.loads(_path(config).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _log.warning("%s cannot be read and counts for nothing: %r", _path(config), error)
        return None
    return found if found.store_id == store_id else None


def write_override(config: Config, correction: PredictionOverride) -> None:
    """Tell the next attempt. Where that is not possible it is told to people."""
    try:
        _path(config).write_text(json.dumps(asdict(correction)))
    except OSError as error:
        _log.warning("the next attempt will expect the same again: %s cannot be written: %s", _path(config), error)


def remove_override(config: Config) -> None:
    """What was foreseen came about."""
    try:
        _path(config).unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s is of no use any more and cannot be removed: %s", _path(config), error)


def _path(config: Config) -> Path:
    return beside(store_place(config.store), ".resume.json")


@dataclass(frozen=True)
class ResumePrediction:
    """save: whose run state will be taken; its step is the one to go on from. user: this rank's state of the objects
    in ``state=[...]``, None where the commit has none (it was imported). memory: what memory holds was counted in; else
    the resume is to leave it out."""

    save: SaveId
    user: list[Any] | None
    memory: bool


def predict_resume(config: Config, group: Group, objects: int) -> ResumePrediction | None:
    """What a job with these settings will resume, None where there is nothing. objects: in its ``state=[...]``.

    Raises as :meth:`monitor.Checkpointer.resume` does, on all ranks."""
    catalog = open_existing_store(config.store, group, config.s3.options())
    if catalog is None:
        return None
    remembered = None
    if config.memory.enabled:
        tier = Tier(Path(config.memory.path), catalog.store_id)
        remembered = find_newest_snapshot(tier, catalog, None, group)
    user = UserState([_Stateless()] * objects)
    onward = memory_or_store(lambda found: _onward(found, config, group, user), catalog, remembered)
    if onward is None:
        return None
    corrected = _corrected(onward.save, catalog, config, group)
    return corrected or ResumePrediction(onward.save, onward.state["user"], remembered is not None)


def _corrected(expected: SaveId, catalog: Catalog, config: Config, group: Group) -> ResumePrediction | None:
    """What came of it the last time that this was expected, if it was something else."""
    told = run_on_rank0(group, lambda: _told(config, catalog))
    if told is None or told["foreseen"] != expected.name:
        return None
    save = SaveId.parse(told["onward"])
    state = read_run_state(catalog, save, GroupRecord(**told["group"]), group)
    return None if state is None else ResumePrediction(save, state["user"], False)


def _told(config: Config, catalog: Catalog) -> dict[str, Any] | None:
    found = read_override(config, catalog.store_id)
    return None if found is None else asdict(found)


def _onward(catalog: Catalog, config: Config, group: Group, user: UserState) -> ResumePoint | None:
    bad: frozenset[RejectedVersion] = frozenset()
    while True:
        name, _, _ = run_on_rank0(group, lambda bad=bad: select_commit(catalog, bad))  # type: ignore[misc]
        if name is None:
            return None
        catalog.forget()
        resolution = run_on_all_ranks(group, lambda name=name, bad=bad: resolved(catalog, SaveId.parse(name), bad))  # type: ignore[misc]
        slots = slots_of(resolution)
        onward = select_run_state(catalog, resolution, slots, group, user=user, settings=config.resume)
        if not isinstance(onward, RejectedVersion):
            return onward
        bad |= {onward}


class _Stateless:
    """Stands for an object that is not there yet."""

    def state_dict(self) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is loaded: only its place counts."""
