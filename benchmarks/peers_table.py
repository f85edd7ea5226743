"""The comparison with peers as figures with goals, and as a page: where others win comes first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.figures import Figure

OURS = "driftpoint"
DCPS = ("dcp", "dcp-process")


@dataclass(frozen=True)
class Column:
    """One thing that is compared. goal: the most that ours may be; None where no other peer may be less."""

    key: str
    title: str
    unit: str
    goal: float | None = None


COLUMNS = (
    Column("stall", "stall", "ms", 2.0),
    Column("lost", "training time lost a save", "steps"),
    Column("slowest", "slowest step beside a save", "x", 1.2),
    Column("durable", "time to durable, synced", "x", 1.1),
    Column("load", "load, warm", "s"),
    Column("memory", "extra memory", "x"),
)
FOUND = ("flip", "kill")
_EACH_SAVE = ("stall", "total", "steps", "slowest", "step", "durable", "floor")


def reduced(seen: Mapping[str, Any]) -> dict[str, Any]:
    """One row from what the processes of a peer told, medians of all saves of all rounds.

    Args:
        seen: ``train`` and ``load``, one a round; ``memory``, bytes; ``flips`` and ``kills``, as
            :func:`outcome_of_load` and :func:`outcome_of_kill` name them.
    """
    saves = [
        {name: one[name][index] for name in _EACH_SAVE} for one in seen["train"] for index in range(len(one["stall"]))
    ]
    state = seen["train"][0]["bytes"]
    row: dict[str, Any] = {
        "step": median(save["step"] for save in saves),
        "stall": 1e3 * median(save["stall"] for save in saves),
        "lost": median(save["total"] / save["step"] - save["steps"] for save in saves),
        "slowest": median(save["slowest"] / save["step"] for save in saves),
        "durable": median(save["durable"] / save["floor"] for save in saves),
        "durable seconds": median(save["durable"] for save in saves),
        "load": median(seen["load"]) if seen["load"] else None,
        "memory": median(seen["memory"]) / state if seen["memory"] else None,
        "flip": _counted(seen["flips"]),
        "kill": _counted(seen["kills"]),
        "version": seen["train"][0]["version"],
        "bytes": state,
        "tensors": seen["train"][0]["tensors"],
    }
    return row


def _counted(outcomes: Sequence[str]) -> str:
    """``3 × found``, or ``2 × loaded silently, 1 × found``."""
    return ", ".join(f"{outcomes.count(one)} × {one}" for one in dict.fromkeys(outcomes)) or "not tried"


def outcome_of_load(told: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """Name what a load of damaged files did.

    Args:
        told: ``refused``, or the ``step`` and the ``digest`` that came back.
        digests: Of the steps that were saved. Another step that comes back tells that this one is damaged.
    """
    if "refused" in told or str(told["step"]) not in digests:
        return "found"
    if digests.get(str(told["step"])) == told["digest"]:
        return "harmless"
    return "loaded silently"


def outcome_of_kill(told: Sequence[Mapping[str, Any]], digests: Mapping[str, str]) -> str:
    """Name what a kill in mid-save left.

    Args:
        told: Of the newer step, then of the older one, as for :func:`outcome_of_load`.
        digests: Of both.
    """
    newer, older = (outcome_of_load(one, digests) for one in told)
    if "loaded silently" in (newer, older):
        return "torn state loaded"
    if older == "found":
        return "older lost"
    return "older intact, newer " + ("refused" if newer == "found" or _older_came(told[0], digests) else "complete")


def _older_came(told: Mapping[str, Any], digests: Mapping[str, str]) -> bool:
    return "step" in told and told["step"] != max(map(int, digests))


def ratio(ours: float, theirs: float) -> float:
    """Ours over theirs. Below a hundredth of a step or a hundredth of the state nothing was measured: 1 for both."""
    least = 0.01
    return max(ours, least) / max(theirs, least)


def wins_of_others(rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[Column, str, float]]:
    """Each column in which a peer is better than ours: the column, the best peer, and how many times."""
    found = []
    for column in COLUMNS:
        values = {name: row[column.key] for name, row in rows.items() if row.get(column.key) is not None}
        ours = values.pop(OURS, None)
        if ours is None or not values:
            continue
        best = min(values, key=values.__getitem__)
        if (times := ratio(ours, values[best])) > 1:
            found.append((column, best, times))
    return sorted(found, key=lambda one: -one[2])


def figures(rows: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """All columns of all rows; goals at ours."""
    found = []
    for column in COLUMNS:
        for name, row in rows.items():
            if (value := row.get(column.key)) is not None:
                goal = column.goal if name == OURS else None
                found.append(Figure(f"{column.title}, {name}", value, column.unit, row["version"], goal))
    ours = rows.get(OURS, {})
    others = [row for name, row in rows.items() if name != OURS]
    if ours and (lost := [row["lost"] for row in others]):
        found.append(Figure("time lost", ratio(ours["lost"], min(lost)), "x", "the best peer", 1.0))
    if ours.get("load") and (loads := [rows[name]["load"] for name in DCPS if rows.get(name, {}).get("load")]):
        found.append(Figure("load", ours["load"] / min(loads), "x", "DCP's, unchecked", 1.0))
    return found


def page(rows: Mapping[str, Mapping[str, Any]], reasons: Mapping[str, str], told: Mapping[str, str]) -> str:
    """The page in Markdown.

    Args:
        rows: By peer, as :func:`reduced` gives them.
        reasons: By peer that has no row, why.
        told: ``command``, ``machine``, ``rounds`` and ``note`` of the run.
    """
    size = next(iter(rows.values())) if rows else {"bytes": 0, "tensors": 0, "step": 0.0}
    measured = (
        f"Date: {time.strftime('%Y-%m-%d')}. Machine: {told['machine']}. One process, plain PyTorch with AdamW, "
        f"fp32: {size['bytes'] / 1e6:.0f} MB of state in {size['tensors']} tensors, a step of about "
        f"{size['step']:.2g} s; {told['rounds']}, taken in turns. Figures are medians."
    )
    lines = [
        "# Driftpoint beside others",
        "",
        f"    {told['command']}",
        "",
        measured,
        "",
        told["note"],
        "",
        "## Where others win",
        "",
    ]
    wins = wins_of_others(rows)
    if wins:
        lines += ["| | ours | best | ours is |", "|---|---|---|---|"]
        for column, best, times in wins:
            ours, theirs = (shown(column, rows[name]) for name in (OURS, best))
            lines.append(f"| {column.title} | {ours} | {theirs}, {best} | {times:.3g} × |")
    else:
        lines.append("In no column of this run.")
    lines += ["", "## All of them", ""]
    lines += ["| | " + " | ".join(column.title for column in COLUMNS) + " | one flipped byte | kill in mid-save |"]
    lines += ["|---" * (len(COLUMNS) + 3) + "|"]
    for name, row in rows.items():
        cells = [shown(column, row) for column in COLUMNS] + [row[key] for key in FOUND]
        lines.append(f"| {name} ({row['version']}) | " + " | ".join(cells) + " |")
    lines += [f"| {name} | {reason} {'| ' * (len(COLUMNS) + 1)}|" for name, reason in reasons.items()]
    lines += ["", "## Goals", "", "| | value | goal | |", "|---|---|---|---|"]
    for figure in figures(rows):
        if figure.goal is not None:
            verdict = "holds" if figure.holds else "**missed**"
            lines.append(f"| {figure.name} | {figure.value:.3g} {figure.unit} | ≤ {figure.goal:g} | {verdict} |")
    return "\n".join([*lines, "", HOW])


def shown(column: Column, row: Mapping[str, Any]) -> str:
    """A value with its unit; of the time to durable, the seconds too."""
    value = row.get(column.key)
    if value is None:
        return "–"
    unit = {"x": "×"}.get(column.unit, column.unit)
    seconds = f" ({row['durable seconds']:.2f} s)" if column.key == "durable" else ""
    return f"{value:.3g} {unit}{seconds}"


HOW = """## How it is measured

