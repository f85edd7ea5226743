"""Read a store and its trace, judge them, and render the report as one HTML page.

The page needs no script, no font and no network. Names come from untrusted stores and traces: the template escapes
them, and control characters are spelled out."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from deploy.console import byte_progress, watched
from deploy.format import clock, drift_text, installed_version, plural, printable, share_text, size_text, span_text
from deploy.health import facts as health
from deploy.health.checks import Verdict, judge
from deploy.report.history import History, Incident, read_history
from deploy.report.matplotlib_charts import cost_chart, css_colours, maps_of
from deploy.store_status import model_text, open_store, parameters, resume_kind
from deploy.tables import max_drift, sizes, slots_of, span
from store.catalog import Catalog
from store.certificate import Certificate, CertifiedUnit, is_lossy, max_or_none
from store.errors import DamagedError, NothingToResumeError, StorageError, UsageError, system_errors
from store.location import beside, store_place
from store.memory.rescue import REASON
from store.verify import VerifyReport, total_bytes
from store.verify import verify as verify_store

_HERE = Path(__file__).parent
_LISTED = 8  # most damage messages on a page


def certificate_table(certificate: Certificate, parameters: int) -> Mapping[str, Any]:
    """Group the units of a certificate for the template; ``parameters`` is the model's number."""
    units = certificate.units
    layers: dict[str, dict[str, CertifiedUnit]] = {}
    for unit in units:
        layers.setdefault(unit.layer, {})[unit.slot] = unit
    slots = {slot: [unit for unit in units if unit.slot == slot] for slot in slots_of(units)}
    return {
        "kind": resume_kind(certificate),
        "slots": slots,
        "totals": [*slots.items(), *([("all", units)] if len(slots) > 1 else [])],
        "layers": layers,
        "sizes": lambda some: sizes(some, parameters),
        "colour": css_colours(unit.drift for unit in units if unit.moving and unit.drift),
        "fallbacks": any(unit.fallback for unit in units),
    }


def _rounding_error(units: Sequence[CertifiedUnit]) -> str:
    lossy = [unit.error for unit in units if is_lossy(unit.encoding)]
    return drift_text(max_or_none(lossy)) if lossy else ""


@dataclass(frozen=True)
class ReportResult:
    """Content of a page that is not written yet. ``missing``: why there is no history, or ''."""

    facts: health.Facts
    verdict: Verdict
    history: History | None
    incidents: Sequence[Incident]
    missing: str

    @property
    def exit_code(self) -> int:
        """Return the exit code as ``status`` does, but including damage found by verification."""
        facts = self.facts
        if facts.status is None:
            return NothingToResumeError.exit_code
        found = facts.status.exit_code
        hurt = facts.checked is not None and not facts.checked.ok
        return DamagedError.exit_code if found == 0 and hurt else found

    def write(self, path: Path) -> None:
        """Write the page and rename it into place. Raises StorageError."""
        data = render(self).encode("utf-8", "backslashreplace")
        with (
            system_errors("write", path, "; name another file with --out"),
            tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=path.name) as folder,
        ):
            made = Path(folder, "page.html")
            made.write_bytes(data)
            made.replace(path)


def render(content: ReportResult) -> str:
    """Render the page."""
    facts, history = content.facts, content.history
    status, certificate, table = facts.status, None if facts.status is None else facts.status.resume, None
    if status is not None and certificate is not None and status.resumed is not None:
        table = certificate_table(certificate, parameters(status.resumed))
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"clean": printable, "clock": clock, "drift": drift_text, "size": size_text}
    environment.filters |= {"counted": plural, "percent": share_text, "span": span_text}
    environment.filters |= {"max_drift": max_drift, "rounding_error": _rounding_error, "ends": span}
    return environment.get_template("page.html").render(
        vars(content),
        model="" if facts.newest is None else model_text(facts.newest),
        maps=None if history is None or not history.units else maps_of(history),
        cost=None if history is None or not history.totals.saves else cost_chart(history),
        # Newest first; what has no time still holds.
        incidents=sorted(content.incidents, key=lambda one: inf if one.at is None else one.at, reverse=True),
        certificate=certificate,
        table=table,
        version=installed_version() or "(from source)",
    )


