"""``driftpoint memory`` and ``rescue``: list, free or commit snapshots in this node's shared memory."""

import sys
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Abort, Argument, Context, Exit, Option, Typer

from deploy import console as output
from deploy.cli.daemon import base_of
from deploy.console import DebugOption, JsonOption, MemoryOption, StoreArgument
from deploy.exit_codes import EPILOG, OK
from deploy.format import plural, size_text
from deploy.store_status import open_store
from store.catalog import open_catalog
from store.errors import DriftpointError, StoreError, UsageError
from store.location import files_at, is_url, place_of
from store.memory.arena import is_owned
from store.memory.cleanup import clear, used_bytes
from store.memory.index import scan_node, seen_stores
from store.memory.layout import Tier, tiers
from store.memory.rescue import INCOMPLETE, WRITTEN, rescue_newest
from store.storage.local import Files
from store.text import listed

app = Typer(epilog=EPILOG, help="List or free the snapshots in this node's shared memory.", invoke_without_command=True)


@app.callback(invoke_without_command=True)
def memory(
    context: Context, *, memory: MemoryOption = Path("/dev/shm"), json: JsonOption = False, _debug: DebugOption = False
) -> None:
    """List the snapshots in this node's shared memory."""
    if context.invoked_subcommand is None:
        base = base_of(memory)
        paths = seen_stores(base)
        found = [_snapshots_of(tier, paths.get(tier.store_id)) for tier in tiers(base)]
        body = {"memory": str(base), "nbytes": sum(one["nbytes"] for one in found), "stores": found}
        output.answer(body, lambda console: _draw(console, found), as_json=json)


@app.command("clear", epilog=EPILOG)
def clear_(
    store: Annotated[str | None, Argument(metavar="[STORE]", help="Directory or URL of the store, or its id.")] = None,
    *,
    all_: Annotated[bool, Option("--all", help="Free those of all stores.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
    memory: MemoryOption = Path("/dev/shm"),
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Free the shared memory of dead jobs. Memory of a living process is never touched."""
    found = _select_tiers(base_of(memory), store, everything=all_)
    if not yes and found:
        stores = listed((tier.store_id[:8] for tier in found), 8)
        output.note(f"Remove the snapshots that dead jobs left of {plural(len(found), 'store')} ({stores})? [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise Abort
    freed = sum(clear(tier, files) for tier, files in found.items())
    body = {"freed_bytes": freed, "stores": [tier.store_id for tier in found]}
    left = sum(used_bytes(tier) for tier, files in found.items() if files is not None)
    stays = (
        f" {size_text(left)} stay: of living jobs, of jobs on copies of the store, or with records not to be read. "
        "`driftpoint memory clear ID` frees all that dead jobs left"
    )
    output.answer(body, lambda console: console.print(f"Freed {size_text(freed)}.{stays * bool(left)}"), as_json=json)


def _draw(console: Console, found: list[dict[str, Any]]) -> None:
    if not found:
        console.print("There are no snapshots in memory.")
        return
    table = output.table(*map(output.fold, ("store", "step", "ranks", "size", "job")))
    for one in found:
        step = ", ".join(map(str, one["steps"])) or "-"
        state = "alive" if one["alive"] else "dead"
        ranks = f"{one['ranks']} of {one['world_size']}" + (f", {one['replicas']} as replicas" * bool(one["replicas"]))
        row = (one["store"] or one["store_id"], step, ranks, size_text(one["nbytes"]), state)
        table.add_row(*map(output.cell, row))
    console.print(table)
    output.problems(console, tuple(text for one in found for text in one["problems"]))


def _snapshots_of(tier: Tier, path: Path | None) -> dict[str, Any]:
    node = scan_node(tier)
    held = {} if node.newest is None else node.versions[node.newest]
    steps = {one.record.claim: one.record.save.step for one in sorted(node.everything(), key=lambda x: x.record.save)}
    return {
        "store_id": tier.store_id,
        "store": None if path is None else str(path),
        "step": None if node.newest is None else node.newest.step,
        "steps": sorted(steps.values(), reverse=True),
        "ranks": len(held),
        "replicas": sum(one.record.replica for one in held.values()),
        "world_size": max((one.record.part.world_size for one in held.values()), default=0),
        "nbytes": used_bytes(tier),
        "alive": any(is_owned(place.owner(rank)) for place in tier.generations() for rank in place.ranks()),
        "problems": list(node.problems),
    }


def _select_tiers(base: Path, store: str | None, *, everything: bool) -> dict[Tier, Files | None]:
    """Return what to clear, each with the files of the store if its place was named: copies have the same id."""
    if (store is None) != everything:
        raise UsageError("name one store (its directory or its id), or give --all")
    there = dict[Tier, Files | None].fromkeys(tiers(base))
    if store is None:
        return there
    store_id, place, files = store, place_of(store), None
    if is_url(place) or place.is_dir():
        try:
            catalog = open_catalog(files_at(place))
            store_id, files = catalog.store_id, catalog.files
        except StoreError as error:
            raise UsageError(f"{error}; `driftpoint memory` lists the store ids") from error
    found = {tier: files for tier in there if tier.store_id == store_id}
    if not found:
        raise UsageError(f"no snapshot of {store} in the memory at {base}; see `driftpoint memory --memory {base}`")
    return found


def rescue(
    store: StoreArgument,
    *,
    memory: MemoryOption = Path("/dev/shm"),
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Commit the newest snapshot in this node's memory, if its job is dead and no commit is as new."""
    if is_url(store):
        raise UsageError(
            f"{store}: rescue writes to directories only. Restart the job on this "
            "node: it resumes from memory by itself"
        )
    catalog = open_store(store)
    done = rescue_newest(Tier(base_of(memory), catalog.store_id), catalog)
    save = None if done.manifest is None else done.manifest.save
    body = {
        **{"store": str(store.absolute()), "outcome": done.outcome, "why": done.why},
        **{"save": None if save is None else save.name, "step": None if save is None else save.step},
    }
    text = "Nothing written" if save is None or done.outcome != WRITTEN else f"Committed step {save.step} from memory"
    output.answer(body, lambda console: console.print(f"{text}: {done.why}."), as_json=json)
    raise Exit(DriftpointError.exit_code if done.outcome == INCOMPLETE else OK)
