"""The screen of ``driftpoint top``: whether the run is safe, and the age and drift of its layers. Does no I/O."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from deploy.format import clock, drift_text, plural, printable, span_text, tail
from deploy.health.checks import Verdict, judge
from deploy.health.facts import Check, Facts
from deploy.tables import slots_of
from store.certificate import CertifiedUnit
from store.names import BUFFER, FROZEN, Unit

_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"good": "green", "plain": "", "look": "yellow", "bad": "bold red"}
_TITLES = {"good": "bold white on green", "look": "bold black on yellow", "bad": "bold white on red"}
_STATES = {"fresh": "", "stale": "", "fallback": "bold red", "sick": "bold white on red"}
_PAIRS = (("Newest commit", "Job"), ("A resume gives", "Saves"), ("Memory of this node", "Disk"), ("Bytes", "Kept"))
_SHORT = {"Newest commit": "Commit", "A resume gives": "Resume", "Memory of this node": "Memory"}
_FACT_NAME = 8
_SLOT = 14
_GAP = 2
_MAX_SPARK = 64


@dataclass(frozen=True)
class Slot:
    """Age and drift of one slot of a layer."""

    age: int | None  # steps from the version to the current step, None if never saved
    drift: float | None  # at the last decision that measured it, else at the commit; None if unknown
    state: str  # ``fresh``, ``stale``, ``fallback`` or ``sick``


@dataclass(frozen=True)
class LayerRow:
    """One layer: its slots by name, and the drift of the first slot at the last decisions, oldest first."""

    layer: str
    slots: Mapping[str, Slot]
    course: Sequence[float | None]


def moving_slots(facts: Facts) -> list[str]:
    """Return the slots that training changes, weights first."""
    certificate = None if facts.status is None else facts.status.resume
    if certificate is not None:
        return slots_of([unit for unit in certificate.units if unit.moving])
    if facts.current is not None:
        return list(dict.fromkeys(one.slot for one in facts.current.job.units if one.moving))
    return []


def layer_rows(facts: Facts, slots: Sequence[str]) -> list[LayerRow]:
    """Return the layers in the order of the model."""
    certificate = None if facts.status is None else facts.status.resume
    units = {} if certificate is None else {Unit(one.layer, one.slot): one for one in certificate.units}
    job_status = facts.current
    layers = dict.fromkeys(unit.layer for unit in units if unit.slot not in (FROZEN, BUFFER))
    if job_status is not None and not layers:
        layers = dict.fromkeys(one.layer for one in job_status.job.units if one.moving)
    measured = [] if job_status is None else [decided for decided in job_status.decisions if decided.drift]
    drifts: dict[Unit, float] = {}
    for decided in measured:
        drifts.update(decided.drift)
    sick = frozenset() if job_status is None else job_status.sick
    at = None if job_status is None or not facts.running else job_status.step_at(facts.now)
    rows = []
    for layer in layers:
        found = {
            slot: _slot(units.get(Unit(layer, slot)), drifts.get(Unit(layer, slot)), at, Unit(layer, slot) in sick)
            for slot in slots
            if Unit(layer, slot) in units or Unit(layer, slot) in drifts
        }
        first = Unit(layer, slots[0]) if slots else None
        course = [] if first is None else [decided.drift.get(first) for decided in measured]
        rows.append(LayerRow(layer, found, course))
    return rows


def _slot(unit: CertifiedUnit | None, drift: float | None, at: float | None, sick: bool) -> Slot:
    if unit is None:
        return Slot(None, drift, "sick" if sick else "stale")
    age = unit.staleness if at is None else max(0, round(at - unit.step))
    state = "sick" if sick else "fallback" if unit.fallback else "stale" if unit.staleness else "fresh"
    return Slot(age, unit.drift if unit.fallback or drift is None else drift, state)


def by_drift(rows: Sequence[LayerRow], slots: Sequence[str]) -> list[LayerRow]:
    """Return the rows sorted by drift of the first slot, largest first, after those that are sick or fell back."""

    def key(row: LayerRow) -> tuple[bool, float]:
        slot = row.slots.get(slots[0]) if slots else None
        return (slot is None or slot.state not in ("sick", "fallback"), -((slot.drift or 0.0) if slot else 0.0))

    return sorted(rows, key=key)


@dataclass(frozen=True)
class Freshness:
    """Age of the facts."""

    trouble: str = ""  # error of the last poll, or ''
    age: float = 0.0  # seconds since the last successful poll
    patience: float = 15.0  # seconds after which the facts count as outdated

    @property
    def stale(self) -> bool:
        return bool(self.trouble) or self.age > self.patience


@dataclass(frozen=True)
class Dashboard:
    """Renders the facts in the given width and height.

    ``all_layers`` shows all layers in model order, at any height; otherwise the most drifted ones that fit."""

    facts: Facts
    freshness: Freshness = Freshness()
    all_layers: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, None if self.all_layers else options.height or console.height
        verdict = judge(self.facts)
        head = Group(
            *_title(self.facts, verdict, self.freshness, width),
            Text(),
            _checks(verdict),
            *_concerns(verdict, width, 20 if height is None else max(1, height // 8)),
            Text(),
        )
        yield head
        slots = moving_slots(self.facts)
        rows = layer_rows(self.facts, slots)
        if not rows:
            yield Text("No layers known yet.", "dim")
            return
        if height is None:
            yield _layers(rows, rows, slots, width)
            return
        used = len(console.render_lines(head, options.update(height=None), pad=False)) + 3  # headings and foot
        room = max(0, height - used)
        shown = rows if room >= len(rows) else by_drift(rows, slots)[:room]
        yield _layers(shown, rows, slots, width)
        order = "" if len(shown) == len(rows) else ", largest drift first"
        yield _cut(f"{len(shown)} of {plural(len(rows), 'layer')}{order} · Ctrl-C to quit", "dim")


def _title(facts: Facts, verdict: Verdict, freshness: Freshness, width: int) -> list[RenderableType]:
    now, line = f"{clock(facts.now)[11:]} UTC", Table.grid(expand=True)
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True, justify="right")
    line.add_row(Text(tail(printable(str(facts.root)), max(1, width - len(now) - 3)), "bold"), Text(now, "dim"))
    lines: list[RenderableType] = [line]
    if freshness.stale:
        why = printable(freshness.trouble) or "the store does not answer"
        lines.append(_cut(f" As of {span_text(freshness.age)} ago: {why} ", "bold white on red"))
    title, style = verdict.title.upper(), _TITLES[verdict.level]
    if freshness.stale and verdict.level != "bad":
        title, style = "OUTDATED", _TITLES["look"]
    return [*lines, Text.assemble((f" {title} ", style), " ", printable(verdict.sentence))]


def _checks(verdict: Verdict) -> Table:
    found = {check.name: check for check in verdict.checks}
    table = Table.grid(expand=True, padding=(0, _GAP, 0, 0))
    for _ in range(2):
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for left, right in _PAIRS:
        if left in found or right in found:
            table.add_row(*(_check(found[name]) if name in found else "" for name in (left, right)))
    return table


def _check(check: Check) -> Text:
    name = _SHORT.get(check.name, check.name)
    return Text.assemble((f"{name:<{_FACT_NAME}}", "bold"), (printable(check.text), _STYLES[check.level]))


def _concerns(verdict: Verdict, width: int, most: int) -> list[Text]:
    lines = []
    for check in verdict.concerns[:most]:
        text = f"! {check.name}: {printable(check.text)}"
        rest = printable(check.todo or check.note)
        text += f" → {rest}" if rest and len(text) + len(rest) + 3 <= 2 * width else ""
        lines.append(_cut(text, _STYLES[check.level]))
    if len(verdict.concerns) > most:
        lines.append(_cut(f"  and {len(verdict.concerns) - most} more: see driftpoint report", "yellow"))
    return lines


def _layers(shown: Sequence[LayerRow], rows: Sequence[LayerRow], slots: Sequence[str], width: int) -> Table:
    """Return the table of the layers ``shown``; columns fit all ``rows``, so that they stay where they are."""
    longest = max(cell_len(printable(row.layer)) for row in rows)
    fit = max(1, min(len(slots), (width - min(longest, 20) - 1) // (_SLOT + _GAP)))
    rest = width - min(fit, len(slots)) * (_SLOT + _GAP)
    measured = max(len(row.course) for row in rows)
    name_width = max(8, min(longest, rest - 10 if measured and rest > 24 else rest - 1))
    spark_width = max(0, min(rest - name_width - _GAP, measured, _MAX_SPARK))
    left_out = f"+{plural(len(slots) - fit, 'slot')}" if len(slots) > fit else ""
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column(Text(f"{left_out}\nlayer"), no_wrap=True, width=name_width)
    for name in slots[:fit]:
        table.add_column(Text(f"{tail(printable(name), _SLOT)}\n  age    drift"), justify="right", no_wrap=True)
    if spark_width:
        table.add_column(Text("\nrecent drift" if spark_width >= 12 else "\nrecent"), no_wrap=True, width=spark_width)
    low, high = _course_range(rows)
    for row in shown:
        cells = [Text(_fit_name(printable(row.layer), name_width))]
        cells += [_slot_text(row.slots.get(name)) for name in slots[:fit]]
        table.add_row(*cells, *([Text(_spark(row.course, spark_width, low, high), "cyan")] if spark_width else []))
    return table


def _slot_text(slot: Slot | None) -> Text:
    if slot is None:
        return Text()
    age = "never" if slot.age is None else f"{slot.age}{'!' if slot.state == 'fallback' else ''}"
    drift = "NaN/Inf" if slot.state == "sick" else drift_text(slot.drift)
    return Text(f"{age:>5} {drift:>8}", _STATES[slot.state])


def _fit_name(name: str, width: int) -> str:
    """Return the name cut at its start to so many columns; some letters take two."""
    shown = name
    while cell_len(shown) > width:
        shown = tail(name, len(shown) - 1)
    return shown


def _cut(text: str, style: str) -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _spark(course: Sequence[float | None], width: int, low: float, high: float) -> str:
    """Return bars on a logarithmic scale from ``low`` to ``high``; blank where drift was not measured."""
    span = math.log(high / low) if 0 < low < high else 1.0
    return "".join(_bar(value, low, span) for value in list(course)[-width:]).rjust(width)


def _bar(value: float | None, low: float, span: float) -> str:
    if value is None or not math.isfinite(value):
        return " "
    if value <= low:
        return _BARS[0]
    return _BARS[min(len(_BARS) - 1, int(math.log(value / low) / span * len(_BARS)))]


def _course_range(rows: Sequence[LayerRow]) -> tuple[float, float]:
    """Return the range of the bars, alike for all layers: at most four powers of ten below the largest drift."""
    found = [value for row in rows for value in row.course if value is not None and value > 0 and math.isfinite(value)]
    high = max(found, default=1.0)
    return max(min(found, default=high / 10), high / 1e4), high * 1.0001
