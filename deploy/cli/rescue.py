"""``driftpoint rescue``: write out of memory what a dead job left there, where no daemon did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from deploy.cli import output
from deploy.cli.daemon import base_of
from deploy.cli.door import open_store
from deploy.cli.exit_codes import OK
from deploy.cli.options import DebugOption, JsonOption, MemoryOption, StoreArgument
from store.errors import DriftpointError, UsageError
from store.memory.rescue import INCOMPLETE, WRITTEN, Rescued, rescue_newest
from store.memory.tier import Tier
from store.place import is_url


def rescue(
    store: StoreArgument,
    *,
    memory: MemoryOption = Path("/dev/shm"),
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the newest version in this node's memory into the store, where its job is dead and no commit is as new."""
    del debug
    if is_url(store):
        raise UsageError(
            f"{store}: what dead jobs leave in memory is written into directories only. Start the job again on this "
            "node, it resumes from memory itself; or merge a directory's store"
        )
    catalog = open_store(store)
    done = rescue_newest(Tier(base_of(memory), catalog.store_id), catalog)
    output.answer(as_json(store, done), lambda console: console.print(_text(done)), as_json=json)
    raise typer.Exit(DriftpointError.exit_code if done.outcome == INCOMPLETE else OK)


def as_json(store: Path, done: Rescued) -> dict[str, Any]:
    """The JSON object of the command."""
    save = None if done.manifest is None else done.manifest.save
    return {
        "store": str(store.absolute()),
        "outcome": done.outcome,
        "why": done.why,
        "save": None if save is None else save.name,
        "step": None if save is None else save.step,
    }


def _text(done: Rescued) -> str:
    if done.outcome == WRITTEN and done.manifest is not None:
        return f"Committed step {done.manifest.step} out of memory: {done.why}."
    return f"Nothing written: {done.why}."
