"""Draw certificate tables: one row per layer, per (layer, slot) unit, or per slot.

Uses certified units in layer order; does not access a store."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from deploy import console as output
from deploy.format import drift_text, printable, size_text, tail
from store.certificate import CertifiedUnit, is_lossy, max_or_none
from store.names import BUFFER, FROZEN, WEIGHTS, Unit

_GAP = 3
_BYTES_WIDTH = 8
_NAME_WIDTH = 14
_STALE = "yellow"
_FALLBACK = "bold red"

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
    by_row, widths = _by_row(units), _widths(units)
    name_width = max((len(name) for name, _, _ in by_row), default=0)
    source_width = _source_width(units)
    room = console.width - _BYTES_WIDTH - _GAP - (source_width + _GAP if source_width else 0)
    for slots in _fitting_groups(slots_of(units), widths, room, name_width):
        taken = sum(widths.of(slot) + _GAP for slot in slots)
        names = max(room - taken, _NAME_WIDTH)
        console.print(_layer_table(by_row, slots, widths, (names, source_width)))
        console.print()
    console.print(LEGEND, style="dim")
    if widths.errors:
        console.print(ERROR_LEGEND, style="dim")
    if any(unit.moving and unit.staleness < 0 for unit in units):
        console.print(NEWER_LEGEND, style="dim")
    if any(unit.fallback for unit in units):
        console.print(FALLBACK_LEGEND, style="dim")


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
        table.add_row(
            output.cell(f"  {unit.slot}"),
            str(unit.step),
            age,
            drift,
            size_text(unit.nbytes),
            output.cell(unit.encoding),
            *([_error(unit)] if lossy else []),
            output.cell(reason, _style(unit)),
        )
    return table


def _by_row(units: Sequence[CertifiedUnit]) -> dict[Row, dict[str, CertifiedUnit]]:
    rows: dict[Row, dict[str, CertifiedUnit]] = {}
    for unit in units:
        number = 0
        while unit.slot in rows.get((unit.layer, unit.source, number), {}):
            number += 1
        rows.setdefault((unit.layer, unit.source, number), {})[unit.slot] = unit
    return rows


def _source_width(units: Sequence[CertifiedUnit]) -> int:
    """Return the width of the source column; 0 if there is only one source."""
    sources = {unit.source for unit in units}
    return 0 if len(sources) < 2 else min(_NAME_WIDTH, max(len("Source"), *map(len, sources)))


def _layer_table(
    by_row: Mapping[Row, Mapping[str, CertifiedUnit]],
    slots: Sequence[str],
    widths: "_Widths",
    name_widths: tuple[int, int],
) -> Table:
    names = [output.line("Layer"), *([output.line("Source")] if name_widths[1] else [])]
    headings = [Text(widths.heading(slot)) for slot in slots]
    table = output.table(*names, *map(output.number, (*headings, "Bytes")))
    for (layer, source, _), all_units in by_row.items():
        units = {slot: all_units[slot] for slot in slots if slot in all_units}
        if not units:
            continue
        sources = [output.cell(tail(source, name_widths[1]))] if name_widths[1] else []
        cells = [_unit_cell(units.get(slot), widths) for slot in slots]
        total = sum(unit.nbytes for unit in units.values())
        table.add_row(output.cell(tail(layer, name_widths[0])), *sources, *cells, size_text(total))
    return table


def _unit_cell(unit: CertifiedUnit | None, widths: "_Widths") -> Text:
    if unit is None:
        return Text("")
    age, drift = _age(unit)
    if not unit.moving and not unit.fallback:
        return Text(age, style="dim")
    error = _error_in(unit, widths.lossy.get(unit.slot, ())) if widths.errors.get(unit.slot) else ""
    return Text(widths.line(unit.slot, age, drift, error), style=_style(unit))


def _age(unit: CertifiedUnit) -> tuple[str, str]:
    if not unit.moving and not unit.fallback:
        return "fixed", ""
    return f"{unit.staleness}{'!' if unit.fallback else ''}", drift_text(unit.drift)


def _style(unit: CertifiedUnit) -> str:
    if unit.fallback:
        return _FALLBACK
    return _STALE if unit.moving and unit.staleness else ""


@dataclass(frozen=True)
class _Widths:
    """Column widths of a slot."""

    age: int
    drift: int
    lossy: Mapping[str, Sequence[str]]
    errors: Mapping[str, int]

    def line(self, slot: str, age: str, drift: str, error: str) -> str:
        own = self.errors.get(slot)
        return f"{age:>{self.age}}  {drift:>{self.drift}}" + (f"  {error:>{own}}" if own else "")

    def heading(self, slot: str) -> str:
        """Return the slot's name, its lossy encoding if there is only one, and the column names."""
        if slot == FROZEN:
            return slot
        names = self.lossy.get(slot, ())
        lines = [slot, *([names[0] if len(names) == 1 else ""] if self.errors else [])]
        return "\n".join([*lines, self.line(slot, "age", "drift", "error")])

    def of(self, slot: str) -> int:
        return max(len(line) for line in (*self.heading(slot).splitlines(), self.line(slot, "", "", "")))


