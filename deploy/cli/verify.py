"""``driftpoint verify``: read every byte of a store and check every hash."""

from typing import Any

from rich.console import Console
from rich.text import Text
from typer import Exit

from deploy import console as output
from deploy.console import DebugOption, JsonOption, StoreArgument, byte_progress, watched
from deploy.exit_codes import health
from deploy.format import plural, size_text
from deploy.store_status import lock_owner, open_store
from store.names import SaveId
from store.verify import VerifyReport, total_bytes
from store.weights import verify_all

_STYLES = {"ok": "green", "fallback": "yellow", "damaged": "bold red"}
_RESUME = {"ok": "possible", "fallback": "with older versions", "damaged": "impossible"}


def verify(store: StoreArgument, *, json: JsonOption = False, _debug: DebugOption = False) -> None:
    """Read every byte of the store and check every hash. Changes nothing."""
    catalog = open_store(store)
    with byte_progress("Verifying", total_bytes(catalog) if watched() else 0) as progress:
        report = verify_all(catalog, progress)
    proven, suspects = catalog.proven(), catalog.suspects().saves
    body = {
        "store": str(store.absolute()),
        "store_id": catalog.store_id,
        "ok": report.ok,
        "resumable": None if report.resumable is None else report.resumable.name,
        "bytes_read": report.bytes_read,
        "commits": [
            {
                "save": commit.save.name,
                "state": commit.state,
                "proven": commit.save in proven,
                "suspect": commit.save in suspects,
                "problems": list(commit.problems),
                "weights_only": commit.weights_only,
            }
            for commit in report.commits
        ],
        "journal": {"step": report.journal, "beyond": report.beyond},
        "in_use": lock_owner(store) is not None,
        "problems": list(report.problems),
    }
    output.answer(body, lambda console: _draw(console, report, body), as_json=json)
    raise Exit(health(resumable=report.resumable is not None, damaged=not report.ok))


def _draw(console: Console, report: VerifyReport, body: dict[str, Any]) -> None:
    if report.commits:
        output.spaced(console, _table(body))
    console.print(_verdict(report))
    output.problems(console, report.problems)


def _table(body: dict[str, Any]) -> Any:
    words = (output.line("Proven"), output.line("State"), output.wide("Resume"))
    table = output.table(output.line("Commit"), output.number("Step"), *words)
    for commit in body["commits"]:
        save, state = commit["save"], commit["state"]
        proven = "suspect" if commit["suspect"] else "yes" if commit["proven"] else ""
        resume = _RESUME[state] + (" <- next" if save == body["resumable"] else "")
        resume = "weights only, cannot be resumed" if commit["weights_only"] else resume
        table.add_row(save, str(SaveId.parse(save).step), proven, Text(state, style=_STYLES[state]), resume)
    return table


def _verdict(report: VerifyReport) -> Text:
    read = f"{size_text(report.bytes_read)} read"
    if report.journal is not None:
        read += f". The journal leads to step {report.journal}"
    if report.beyond is not None:
        read += f", and not to its records up to step {report.beyond}"
    if report.resumable is None:
        why = "no commit can be resumed" if report.commits else "the store holds no commit yet"
        return Text(f"Nothing to resume: {why}. {read}.", style="bold red")
    if report.ok:
        return Text(f"{plural(len(report.commits), 'commit')}, all intact. {read}.", style="green")
    return Text(f"Damaged, but a resume works from step {report.resumable.step}. {read}.", style="yellow")
