"""Table of a certificate with one row per slot: how old, how far moved, how large; by encoding where that rounded.

Knows no store: only certified units, in the order of their layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from deploy.cli import output
from deploy.cli.layers import slots_of
from deploy.cli.text import drift_text, size_text
from store.certificate import CertifiedUnit, is_lossy, most


def slot_table(units: Sequence[CertifiedUnit], parameters: int) -> Table:
    """One row per slot: encoding, ages, drift and bytes as stored, and a total. ``parameters`` is the model's number.

    Where encodings rounded anything, one row per slot and encoding, with what was lost.
    """
    if any(is_lossy(unit.encoding) for unit in units):
        return _rounded_table(units, parameters)
    table = output.table()
    table.add_column("Slot", no_wrap=True, min_width=8)
    table.add_column("Units", justify="right")
    table.add_column("Encoding", overflow="fold")
    for name in ("Oldest", "Newest", "Max drift", "Bytes", "B/param"):
        table.add_column(name, justify="right", no_wrap=True)
    for slot in slots_of(units):
        own = [unit for unit in units if unit.slot == slot]
        table.add_row(output.cell(slot), *_unit_cells(own), *span(own), max_drift(own), *sizes(own, parameters))
    table.add_section()
    table.add_row("all", *_unit_cells(units), *span(units), max_drift(units), *sizes(units, parameters), style="bold")
    return table


def _rounded_table(units: Sequence[CertifiedUnit], parameters: int) -> Table:
    table = output.table()
    table.add_column("Slot\n  encoding", overflow="fold", min_width=8)
    for name in ("Oldest", "Newest", "Max drift", "Error", "Bytes", "B/param"):
        table.add_column(name, justify="right", no_wrap=True)
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
    error = drift_text(most(unit.error for unit in units))
    return [*span(units), max_drift(units), error, *sizes(units, parameters)]


def bytes_per_parameter(nbytes: int, parameters: int) -> float | None:
    """None for a model without parameters."""
    return nbytes / parameters if parameters else None


def _unit_cells(units: Sequence[CertifiedUnit]) -> list[str | Text]:
    return [str(len(units)), output.cell(_encodings(units))]


def span(units: Sequence[CertifiedUnit]) -> list[str]:
    """The oldest step and the newest."""
    return [str(of((unit.step for unit in units), default="")) for of in (min, max)]


def max_drift(units: Sequence[CertifiedUnit]) -> str:
    """Of what moves: the largest; ``?`` where any is unknown."""
    drifts = [unit.drift for unit in units if unit.moving]
    known = [drift for drift in drifts if drift is not None]
    if not drifts:
        return "fixed"
    return drift_text(None if len(known) < len(drifts) else max(known, default=0.0))


def sizes(units: Sequence[CertifiedUnit], parameters: int) -> list[str]:
    """Bytes as stored, and their share for each parameter of the model."""
    nbytes = sum(unit.nbytes for unit in units)
    share = bytes_per_parameter(nbytes, parameters)
    return [size_text(nbytes), "" if share is None else f"{share:.2f}"]


def _encodings(units: Sequence[CertifiedUnit]) -> str:
    counts = Counter(unit.encoding for unit in units)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
