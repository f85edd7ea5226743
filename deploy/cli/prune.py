"""``driftpoint prune``: delete commits that retention does not keep, and segments that no commit references.

Holds the store's lock meanwhile, so that no job on this machine starts."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from deploy import console as output
from deploy.console import DebugOption, JsonOption, StoreArgument
from deploy.exit_codes import OK, health
from deploy.format import plural, size_text
from deploy.store_status import is_resumable, lock_owner, lock_owner_text, open_store
from store.catalog import Catalog
from store.errors import DamagedError, StorageError
from store.location import is_url
from store.names import SaveId
from store.retention import EVERYTHING, PrunePlan, Retention, execute, plan_prune
from store.session import StoreLock, newest_epoch, read_epoch
from store.text import listed

_DEFAULT = Retention()


@dataclass(frozen=True)
class Pruned:
    """Deleted commits and segments, or those that ``--dry-run`` would delete."""

    root: Path
    dry_run: bool
    plan: PrunePlan
    in_use_by: int | None
    foreign: str | None
    resumable: bool

    @property
    def exit_code(self) -> int:
        """Return 0, or the code of a store in which nothing may be deleted."""
        return OK if self.plan.blocked is None else health(resumable=self.resumable, damaged=True)


def prune(
    store: StoreArgument,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only list what would be deleted.")] = False,
    keep_last: Annotated[int, typer.Option(min=1, metavar="N", help="Keep the newest N commits.")] = _DEFAULT.keep_last,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Also keep one commit in every N steps.")
    ] = _DEFAULT.keep_every,
    log_spaced: Annotated[
        bool, typer.Option("--log-spaced/--no-log-spaced", help="Also keep older commits at increasing distances.")
    ] = _DEFAULT.log_spaced,
    minimum: Annotated[
        bool,
        typer.Option(
            "--minimum", help="Free all that can be freed: keep the newest commit and the last one resumed from."
        ),
    ] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Delete commits that retention does not keep. Keeps the newest valid one and the last one resumed from."""
    retention = Retention(keep_last=keep_last, keep_every=keep_every, log_spaced=log_spaced)
    found = prune_store(store, retention, dry_run=dry_run, minimum=minimum)
    output.answer(_as_json(found), lambda console: _draw(console, found), as_json=json)
    raise typer.Exit(found.exit_code)


def prune_store(root: Path, retention: Retention, *, dry_run: bool, minimum: bool = False) -> Pruned:
    """Prune the store at ``root``; with ``minimum`` to as few commits as may stay.

    Raises StoreInUseError first if a job uses it."""
    catalog, in_use_by = open_store(root), lock_owner(root)
    with ExitStack() as held:
        if not dry_run and not is_url(root):
            held.callback(StoreLock(root, wait_seconds=0).release)
        plan = plan_prune(catalog, retention, make_room=EVERYTHING if minimum else 0)
        resumable = plan.blocked is None or is_resumable(catalog)
        if not dry_run and plan.blocked is None:
            execute(catalog.files, plan)
    return Pruned(root.absolute(), dry_run, plan, in_use_by, _foreign_owner(catalog), resumable)


def _as_json(found: Pruned) -> dict[str, Any]:
    plan = found.plan
    return {
        "store": str(found.root),
        "dry_run": found.dry_run,
        "blocked": plan.blocked,
        "in_use_by": found.in_use_by or None,
        "keep": [save.name for save in plan.keep],
        "delete": {
            "commits": [save.name for save in plan.manifests],
            "segments": [save.name for save in plan.groups],
            "temporaries": list(plan.temporaries),
        },
        "freed_bytes": plan.freed_bytes,
        "unrecognised": list(plan.unrecognised),
    }


def _draw(console: Console, found: Pruned) -> None:
    plan = found.plan
    if plan.blocked is not None:
        console.print(Text(f"Not pruned: {plan.blocked}", style="bold red"))
    else:
        console.print(output.facts(_rows(found)))
    if plan.unrecognised:
        console.print()
        console.print("Unrecognised files, not deleted:")
        for name in plan.unrecognised:
            console.print(output.cell(f"  {name}"))
    for remark in _remarks(found):
        console.print()
        console.print(output.cell(remark, "yellow"))


def _rows(found: Pruned) -> dict[str, Text | str]:
    plan = found.plan
    would = "Would delete" if found.dry_run else "Deleted"
    rows: dict[str, Text | str] = {
        "Kept": f"{plural(len(plan.keep), 'commit')}: {_names(plan.keep)}",
        would: f"{plural(len(plan.manifests), 'commit')}: {_names(plan.manifests)}" if plan.manifests else "no commit",
        "": f"{plural(len(plan.groups), 'segment group')}, {plural(len(plan.temporaries), 'left-over temporary file')}",
    }
    freed = size_text(plan.freed_bytes)
    rows["Would free" if found.dry_run else "Freed"] = Text(freed, style="bold")
    return rows


def _names(saves: tuple[SaveId, ...], limit: int = 8) -> str:
    return listed((save.name for save in sorted(saves, reverse=True)), limit, rest="older ones")


def _remarks(found: Pruned) -> Iterator[str]:
    plan = found.plan
    if found.in_use_by is not None:
        user = lock_owner_text(found.root, found.in_use_by)
        yield f"The store is in use {user}: without --dry-run this fails. The job prunes by itself."
    if plan.blocked is None and not plan.freed_bytes and len(plan.keep) > 1:
        yield "This frees nothing. Add --minimum to keep only the newest commit and the last one resumed from."
    if found.foreign is not None:
        lock = "An object store has no lock" if is_url(found.root) else "The lock covers this machine only"
        yield f"The newest job on this store ran on {found.foreign}. {lock}: make sure that no job is saving there."


def _foreign_owner(catalog: Catalog) -> str | None:
    epoch = newest_epoch(catalog.files)
    try:
        host = read_epoch(catalog.files, epoch).host if epoch else None
    except (DamagedError, StorageError):
        return None
    return host if host != socket.gethostname() else None