def build_report(
    root: Path, trace: Path | None, memory: Path, *, verify: bool, clock: Callable[[], float] = time.time
) -> ReportResult:
    """Build the report of the store at ``root``.

    ``trace``: its path, None for the default. ``verify``: whether to verify every byte first. Raises NoStoreError if
    there is no store, UsageError if ``trace`` was given and is unreadable."""
    path = trace or beside(store_place(root), ".trace.jsonl")
    try:
        catalog = open_store(root)
        checked: VerifyReport | None = None
        if verify:  # slow reads come first, so that the facts are of one moment
            with byte_progress("Verifying", total_bytes(catalog) if watched() else 0) as progress:
                checked = verify_store(catalog, progress)
        history, missing = _history(path, named=trace is not None)
        job_status = None if history is None else history.job_status
        catalog.forget()
        snapshots = health.in_memory(memory, catalog)
        facts = health.gather(catalog, root, snapshots, job_status, clock(), trace=path, checked=checked)
        if facts.foreign_trace:
            history = None
            missing = (
                f"The drift trace {path} has an epoch that this store lacks: it belongs to another store and is not "
                "shown. Name the right one with --trace."
            )
        incidents = [*_of_store(catalog, facts), *(() if history is None else history.incidents)]
        return ReportResult(facts, judge(facts), history, incidents, missing)
    except (NothingToResumeError, DamagedError) as error:
        history, missing = _history(path, named=trace is not None)
        job_status = None if history is None else history.job_status
        now, disk = clock(), health.disk_of(root)
        facts = health.Facts(now, root.absolute(), None, str(error), disk=disk, trace=path, job_status=job_status)
        return ReportResult(facts, judge(facts), history, () if history is None else history.incidents, missing)


def _history(path: Path, *, named: bool) -> tuple[History | None, str]:
    try:
        with byte_progress("Reading the trace", path.stat().st_size) as progress:
            history = read_history(path, progress=progress)
    except OSError as error:
        if named:
            raise UsageError(f"cannot read the trace {path}: {error.strerror}") from error
        return None, (
            f"There is no drift trace at {path} ({error.strerror}), so the job's step, its drift, its saves and their "
            "cost are unknown. Jobs write one unless `trace: {enabled: false}` is set; where "
            "`trace: {path: ...}` is set, name that file with --trace."
        )
    if not history.totals.decisions:
        return None, f"The drift trace {path} contains no decision yet: let the job continue."
    return history, ""


def _of_store(catalog: Catalog, facts: health.Facts) -> Iterator[Incident]:
    """Yield the incidents that only the store knows: damage, suspects, and rescued commits."""
    assert facts.status is not None
    damage = dict.fromkeys((*facts.status.problems, *(() if facts.checked is None else facts.checked.problems)))
    for text in list(damage)[:_LISTED]:
        yield Incident("damage", "bad", text)
    if len(damage) > _LISTED:
        listing = health.shell_command("verify --json" if facts.checked is not None else "status --json", facts.root)
        yield Incident("damage", "bad", f"and {len(damage) - _LISTED} more: {listing} lists all")
    for save, why in catalog.suspects().why.items():
        yield Incident("suspect", "look", f"jobs that resumed from it died: {why}", save.step)
    for save in facts.status.saves:
        try:
            manifest = catalog.manifest(save)
        except (DamagedError, StorageError):
            continue  # reported above
        if any(unit.save == save.name and unit.reason == REASON for unit in manifest.units):
            yield Incident("rescued", "look", REASON, save.step, health.parse_time(manifest.created))
