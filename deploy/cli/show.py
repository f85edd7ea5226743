"""``driftpoint show``: list the layer versions that a commit consists of."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deploy import console as output
from deploy import tables
from deploy.console import DebugOption, JsonOption, StoreArgument
from deploy.exit_codes import health
from deploy.format import plural, resume_step_text, size_text
from deploy.store_status import find_save, is_resumable, open_store, parameters, resume_kind, resume_step, written
from store.catalog import Catalog
from store.certificate import Certificate, CertifiedUnit, certify_record, certify_stored
from store.errors import DamagedError, StorageError
from store.names import SaveId, Unit
from store.resolve import Resolution, newest_resumable, resolve
from store.schema import ManifestRecord


@dataclass(frozen=True)
class Shown:
    """A commit and its certificate."""

    manifest: ManifestRecord
    certificate: Certificate
    resumable: bool
    others_resumable: bool
    problems: tuple[str, ...]
    goes_on_at: int | None = None
    suspect: str = ""

    @property
    def reasons(self) -> Mapping[Unit, str]:
        """Return why each unit that this save wrote was written."""
        return {record.unit: record.reason for record in self.manifest.units}

    @property
    def exit_code(self) -> int:
        return health(resumable=self.resumable or self.others_resumable, damaged=bool(self.problems))


def show(
    store: StoreArgument,
    *,
    step: Annotated[
        str | None,
        typer.Argument(
            metavar="[STEP]",
            help="A step (of the newest epoch that has it), or a save such as 00000120-000003. "
            "Default: the commit that a resume would take.",
        ),
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Show one row per layer and slot, with the reason of each save.")
    ] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Show the layer versions of a commit: step, age, drift, bytes and encoding of every slot."""
    shown = look(store, step)
    output.answer(_as_json(shown), lambda console: _draw(console, shown, long=long), as_json=json)
    raise typer.Exit(shown.exit_code)


def look(root: Path, wanted: str | None) -> Shown:
    """Return the commit of a step or save name; without one, the commit that a resume would take."""
    catalog = open_store(root)
    if wanted is not None:
        return _look_at(catalog, find_save(catalog, wanted))
    resolution, passed_over = newest_resumable(catalog)
    problems = (*passed_over, *resolution.problems)
    return _whole(catalog, resolution, problems)


def _as_json(shown: Shown) -> dict[str, Any]:
    certificate, reasons = shown.certificate, shown.reasons
    units = [_unit_json(unit, reasons) for unit in certificate.units]
    nbytes, count = sum(unit.nbytes for unit in certificate.units), parameters(shown.manifest)
    return {
        **certificate.as_json(),
        "epoch": shown.manifest.epoch,
        "created": shown.manifest.created,
        "framework": shown.manifest.framework,
        "policy": shown.manifest.policy,
        "world_size": shown.manifest.world_size,
        "resumable": shown.resumable,
        "suspect": shown.suspect or None,
        "goes_on_at": shown.goes_on_at,
        "parameters": count,
        "nbytes": nbytes,
        "bytes_per_parameter": tables.bytes_per_parameter(nbytes, count),
        "bytes_written": written(shown.manifest),
        "bytes_avoided": shown.manifest.bytes_avoided,
        "units": units,
        "problems": list(shown.problems),
    }


def _unit_json(unit: CertifiedUnit, reasons: Mapping[Unit, str]) -> dict[str, Any]:
    found = {**asdict(unit), "reason": reasons.get(Unit(unit.layer, unit.slot), "")}
    del found["source"]  # all of it is of the store at hand
    return found


def _draw(console: Console, shown: Shown, *, long: bool) -> None:
    certificate = shown.certificate
    damaged = "damaged: the tables show the commit as written, not its readable part"
    kind = resume_kind(certificate) if shown.resumable else damaged
    rows = {"Commit": _title(shown), "Kind": kind, "Bytes": _bytes(shown)}
    if shown.suspect:
        rows["Suspect"] = f"jobs that resumed from it died: {shown.suspect}; a resume prefers older commits"
    if shown.goes_on_at is not None:
        going_on = resume_step_text(certificate.step, shown.goes_on_at, certificate.effective_step)
        rows |= {"Resume": going_on} if going_on else {}
    console.print(output.facts(rows))
    console.print()
    if long:
        console.print(tables.unit_table(certificate.units, shown.reasons))
    else:
        tables.print_layers(console, certificate.units)
    console.print()
    console.print(tables.slot_table(certificate.units, parameters(shown.manifest)))
    output.problems(console, shown.problems)


def _look_at(catalog: Catalog, save: SaveId) -> Shown:
    manifest = catalog.manifest(save)
    try:
        resolution = resolve(catalog, save)
    except (DamagedError, StorageError) as error:
        units = tuple(certify_record(manifest.step, record) for record in manifest.units)
        found = Certificate(manifest.store_id, manifest.save.name, manifest.step, exact=False, units=units, problems=())
        others = is_resumable(catalog, without=save)
        return Shown(manifest, found, False, others, (f"cannot be resumed: {error}",), suspect=_suspect(catalog, save))
    return _whole(catalog, resolution, resolution.problems)


def _whole(catalog: Catalog, resolution: Resolution, problems: tuple[str, ...]) -> Shown:
    onward, manifest = resume_step(catalog, resolution), resolution.manifest
    return Shown(manifest, certify_stored(resolution), True, True, problems, onward, _suspect(catalog, manifest.save))


def _suspect(catalog: Catalog, save: SaveId) -> str:
    return catalog.suspects().why.get(save, "")


def _title(shown: Shown) -> str:
    manifest = shown.manifest
    return (
        f"{manifest.save}: step {manifest.step}, epoch {manifest.epoch}, {manifest.created}; "
        f"{manifest.framework} on {plural(manifest.world_size, 'rank')}, policy {manifest.policy}"
    )


def _bytes(shown: Shown) -> str:
    own, kept = written(shown.manifest), shown.manifest.bytes_avoided
    share = tables.bytes_per_parameter(own, parameters(shown.manifest))
    each = "" if share is None else f" ({share:.2f} bytes per parameter)"
    return f"this save wrote {size_text(own)}{each}" + (f" and avoided {size_text(kept)}" if kept else "")
