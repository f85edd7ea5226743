"""``driftpoint prune``: delete commits that retention does not keep, and segments that no commit references.

Holds the store's lock meanwhile, so that no job on this machine starts."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text
from typer import Exit, Option

from deploy import console as output
from deploy.console import DebugOption, JsonOption, StoreArgument
from deploy.exit_codes import OK, health
from deploy.format import plural, size_text
from deploy.store_status import epoch_owner, is_resumable, lock_owner, lock_owner_text, open_store
from store.location import is_url
from store.names import SaveId
from store.retention import EVERYTHING, PrunePlan, Retention, execute, keep_named_weights, plan_prune
from store.session import StoreLock, newest_epoch
from store.text import listed

_DEFAULT = Retention()
_MINIMUM = "Free all that can be freed: keep the newest commit and the last one resumed from."


def prune(
    store: StoreArgument,
    *,
    dry_run: Annotated[bool, Option("--dry-run", "-n", help="Only list what would be deleted.")] = False,
    keep_last: Annotated[int, Option(min=1, metavar="N", help="Keep the newest N commits.")] = _DEFAULT.keep_last,
    keep_every: Annotated[
        int | None, Option(min=1, metavar="N", help="Also keep one commit in every N steps.")
    ] = _DEFAULT.keep_every,
    log_spaced: Annotated[
        bool, Option("--log-spaced/--no-log-spaced", help="Also keep older commits at increasing distances.")
    ] = _DEFAULT.log_spaced,
    weights_every: Annotated[
        int | None, Option(min=1, metavar="N", help="Also keep the weights of one commit in every N steps.")
    ] = _DEFAULT.weights_every,
    minimum: Annotated[bool, Option("--minimum", help=_MINIMUM)] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Delete commits that retention does not keep. Keeps the newest valid one and the last one resumed from."""
    retention = Retention(keep_last, keep_every, log_spaced, None, weights_every, weights_last=EVERYTHING)
    catalog, in_use_by = open_store(store), lock_owner(store)
    problems, tried = list[str](), tuple[SaveId, ...]()
    with ExitStack() as held:
        if not dry_run and not is_url(store):
            held.callback(StoreLock(store, wait_seconds=0).release)
        while True:
            plan = plan_prune(catalog, retention, make_room=EVERYTHING if minimum else 0)
            if dry_run or plan.to_copy in ((), tried):
                break
            problems, tried = [*problems, *keep_named_weights(catalog, plan)], plan.to_copy
        code = OK if plan.blocked is None else health(resumable=is_resumable(catalog), damaged=True)
        if not dry_run and plan.blocked is None:
            execute(catalog.files, plan)
    owner = epoch_owner(catalog, newest_epoch(catalog.files), [])
    foreign = None if owner is None or owner.host == socket.gethostname() else owner.host
    remarks = [*problems, *_remarks(store, plan, in_use_by, foreign)]
    body = {
        "store": str(store.absolute()),
        "dry_run": dry_run,
        "blocked": plan.blocked,
        "in_use_by": in_use_by or None,
        "keep": [save.name for save in plan.keep],
        "weights_to_copy": [save.name for save in plan.to_copy],
        "delete": {
            "commits": [save.name for save in plan.manifests],
            "weights": [save.name for save in plan.weights],
            "segments": [save.name for save in plan.groups],
            "temporaries": list(plan.temporaries),
        },
        "freed_bytes": plan.freed_bytes,
        "unrecognised": list(plan.unrecognised),
    }
    output.answer(body, lambda console: _draw(console, plan, remarks, dry_run=dry_run), as_json=json)
    raise Exit(code)


def _draw(console: Console, plan: PrunePlan, remarks: Sequence[str], *, dry_run: bool) -> None:
    if plan.blocked is not None:
        console.print(Text(f"Not pruned: {plan.blocked}", style="bold red"))
    else:
        console.print(output.facts(_rows(plan, dry_run=dry_run)))
    if plan.unrecognised:
        console.print("\nUnrecognised files, not deleted:")
        for name in plan.unrecognised:
            console.print(output.cell(f"  {name}"))
    for remark in remarks:
        console.print()
        console.print(output.cell(remark, "yellow"))


def _rows(plan: PrunePlan, *, dry_run: bool) -> dict[str, Text | str]:
    deleted = f"{plural(len(plan.manifests), 'commit')}: {_names(plan.manifests)}" if plan.manifests else "no commit"
    if plan.weights:
        deleted += f"; {plural(len(plan.weights), 'weights-only commit')}: {_names(plan.weights)}"
    return {
        "Kept": f"{plural(len(plan.keep), 'commit')}: {_names(plan.keep)}",
        "Would delete" if dry_run else "Deleted": deleted,
        "": f"{plural(len(plan.groups), 'segment group')}, {plural(len(plan.temporaries), 'left-over temporary file')}",
        "Would free" if dry_run else "Freed": Text(size_text(plan.freed_bytes), style="bold"),
    }


def _names(saves: tuple[SaveId, ...], limit: int = 8) -> str:
    return listed((save.name for save in sorted(saves, reverse=True)), limit, rest="older ones")


def _remarks(root: Path, plan: PrunePlan, in_use_by: int | None, foreign: str | None) -> Iterator[str]:
    if in_use_by is not None:
        user = lock_owner_text(root, in_use_by)
        yield f"The store is in use {user}: without --dry-run this fails. The job prunes by itself."
    if plan.to_copy:
        yield f"Kept only until their weights are copied: {_names(plan.to_copy)}"
    elif plan.blocked is None and not (plan.freed_bytes or plan.manifests) and len(plan.keep) > 1:
        yield "This frees nothing. Add --minimum to keep only the newest commit and the last one resumed from."
    if foreign is not None:
        lock = "An object store has no lock" if is_url(root) else "The lock covers this machine only"
        yield f"The newest job on this store ran on {foreign}. {lock}: make sure that no job is saving there."
