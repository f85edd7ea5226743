"""What a resume will bring, told before there is a model: for training loops that fix their place in the data first.

It goes through the records as a resume does, memory tier included, and reads run states, but no tensor of the model.
So two things it cannot know: payload that turns out to be damaged, and a model that what is stored does not fit.
Whoever builds on it compares with what the resume has brought. Changes nothing, owns nothing. Training thread;
collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monitor.agree import everywhere, on_first
from monitor.chosen import choose, resolved, slots_of
from monitor.config import Config
from monitor.correction import read_correction
from monitor.group import Group
from monitor.onward import Onward, find_onward, read_run_state
from monitor.opened import open_existing
from monitor.remembered import newest_remembered
from monitor.run_state import UserState
from monitor.standing import remembered_or_stored
from store.catalog import Catalog
from store.memory.tier import Tier
from store.names import SaveId
from store.schema import GroupRecord
from store.versions import Bad


@dataclass(frozen=True)
class Foreseen:
    """save: whose run state will be taken; its step is the one to go on from. user: this rank's state of the objects
    in ``state=[...]``, None where the commit has none (it was imported). memory: what memory holds was counted in; else
    the resume is to leave it out."""

    save: SaveId
    user: list[Any] | None
    memory: bool


def foresee(config: Config, group: Group, objects: int) -> Foreseen | None:
    """What a job with these settings will resume, None where there is nothing. objects: in its ``state=[...]``.

    Raises as :meth:`monitor.Checkpointer.resume` does, on all ranks."""
    catalog = open_existing(config.store, group, config.s3.options())
    if catalog is None:
        return None
    remembered = None
    if config.memory.enabled:
        tier = Tier(Path(config.memory.path), catalog.store_id)
        remembered = newest_remembered(tier, catalog, None, group)
    user = UserState([_Stateless()] * objects)
    onward = remembered_or_stored(lambda found: _onward(found, config, group, user), catalog, remembered)
    if onward is None:
        return None
    corrected = _corrected(onward.save, catalog, config, group)
    return corrected or Foreseen(onward.save, onward.state["user"], remembered is not None)


def _corrected(expected: SaveId, catalog: Catalog, config: Config, group: Group) -> Foreseen | None:
    """What came of it the last time that this was expected, if it was something else."""
    told = on_first(group, lambda: _told(config, catalog))
    if told is None or told["foreseen"] != expected.name:
        return None
    save = SaveId.parse(told["onward"])
    state = read_run_state(catalog, save, GroupRecord(**told["group"]), group)
    return None if state is None else Foreseen(save, state["user"], False)


def _told(config: Config, catalog: Catalog) -> dict[str, Any] | None:
    found = read_correction(config, catalog.store_id)
    return None if found is None else asdict(found)


def _onward(catalog: Catalog, config: Config, group: Group, user: UserState) -> Onward | None:
    bad: frozenset[Bad] = frozenset()
    while True:
        name, _, _ = on_first(group, lambda bad=bad: choose(catalog, bad))  # type: ignore[misc]
        if name is None:
            return None
        catalog.forget()
        resolution = everywhere(group, lambda name=name, bad=bad: resolved(catalog, SaveId.parse(name), bad))  # type: ignore[misc]
        slots = slots_of(resolution)
        onward = find_onward(catalog, resolution, slots, group, user=user, settings=config.resume)
        if not isinstance(onward, Bad):
            return onward
        bad |= {onward}


class _Stateless:
    """Stands for an object that is not there yet."""

    def state_dict(self) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is loaded: only its place counts."""
