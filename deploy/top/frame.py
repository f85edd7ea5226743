"""One frame of ``driftpoint top``: so many lines of so many columns, whatever the size of the model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from deploy.cli.text import drift_text, plural, printable, tail
from deploy.safety.check import Check
from deploy.safety.facts import Facts
from deploy.safety.verdict import Verdict, judge
from deploy.safety.words import clock, span_text
from deploy.top.rows import LayerRow, by_drift, course_range, layer_rows, moving_slots, spark

_STYLES = {"good": "green", "plain": "", "look": "yellow", "bad": "bold red"}
_TITLES = {"good": "bold white on green", "look": "bold black on yellow", "bad": "bold white on red"}
_OLD = "bold black on yellow"
"""Of a verdict that nobody could look at again."""

_STATES = {"fresh": "", "stale": "", "fallback": "bold red", "sick": "bold white on red"}
_PAIRS = (
    ("Newest commit", "Job"),
    ("A resume gives", "Saves"),
    ("Memory of this node", "Disk"),
    ("Bytes", "Kept"),
)
_SHORT = {"Newest commit": "Commit", "A resume gives": "Resume", "Memory of this node": "Memory"}
_NAME = 8
"""Columns of a fact's name."""

_SLOT = 14
"""Columns of a slot: age and drift."""


@dataclass(frozen=True)
class View:
    """What somebody chose to see. first: of the layers that are shown; sorted: by drift. trouble: why what is shown is
    old; age: how old, in seconds, and patience: from when on that is too old. keys: whether they are listened to."""

    first: int = 0
    sorted: bool = False
    trouble: str = ""
    age: float = 0.0
    keys: bool = False
    patience: float = 15.0

    @property
    def old(self) -> bool:
        """Whether what is shown may not hold any more."""
        return bool(self.trouble) or self.age > self.patience


@dataclass(frozen=True)
class Frame:
    """lines: as they are drawn. layers: how many there are; shown: how many of them fit."""

    lines: Sequence[Text]
    layers: int
    shown: int