- **In turns.** Each round starts one process a peer, one after the other, so that what slows the machine for a while
  slows all. Every process builds the same model from the same seed, chooses the same batch, and makes two saves that
  are not counted. Peers run in environments of their own that see one torch. The C library does not give memory that
  training frees back to the system (since 2026-11-30): page faults took up to 100 ms of three steps, at random.
- **Stall**: what the training thread waits for: the call, and what the next optimizer step waits for copies.
- **Training time lost**: steps from the call of a save until it is finished and on the disk (three at least), less as
  many plain steps of the same process just before; in steps. It contains the stall and what the background takes from
  training. Where a peer leaves its bytes to the page cache, a thread calls fsync once it is done (since 2026-11-30).
- **Slowest step**: the longest of those steps, the call of the save in the first, over a plain step.
- **Time to durable**: a save with no training beside, then fsync of its files and folders, which costs nothing where
  the peer has done so; over a plain write of the same bytes with one fsync, in the same process.
- **Load, warm**: a fresh process with the model built and its files in the page cache, until all values are in place;
  values are compared to the bit afterwards. For Driftpoint `attach` and `resume` together, every byte hashed; not what
  its background threads do from then on (they measure the state and touch the memory that saves copy into).
- **Extra memory**: the peak of proportional set size over the process and its children during a save beside training,
  less that before the first save, over the bytes of the state. Staging buffers that stay are in it.
- **One flipped byte**: in a copy of the newest save, at shares of its largest file that
  are evenly apart, such as a quarter, half and three quarters. Found:
  the load is refused, or another whole step comes back. Harmless: the same values came back, as
  the byte held none. Loaded silently: other values come back without an error.
- **Kill in mid-save**: one step saved to its end, another begun, SIGKILL to the process and its children at
  such shares of the time to durable. Then both are loaded. "Newer complete": it came back to the bit.

Peers are used as their documentation says for one process without a GPU, with the fastest way named there; the
docstrings of `benchmarks/peers_savers.py` say which. Several are made for GPUs, where staging is another matter. This
page says nothing about them there, nor about many ranks.
"""