def _widths(units: Sequence[CertifiedUnit]) -> _Widths:
    pairs = [_age(unit) for unit in units if unit.moving or unit.fallback]
    lossy: dict[str, list[str]] = {}
    for unit in units:
        if is_lossy(unit.encoding) and unit.encoding not in lossy.setdefault(unit.slot, []):
            lossy[unit.slot].append(unit.encoding)
    return _Widths(
        max([len("age"), *(len(age) for age, _ in pairs)]),
        max([len("drift"), *(len(drift) for _, drift in pairs)]),
        lossy,
        {
            slot: max([len("error"), *(len(_error_in(unit, names)) for unit in units if unit.slot == slot)])
            for slot, names in lossy.items()
        },
    )


def _error(unit: CertifiedUnit) -> str:
    return drift_text(unit.error) if is_lossy(unit.encoding) else ""


def _error_in(unit: CertifiedUnit, lossy: Sequence[str]) -> str:
    """Return the encoding error; with the encoding, unless the heading already names it."""
    if len(lossy) == 1 and unit.encoding == lossy[0]:
        return _error(unit)
    return " ".join(filter(None, (_error(unit), printable(unit.encoding))))


def _fitting_groups(slots: Sequence[str], widths: _Widths, room: int, name_width: int) -> Iterator[list[str]]:
    """Split the slots into groups that fit side by side next to the layer name."""
    room -= min(name_width, max(_NAME_WIDTH, room // 4))
    run: list[str] = []
    used = 0
    for slot in slots:
        width = widths.of(slot) + _GAP
        if run and used + width > room:
            yield run
            run, used = [], 0
        run.append(slot)
        used += width
    if run:
        yield run


def slots_of(units: Sequence[CertifiedUnit]) -> list[str]:
    """Return the slots in order of appearance; weights first, frozen parameters and buffers last."""
    place = {WEIGHTS: 0, FROZEN: 2, BUFFER: 3}
    return sorted(dict.fromkeys(unit.slot for unit in units), key=lambda slot: place.get(slot, 1))


def slot_table(units: Sequence[CertifiedUnit], parameters: int) -> Table:
    """Return a table with one row per slot (and lossy encoding) and a total."""
    if any(is_lossy(unit.encoding) for unit in units):
        return _rounded_table(units, parameters)
    names = [output.line("Slot", min_width=8), Column("Units", justify="right"), output.fold("Encoding")]
    table = output.table(*names, *map(output.number, ("Oldest", "Newest", "Max drift", "Bytes", "B/param")))
    for slot in slots_of(units):
        own = [unit for unit in units if unit.slot == slot]
        table.add_row(output.cell(slot), *_unit_cells(own), *span(own), max_drift(own), *sizes(own, parameters))
    table.add_section()
    table.add_row("all", *_unit_cells(units), *span(units), max_drift(units), *sizes(units, parameters), style="bold")
    return table


def _rounded_table(units: Sequence[CertifiedUnit], parameters: int) -> Table:
    numbers = ("Oldest", "Newest", "Max drift", "Error", "Bytes", "B/param")
    table = output.table(output.fold("Slot\n  encoding", min_width=8), *map(output.number, numbers))
    for slot in slots_of(units):
        table.add_row(output.cell(slot, "bold"))
        own = [unit for unit in units if unit.slot == slot]
        for encoding in dict.fromkeys(unit.encoding for unit in own):
            same = [unit for unit in own if unit.encoding == encoding]
            table.add_row(output.cell(f"  {encoding}"), *_rounded_row(same, parameters))
    table.add_section()
    table.add_row("all", *_rounded_row(units, parameters), style="bold")
    return table


def _rounded_row(units: Sequence[CertifiedUnit], parameters: int) -> list[str]:
    error = drift_text(max_or_none(unit.error for unit in units))
    return [*span(units), max_drift(units), error, *sizes(units, parameters)]


def bytes_per_parameter(nbytes: int, parameters: int) -> float | None:
    """Return bytes per parameter, None for a model without parameters."""
    return nbytes / parameters if parameters else None


def _unit_cells(units: Sequence[CertifiedUnit]) -> list[str | Text]:
    counts = Counter(unit.encoding for unit in units)
    several = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    return [str(len(units)), output.cell(several if len(counts) != 1 else next(iter(counts)))]


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
