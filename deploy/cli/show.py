"""``driftpoint show``: list the layer versions that a commit consists of."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Exit, Option

from deploy import console as output
from deploy import store_status, tables
from deploy.console import DebugOption, JsonOption, StoreArgument
from deploy.exit_codes import health
from deploy.format import plural, resume_step_text, size_text
from store.catalog import Catalog
from store.certificate import Certificate, certify_record, certify_stored
from store.errors import DamagedError, StorageError
from store.names import Unit
from store.resolve import Resolution, newest_resumable, resolve
from store.schema import ManifestRecord
from store.weights import open_weights

_STEP = (
    "A step (of the newest epoch that has it), or a save such as 00000120-000003. "
    "Default: the commit that a resume would take."
)


def show(
    store: StoreArgument,
    *,
    step: Annotated[str | None, Argument(metavar="[STEP]", help=_STEP)] = None,
    long: Annotated[
        bool, Option("--long", "-l", help="Show one row per layer and slot, with the reason of each save.")
    ] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Show the layer versions of a commit: step, age, drift, bytes and encoding of every slot."""
    catalog, problems = store_status.open_store(store), list[str]()
    manifest, resolution = _find(catalog, step, problems)
    reasons = {record.unit: record.reason for record in manifest.units}
    if resolution is None:
        units = tuple(certify_record(manifest.step, record) for record in manifest.units)
        certificate = Certificate(manifest.store_id, manifest.save.name, manifest.step, False, units, problems=())
    else:
        certificate = certify_stored(resolution)
    resolution = None if manifest.weights_only else resolution
    body = {
        **_as_json(manifest, certificate, reasons),
        "resumable": resolution is not None,
        "weights_only": manifest.weights_only,
        "suspect": catalog.suspects().why.get(manifest.save),
        "goes_on_at": None if resolution is None else store_status.resume_step(catalog, resolution),
        "problems": problems,
    }
    output.answer(body, lambda console: _draw(console, manifest, certificate, body, reasons, long=long), as_json=json)
    resumable = resolution is not None or store_status.is_resumable(catalog, without=manifest.save)
    raise Exit(health(resumable=resumable, damaged=bool(problems)))


def _find(catalog: Catalog, wanted: str | None, problems: list[str]) -> tuple[ManifestRecord, Resolution | None]:
    """Return the commit of a step or save name, by default the one that a resume would take; None if none can."""
    if wanted is None:
        resolution, passed_over = newest_resumable(catalog)
        problems += (*passed_over, *resolution.problems)
        return resolution.manifest, resolution
    save = store_status.find_save(catalog, wanted)
    if save not in catalog.saves():
        catalog = open_weights(catalog, save)
    manifest = catalog.manifest(save)
    try:
        resolution = resolve(catalog, manifest.save)
    except (DamagedError, StorageError) as error:
        problems.append(f"cannot be resumed: {error}")
        return manifest, None
    problems += resolution.problems
    return manifest, resolution


def _as_json(manifest: ManifestRecord, certificate: Certificate, reasons: Mapping[Unit, str]) -> dict[str, Any]:
    nbytes = sum(unit.nbytes for unit in certificate.units)
    units = [asdict(unit) | {"reason": reasons.get(Unit(unit.layer, unit.slot), "")} for unit in certificate.units]
    for unit in units:
        del unit["source"]  # all of it is of the store at hand
    return {
        **certificate.as_json(),
        **store_status.commit_json(manifest),
        "nbytes": nbytes,
        "bytes_per_parameter": tables.bytes_per_parameter(nbytes, store_status.parameters(manifest)),
        "units": units,
    }


def _draw(
    console: Console,
    manifest: ManifestRecord,
    certificate: Certificate,
    body: Mapping[str, Any],
    reasons: Mapping[Unit, str],
    *,
    long: bool,
) -> None:
    damaged = "damaged: the tables show the commit as written, not its readable part"
    kind = store_status.resume_kind(certificate) if body["resumable"] or manifest.weights_only else damaged
    kind = f"weights only, cannot be resumed but exported; {kind}" if manifest.weights_only else kind
    title = (
        f"{manifest.save}: step {manifest.step}, store epoch {manifest.epoch}, {manifest.created}; "
        f"{manifest.framework} on {plural(manifest.world_size, 'rank')}, policy {manifest.policy}"
    )
    own, kept = store_status.written(manifest), manifest.bytes_avoided
    share = tables.bytes_per_parameter(own, store_status.parameters(manifest))
    each = "" if share is None else f" ({share:.2f} bytes per parameter)"
    wrote = f"this save wrote {size_text(own)}{each}" + (f" and avoided {size_text(kept)}" if kept else "")
    rows = {"Commit": title, "Kind": kind, "Bytes": wrote}
    if body["suspect"]:
        rows["Suspect"] = f"jobs that resumed from it died: {body['suspect']}; a resume prefers older commits"
    if body["goes_on_at"] is not None:
        going_on = resume_step_text(certificate.step, body["goes_on_at"], certificate.effective_step)
        rows |= {"Resume": going_on} if going_on else {}
    output.spaced(console, output.facts(rows))
    if long:
        console.print(tables.unit_table(certificate.units, reasons))
    else:
        tables.print_layers(console, certificate.units)
    console.print()
    console.print(tables.slot_table(certificate.units, store_status.parameters(manifest)))
    output.problems(console, body["problems"])