def frame(console: Console, facts: Facts, view: View, width: int, height: int | None) -> Frame:
    """height: lines that there are; None: as many as it takes."""
    verdict = judge(facts)
    head = [*_title(console, facts, verdict, view, width), *_facts(verdict, width)]
    head += _concerns(verdict, width, 20 if height is None else max(1, height // 8))
    slots = moving_slots(facts)
    rows = layer_rows(facts, slots)
    rows = by_drift(rows, slots) if view.sorted else rows
    table = _Table(rows, slots, width)
    room = len(rows) if height is None else max(0, height - len(head) - len(table.heading) - 2)
    first = max(0, min(view.first, len(rows) - room))
    shown = rows[first : first + room]
    body = [*table.heading, *(table.line(row) for row in shown)] if rows else [Text("No layer is known yet.", "dim")]
    lines = [*head, Text(""), *body]
    if height is not None:
        lines = lines[: height - 1]
        lines += [Text("")] * (height - 1 - len(lines))
        lines.append(_foot(view, first, len(shown), len(rows), width))
    return Frame([_cut(line, width) for line in lines], len(rows), room)


def _title(console: Console, facts: Facts, verdict: Verdict, view: View, width: int) -> list[Text]:
    now = f"{clock(facts.now)[11:]} UTC"
    root = tail(printable(str(facts.root)), max(8, width - len(now) - 3))
    lines = [Text.assemble((root, "bold"), " " * max(1, width - len(root) - len(now)), (now, "dim"))]
    if view.old:
        why = printable(view.trouble) or "the store does not answer"
        lines.append(Text(f" As of {span_text(view.age)} ago: {why} ", "bold white on red"))
    chip = Text(f" {verdict.title.upper()} ", _TITLES[verdict.level])
    if view.old and verdict.level != "bad":
        chip = Text(" NOT KNOWN ANY MORE ", _OLD)
    told = Text.assemble(chip, " ", printable(verdict.sentence))
    return [*lines, *told.wrap(console, width)]


def _facts(verdict: Verdict, width: int) -> list[Text]:
    found = {check.name: check for check in verdict.checks}
    half = (width - 2) // 2
    lines = [Text("")]
    for left, right in _PAIRS:
        line = Text()
        if left in found:
            line.append_text(_fact(found[left]))
        line = _padded(line, half)
        if right in found:
            line.append("  ").append_text(_fact(found[right]))
        lines.append(line)
    return [line for line in lines if line.plain.strip() or line is lines[0]]


def _fact(check: Check) -> Text:
    name = _SHORT.get(check.name, check.name)
    return Text.assemble((f"{name:<{_NAME}}", "bold"), (printable(check.text), _STYLES[check.level]))


def _concerns(verdict: Verdict, width: int, most: int) -> list[Text]:
    lines: list[Text] = []
    for check in verdict.concerns[:most]:
        text = f"! {check.name}: {printable(check.text)}"
        rest = printable(check.todo or check.note)
        text += f" → {rest}" if rest and len(text) + len(rest) + 3 <= 2 * width else ""
        lines.append(Text(text, _STYLES[check.level]))
    if len(verdict.concerns) > most:
        lines.append(Text(f"  and {len(verdict.concerns) - most} more: driftpoint report tells all", "yellow"))
    return lines


class _Table:
    def __init__(self, rows: Sequence[LayerRow], slots: Sequence[str], width: int) -> None:
        longest = max((cell_len(printable(row.layer)) for row in rows), default=5)
        fit = max(1, min(len(slots), (width - min(longest, 20) - 1) // (_SLOT + 2)))
        self._slots = slots[:fit]
        self._left_out = len(slots) - fit
        rest = width - len(self._slots) * (_SLOT + 2)
        measured = max((len(row.course) for row in rows), default=0)
        self._name = max(8, min(longest, rest - 10 if measured and rest > 24 else rest - 1))
        self._spark = max(0, min(rest - self._name - 2, measured, 64)) if measured else 0
        self._range = course_range(rows)

    @property
    def heading(self) -> list[Text]:
        """Names of slots, and of their columns."""
        above, below = Text(" " * self._name), Text(f"{'layer':<{self._name}}", "bold")
        for slot in self._slots:
            above.append(f"  {tail(printable(slot), _SLOT):>{_SLOT}}", "bold")
            below.append(f"  {'age':>5} {'drift':>8}", "bold")
        if self._spark:
            title = "drift lately"
            below.append(f"  {title if self._spark >= len(title) else 'lately'[: self._spark]}", "bold")
        if self._left_out:
            above.append(f"  +{plural(self._left_out, 'slot')}", "dim")
        return [above, below]

    def line(self, row: LayerRow) -> Text:
        """One layer."""
        text = Text(_fitted(printable(row.layer), self._name))
        for name in self._slots:
            slot = row.slots.get(name)
            if slot is None:
                text.append(" " * (_SLOT + 2))
                continue
            age = "never" if slot.age is None else f"{slot.age}{'!' if slot.state == 'fallback' else ''}"
            drift = "NaN/Inf" if slot.state == "sick" else drift_text(slot.drift)
            text.append(f"  {age:>5} {drift:>8}", _STATES[slot.state])
        if self._spark:
            text.append("  " + spark(row.course, self._spark, *self._range), "cyan")
        return text


def _foot(view: View, first: int, shown: int, layers: int, width: int) -> Text:
    if not view.keys:
        return Text("")
    where = f"layers {first + 1}–{first + shown} of {layers} " if shown else f"{layers} layers " if layers else ""
    order = "s model order" if view.sorted else "s by drift"
    keys = f"{order}   q quit" if shown >= layers else f"↑↓ PgUp PgDn scroll   {order}   q quit"
    return Text(f"{where:<{max(0, width - len(keys))}}{keys}", "reverse")


def _fitted(name: str, width: int) -> str:
    """In so many columns, cut at its start; some letters take two."""
    shown = name
    while cell_len(shown) > width:
        shown = tail(name, len(shown) - 1)
    return set_cell_size(shown, width)


def _padded(text: Text, width: int) -> Text:
    text = _cut(text, width)
    text.append(" " * (width - len(text)))
    return text


def _cut(text: Text, width: int) -> Text:
    text = text.copy()
    text.truncate(width, overflow="ellipsis")
    text.no_wrap = True
    return text
