"""``driftpoint verify``: read every byte of a store and check every hash."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from deploy import console as output
from deploy.console import DebugOption, JsonOption, StoreArgument, byte_progress, watched
from deploy.exit_codes import health
from deploy.format import plural, size_text
from deploy.store_status import lock_owner, open_store
from store.names import SaveId
from store.verify import VerifyReport, total_bytes
from store.verify import verify as verify_store

_STYLES = {"ok": "green", "fallback": "yellow", "damaged": "bold red"}
_RESUME = {"ok": "possible", "fallback": "with older versions", "damaged": "impossible"}


@dataclass(frozen=True)
class Verified:
    """Verification report of a store."""

    root: Path
    store_id: str
    report: VerifyReport
    proven: Set[SaveId]
    suspects: Set[SaveId]
    in_use: bool

    @property
    def exit_code(self) -> int:
        return health(resumable=self.report.resumable is not None, damaged=not self.report.ok)


def verify(store: StoreArgument, *, json: JsonOption = False, _debug: DebugOption = False) -> None:
    """Read every byte of the store and check every hash. Changes nothing."""
    found = check(store)
    output.answer(_as_json(found), lambda console: _draw(console, found), as_json=json)
    raise typer.Exit(found.exit_code)


def check(root: Path) -> Verified:
    """Verify the store at ``root``, with a progress bar on a terminal."""
    catalog = open_store(root)
    total = total_bytes(catalog) if watched() else 0
    with byte_progress("Verifying", total) as progress:
        report = verify_store(catalog, progress)
    proven, suspects = catalog.proven(), catalog.suspects().saves
    return Verified(root.absolute(), catalog.store_id, report, proven, suspects, lock_owner(root) is not None)


def _as_json(found: Verified) -> dict[str, Any]:
    report = found.report
    return {
        "store": str(found.root),
        "store_id": found.store_id,
        "ok": report.ok,
        "resumable": None if report.resumable is None else report.resumable.name,
        "bytes_read": report.bytes_read,
        "commits": [
            {
                "save": commit.save.name,
                "state": commit.state,
                "proven": commit.save in found.proven,
                "suspect": commit.save in found.suspects,
                "problems": list(commit.problems),
            }
            for commit in report.commits
        ],
        "in_use": found.in_use,
        "problems": list(report.problems),
    }


def _draw(console: Console, found: Verified) -> None:
    report = found.report
    if report.commits:
        console.print(_table(found))
        console.print()
    console.print(_verdict(report))
    output.problems(console, report.problems)
    if report.problems and found.in_use:
        console.print("The store is in use: files that its job deleted meanwhile are listed here too. Verify it again.")


def _table(found: Verified) -> Any:
    words = (output.line("Proven"), output.line("State"), output.wide("Resume"))
    table = output.table(output.line("Commit"), output.number("Step"), *words)
    for commit in found.report.commits:
        save = commit.save
        table.add_row(
            save.name,
            str(save.step),
            "suspect" if save in found.suspects else "yes" if save in found.proven else "",
            Text(commit.state, style=_STYLES[commit.state]),
            _RESUME[commit.state] + (" <- next" if save == found.report.resumable else ""),
        )
    return table


def _verdict(report: VerifyReport) -> Text:
    read = f"{size_text(report.bytes_read)} read"
    if report.resumable is None:
        why = "no commit can be resumed" if report.commits else "the store holds no commit yet"
        return Text(f"Nothing to resume: {why}. {read}.", style="bold red")
    if report.ok:
        return Text(f"{plural(len(report.commits), 'commit')}, all intact. {read}.", style="green")
    return Text(f"Damaged, but a resume works from step {report.resumable.step}. {read}.", style="yellow")
