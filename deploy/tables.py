"""Draw tables of certified units in layer order: one row per layer, per (layer, slot), or per slot. Reads no store."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy import console as output
from deploy.format import drift_text, size_text, tail
from store.certificate import CertifiedUnit, is_lossy, max_or_none
from store.names import BUFFER, FROZEN, WEIGHTS, Unit

_BYTES_WIDTH, _NAME_WIDTH, _SLOT_WIDTH, _ERROR_WIDTH = 11, 16, 16, 9  # columns of the terminal, with gaps

Row = tuple[str, str, int]
"""Layer, source of a part of it, and a number if that source has several versions of the part."""

LEGEND = (
    "age: steps between the version and the commit. drift: distance of the values at the commit from the version, "
    "relative to its norm; ? if unknown."
)
ERROR_LEGEND = "error: rounding error of a lossy encoding, relative to the norm of the values."
NEWER_LEGEND = "Negative age: the version is newer than the run state, whose counters and schedule the job resumes."
FALLBACK_LEGEND = "!: an older version, because the committed one is damaged."


def print_layers(console: Console, units: Sequence[CertifiedUnit]) -> None:
    """Print one row per layer (and source, if several), with age and drift of each slot in columns.

    Slots that do not fit side by side are printed in further tables, each with the layers that have them."""
    by_row, lossy, slots = _by_row(units), any(is_lossy(unit.encoding) for unit in units), slots_of(units)
    sources = len({unit.source for unit in units}) > 1
    room = console.width - _BYTES_WIDTH - _NAME_WIDTH * (1 + sources)
    width = _SLOT_WIDTH + _ERROR_WIDTH * lossy
    fit = max(1, room // width)
    for first in range(0, len(slots), fit):
        group = slots[first : first + fit]
        names = max(_NAME_WIDTH, room - width * len(group) + _NAME_WIDTH) - 3
        output.spaced(console, _layer_table(by_row, group, names, lossy=lossy, sources=sources))
    newer, fallback = any(unit.moving and unit.staleness < 0 for unit in units), any(unit.fallback for unit in units)
    shown = ((LEGEND, True), (ERROR_LEGEND, lossy), (NEWER_LEGEND, newer), (FALLBACK_LEGEND, fallback))
    for legend in (text for text, holds in shown if holds):
        console.print(legend, style="dim")


def unit_table(units: Sequence[CertifiedUnit], reasons: Mapping[Unit, str]) -> Table:
    """Return a table with one row per layer and slot."""
    lossy = any(is_lossy(unit.encoding) for unit in units)
    table = output.table(
        output.fold("Layer\n  slot", min_width=12),
        *map(output.number, ("Step", "Age", "Drift", "Bytes")),
        output.fold("Encoding"),
        *([output.number("Error")] if lossy else []),
        output.wide("Reason"),
    )
    layer = None
    for unit in units:
        if unit.layer != layer:
            table.add_row(output.cell(unit.layer, "bold"))
            layer = unit.layer
        age, drift = _age(unit)
        reason = "fixed" if not unit.moving else reasons.get(Unit(unit.layer, unit.slot), "")
        reason = "older version: the committed one is damaged" if unit.fallback else reason
        based = f"base {', '.join(unit.bases)}" if unit.bases else ""
        reason = "; ".join(filter(None, (reason, based)))
        numbers = (str(unit.step), age, drift, size_text(unit.nbytes))
        error, why = [_error(unit)] if lossy else [], output.cell(reason, _style(unit))
        table.add_row(output.cell(f"  {unit.slot}"), *numbers, output.cell(unit.encoding), *error, why)
    return table


def _by_row(units: Sequence[CertifiedUnit]) -> dict[Row, dict[str, CertifiedUnit]]:
    rows: dict[Row, dict[str, CertifiedUnit]] = {}
    for unit in units:
        number = 0
        while unit.slot in rows.get((unit.layer, unit.source, number), {}):
            number += 1
        rows.setdefault((unit.layer, unit.source, number), {})[unit.slot] = unit
    return rows


def _layer_table(
    by_row: Mapping[Row, Mapping[str, CertifiedUnit]], slots: Sequence[str], names: int, *, lossy: bool, sources: bool
) -> Table:
    heading = _line("age", "drift", "error" if lossy else "")
    slot_columns = [output.number(slot if slot == FROZEN else f"{slot}\n{heading}") for slot in slots]
    first = [output.line("Layer"), *([output.line("Source")] if sources else [])]
    table = output.table(*first, *slot_columns, output.number("Bytes"))
    for (layer, source, _), all_units in by_row.items():
        if units := {slot: all_units[slot] for slot in slots if slot in all_units}:
            cells = [_unit_cell(units.get(slot), lossy=lossy) for slot in slots]
            origin = [output.cell(tail(source, _NAME_WIDTH - 3))] if sources else []
            nbytes = sum(unit.nbytes for unit in units.values())
            table.add_row(output.cell(tail(layer, names)), *origin, *cells, size_text(nbytes))
    return table


def _unit_cell(unit: CertifiedUnit | None, *, lossy: bool) -> Text:
    if unit is None:
        return Text("")
    age, drift = _age(unit)
    if not unit.moving and not unit.fallback:
        return Text(age, style="dim")
    return Text(_line(age, drift, f"{_error(unit):>7}" if lossy else ""), style=_style(unit))


def _line(age: str, drift: str, error: str) -> str:
    return f"{age}  {drift:>7}" + (f"  {error:>7}" if error else "")


def _age(unit: CertifiedUnit) -> tuple[str, str]:
    if not unit.moving and not unit.fallback:
        return "fixed", ""
    return f"{unit.staleness}{'!' if unit.fallback else ''}", drift_text(unit.drift)


def _style(unit: CertifiedUnit) -> str:
    return "bold red" if unit.fallback else "yellow" if unit.moving and unit.staleness else ""


def _error(unit: CertifiedUnit) -> str:
    return drift_text(unit.error) if is_lossy(unit.encoding) else ""


def slots_of(units: Sequence[CertifiedUnit]) -> list[str]:
    """Return the slots in order of appearance; weights first, frozen parameters and buffers last."""
    place = {WEIGHTS: 0, FROZEN: 2, BUFFER: 3}
    return sorted(dict.fromkeys(unit.slot for unit in units), key=lambda slot: place.get(slot, 1))


def slot_table(units: Sequence[CertifiedUnit], parameters: int) -> Table:
    """Return a table with one row per slot and encoding, and a total."""
    lossy = any(is_lossy(unit.encoding) for unit in units)
    columns = ["Oldest", "Newest", "Max drift", *(["Error"] if lossy else []), "Bytes", "B/param"]
    table = output.table(output.fold("Slot\n  encoding", min_width=8), *map(output.number, columns))

    def row(name: str, own: Sequence[CertifiedUnit]) -> list[str | Text]:
        error = [drift_text(max_or_none(unit.error for unit in own))] if lossy else []
        return [output.cell(name), *span(own), max_drift(own), *error, *sizes(own, parameters)]

    for slot in slots_of(units):
        table.add_row(output.cell(slot, "bold"))
        for encoding in dict.fromkeys(unit.encoding for unit in units if unit.slot == slot):
            table.add_row(*row(f"  {encoding}", [one for one in units if (one.slot, one.encoding) == (slot, encoding)]))
    table.add_section()
    table.add_row(*row("all", units), style="bold")
    return table


def bytes_per_parameter(nbytes: int, parameters: int) -> float | None:
    """Return bytes per parameter, None for a model without parameters."""
    return nbytes / parameters if parameters else None


def span(units: Sequence[CertifiedUnit]) -> list[str]:
    """Return the oldest and the newest step."""
    return [str(of((unit.step for unit in units), default="")) for of in (min, max)]


def max_drift(units: Sequence[CertifiedUnit]) -> str:
    """Return the largest drift of moving units; ``?`` if any is unknown, ``fixed`` if none moves."""
    drifts = [unit.drift for unit in units if unit.moving]
    known = [drift for drift in drifts if drift is not None]
    if not drifts:
        return "fixed"
    return drift_text(None if len(known) < len(drifts) else max(known, default=0.0))


def sizes(units: Sequence[CertifiedUnit], parameters: int) -> list[str]:
    """Return stored bytes, and bytes per parameter of the model."""
    nbytes = sum(unit.nbytes for unit in units)
    share = bytes_per_parameter(nbytes, parameters)
    return [size_text(nbytes), "" if share is None else f"{share:.2f}"]
