"""Predict the resume step before the model is built, and override a prediction that was wrong.

The Hugging Face Trainer skips data before it loads a checkpoint, so it needs the step first. The prediction reads
records as a resume does, in-memory snapshots included, and run states, but no tensors. It therefore cannot know about
damaged payload or a model that does not match: the caller compares it with the actual resume. If they differ, the
actual step is written to a file beside the store, so that the next attempt predicts correctly. Training thread;
collective.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from monitor.config.load import Config
from monitor.distributed import Group, run_on_all_ranks, run_on_rank0
from monitor.memory.recovery import find_newest_snapshot
from monitor.resume.resume import memory_or_store
from monitor.resume.select import ResumePoint, read_run_state, resolve_commit, select_commit, select_run_state
from monitor.run_state import RunState, UserState
from monitor.save.store_session import open_existing_store
from store.catalog import Catalog
from store.errors import DriftpointError
from store.location import beside, store_place
from store.memory.layout import Tier
from store.names import SaveId
from store.resolve import RejectedVersion
from store.schema import GroupRecord

_log = logging.getLogger("driftpoint")


@dataclass(frozen=True)
class PredictionOverride:
    """A wrong prediction and the actual resume point. The field names are the keys of a JSON file."""

    store_id: str
    foreseen: str  # save whose run state was predicted
    onward: str  # save whose run state was resumed
    group: Mapping[str, Any]  # record of the segment group of ``onward``


def read_override(config: Config, store_id: str) -> PredictionOverride | None:
    """Return the override of this store, None if there is none. Rank 0."""
    try:
        override = PredictionOverride(**json.loads(_path(config).read_text()))
        GroupRecord(**override.group)
        SaveId.parse(override.onward)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, DriftpointError) as error:
        _log.warning("%s cannot be read and is ignored: %r", _path(config), error)
        return None
    return override if override.store_id == store_id else None


def write_override(config: Config, override: PredictionOverride) -> None:
    """Write an override for the next attempt; log a warning if that fails. Rank 0."""
    try:
        _path(config).write_text(json.dumps(asdict(override)))
    except OSError as error:
        _log.warning("%s cannot be written, so the next attempt may predict a wrong step: %s", _path(config), error)


def remove_override(config: Config) -> None:
    """Remove the override after a correct prediction. Rank 0."""
    try:
        _path(config).unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s is outdated and cannot be removed: %s", _path(config), error)


def _path(config: Config) -> Path:
    return beside(store_place(config.store_path), ".resume.json")


@dataclass(frozen=True)
class ResumePrediction:
    """The expected result of a resume."""

    save: SaveId  # save whose run state will be loaded; the job continues from its step
    user: list[Any] | None  # this rank's state of each object in `state=`; None if the commit, an import, has none
    memory: bool  # In-memory snapshots were considered. If False, the resume must not use them


def predict_resume(config: Config, group: Group, user: UserState) -> ResumePrediction | None:
    """Predict what a job with these settings will resume; None if the store is empty. Changes nothing. Collective.

    user: the objects in ``state=``. Raises the errors of :meth:`monitor.Checkpointer.resume`."""
    catalog = open_existing_store(config.store_path, group, config.s3.options())
    if catalog is None:
        return None
    snapshot = None
    if config.memory.enabled:
        tier = Tier(Path(config.memory.path), catalog.store_id)
        snapshot = find_newest_snapshot(tier, catalog, None, group)
    point = memory_or_store(lambda view: _predict_resume_point(view, config, group, user), catalog, snapshot)
    if point is None:
        return None
    overridden = _apply_override(point.save, catalog, config, group)
    return overridden or ResumePrediction(point.save, _states(point.state), snapshot is not None)


def _states(state: RunState) -> list[Any] | None:
    return None if state.user is None else [one.state for one in state.user]


def _apply_override(predicted: SaveId, catalog: Catalog, config: Config, group: Group) -> ResumePrediction | None:
    override = run_on_rank0(group, partial(read_override, config, catalog.store_id))
    if override is None or override.foreseen != predicted.name:
        return None
    save = SaveId.parse(override.onward)
    found = read_run_state(catalog, save, GroupRecord(**override.group), group)
    return None if found.state is None else ResumePrediction(save, _states(found.state), False)


def _predict_resume_point(catalog: Catalog, config: Config, group: Group, user: UserState) -> ResumePoint | None:
    bad: frozenset[RejectedVersion] = frozenset()
    while True:
        name, _, _ = run_on_rank0(group, partial(select_commit, catalog, bad))
        if name is None:
            return None
        catalog.forget()
        resolution = run_on_all_ranks(group, partial(resolve_commit, catalog, SaveId.parse(name), bad))
        point = select_run_state(catalog, resolution, resolution.slots(), group, user=user, settings=config.resume)
        if not isinstance(point, RejectedVersion):
            return point
        bad |= {point}
