"""``driftpoint status``: show a store's commits, its user, and the resume point."""

from typing import Any

from rich.console import Console
from rich.text import Text
from typer import Exit

from deploy import console as output
from deploy import store_status
from deploy.console import DebugOption, JsonOption, StoreArgument
from deploy.format import plural, resume_step_text, size_text

_RESUME = (
    *("save", "step", "effective_step", "goes_on_at", "journal", "exact", "max_staleness", "max_drift", "lossy"),
    *("fallbacks", "proven", "as_found"),
)


def status(store: StoreArgument, *, json: JsonOption = False, _debug: DebugOption = False) -> None:
    """Show the commits of a store, the job that uses it, and the commit that a resume would take."""
    found = store_status.store_status(store_status.open_store(store), store)
    output.answer(_as_json(found), lambda console: _draw(console, found), as_json=json)
    raise Exit(found.exit_code)


def _as_json(found: store_status.StoreStatus) -> dict[str, Any]:
    owner = found.owner
    return {
        "store": str(found.root),
        "store_id": found.store_id,
        "commits": [save.name for save in found.saves],
        "weights_only": [save.name for save in found.weights_only],
        "suspects": [save.name for save in found.suspects],
        "newest": None if found.newest is None else store_status.commit_json(found.newest),
        "epoch": found.epoch,
        "owner": None if owner is None else {"host": owner.host, "pid": owner.pid, "started": owner.started},
        "in_use": found.in_use_by is not None,
        "in_use_by": found.in_use_by or None,
        "size_bytes": found.size_bytes,
        "resume": None if found.resume is None else {name: getattr(found.resume, name) for name in _RESUME},
        "problems": list(found.problems),
    }


def _draw(console: Console, found: store_status.StoreStatus) -> None:
    rows: dict[str, Text | str] = {"Store": str(found.root), "Identity": found.store_id, "Commits": _commits(found)}
    if (newest := found.newest) is not None:
        avoided = f", {size_text(newest.bytes_avoided)} avoided" if newest.bytes_avoided else ""
        wrote = f"wrote {size_text(store_status.written(newest))}{avoided}"
        rows["Newest"] = f"{newest.save}: step {newest.step}, store epoch {newest.epoch}, {newest.created}; {wrote}"
        rows["Model"] = store_status.model_text(newest)
    rows["Store epochs"] = _epochs(found)
    rows["In use"] = store_status.lock_owner_text(found.root, found.in_use_by)
    rows["Size"] = size_text(found.size_bytes)
    rows["Resume"] = _resume_text(found)
    console.print(output.facts(rows))
    output.problems(console, found.problems)


def _commits(found: store_status.StoreStatus) -> str:
    if not found.saves:
        return "none yet"
    steps = [save.step for save in found.saves]
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"
    ever = f"; {found.newest.commits} in total" if found.newest and found.newest.commits > len(steps) else ""
    suspect = f"; suspect: {', '.join(save.name for save in found.suspects)}" if found.suspects else ""
    aged = f"; weights only: {', '.join(save.name for save in found.weights_only)}" if found.weights_only else ""
    return f"{len(steps)}, {span}{ever}{suspect}{aged}"


def _epochs(found: store_status.StoreStatus) -> str:
    if (owner := found.owner) is None:
        return f"{found.epoch}; the record of the newest one is unreadable" if found.epoch else "none yet"
    return f"{found.epoch}; newest: process {owner.pid} on {owner.host}, {owner.started}"


def _resume_text(found: store_status.StoreStatus) -> Text:
    if (resume := found.resume) is None:
        return Text("impossible" if found.saves else "nothing to resume yet", style="bold red")
    text = f"from step {resume.step}, {store_status.resume_kind(resume)}"
    if going_on := resume_step_text(resume.step, resume.goes_on_at, resume.effective_step):
        text += f"; {going_on}"
    if resume.journal is not None:
        text += f"; the journal leads to step {resume.journal}"
    if resume.fallbacks:
        text += f"; {plural(len(resume.fallbacks), 'unit')} in an older version because of damage"
    if resume.proven:
        text += "; a job has resumed from it"
    return Text(text, style="yellow" if found.problems else "green")
