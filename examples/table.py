"""The tables at the end of the demo, and what has to be said beside them."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from examples.story import Story, mean_gap

LAST = 10
"""Steps that "at the end" means."""

_SLOTS = {"fp32": "weights", "exp_avg": "first moment", "exp_avg_sq": "second moment"}


def result_table(story: Story, control: Story | None) -> Table:
    """What was saved, what it cost, what the failure cost."""
    table = Table(title="one run, one rank lost", title_justify="left", show_lines=False)
    table.add_column("")
    table.add_column("Driftpoint", justify="right")
    table.add_column("compared with")
    for row in [*_saving_rows(story), *_stall_rows(story), *_failure_rows(story, control)]:
        table.add_row(*row)
    return table


def certificate_table(story: Story) -> Table:
    """How old and how far moved each layer was that the job resumed with."""
    units = {(unit["layer"], unit["slot"]): unit for unit in (story.certificate or {}).get("units", ())}
    kind = f"a composite of steps {_listed(story.resumed_steps)}" if story.is_composite else "all of one step"
    step = story.resumed.first if story.resumed else "-"
    newest = (story.certificate or {}).get("step", step)
    of = f"at step {step}" if newest == step else f"of step {newest}, going on at its effective step, {step}"
    table = Table(title=f"what was resumed {of}: {kind}", title_justify="left")
    table.add_column("layer")
    for name in _SLOTS.values():
        table.add_column(f"{name}\nage", justify="right")
        table.add_column("\ndrift", justify="right")
    for layer in dict.fromkeys(layer for layer, _ in units):
        cells = [cell for slot in _SLOTS for cell in _certified(units.get((layer, slot)))]
        table.add_row(layer, *cells)
    return table


def footnotes(story: Story, control: Story | None) -> Text:
    """What the numbers do and do not show. Says so where the run does not bear a claim out."""
    notes = [
        (
            "age: steps between the version and the commit. drift: how far the live state had moved from the version "
            "when the commit was made, relative to its norm; 0 where this commit wrote it."
        )
    ]
    if not story.is_selective:
        notes.append("NOT SHOWN BY THIS RUN: that saves are selective; most of them were full.")
    if not story.is_composite:
        notes.append("NOT SHOWN BY THIS RUN: that a composite is resumed; what was resumed is of one step.")
    notes += [_on_layers(story), _on_frequency(story)]
    if control is not None:
        notes.append(_on_determinism(story, control))
    if story.deepspeed_save is not None:
        notes.append(
            "save_checkpoint was timed at the end of this run. Neither it nor a decision waits for the disk; a save of "
            "Driftpoint's counts here only once it is committed, which means on the disk."
        )
    return Text("\n".join(f"- {note}" for note in notes), style="dim")


def _saving_rows(story: Story) -> list[tuple[str, str, str]]:
    partial = sum(commit.avoided > 0 for commit in story.commits)
    decisions = sum(len(life.decisions) for life in story.lives)
    rows = [
        ("saves committed", f"{len(story.commits)}", f"{decisions} decisions; {partial} saves left something out"),
        (
            "bytes written",
            _mb(story.written),
            f"{_mb(story.full)} had each been full: x{_ratio(story.written, story.full)}",
        ),
    ]
    if story.deepspeed_save is not None:
        theirs = story.deepspeed_save["nbytes"] * len(story.commits)
        rows.append(
            ("", "", f"{_mb(theirs)} as DeepSpeed's save_checkpoint, as often: x{_ratio(story.written, theirs)}")
        )
    return rows


def _stall_rows(story: Story) -> list[tuple[str, str, str]]:
    stalls = sorted(story.stalls)
    step = median(seconds for life in story.lives for seconds in life.seconds.values())
    ours = f"{_ms(median(stalls))} median, {_ms(stalls[-1])} most"
    theirs = "a training step takes " + _ms(step)
    rows = [("training held by a decision", ours, theirs)]
    if story.deepspeed_save is not None:
        seconds = sorted(story.deepspeed_save["seconds"])
        rows.append(
            ("", "", f"one save_checkpoint: {_ms(median(seconds))} median, {_ms(seconds[-1])} most of {len(seconds)}")
        )
    return rows


def _failure_rows(story: Story, control: Story | None) -> list[tuple[str, str, str]]:
    assert story.resumed is not None
    before, after = story.killed, story.resumed
    rows = [("steps lost", f"{story.steps_lost}", f"killed after step {before.last}, resumed at {after.first}")]
    again = sorted(before.losses.keys() & after.losses.keys())
    if again:
        first = again[0]
        rows.append(
            (
                f"loss at step {first}",
                f"{after.losses[first]:.4f}",
                f"{before.losses[first]:.4f} before the kill, same batch",
            )
        )
    last = sorted(story.losses)[-LAST:]
    spans = {
        f"loss, steps {after.first + 1} to {after.first + LAST}": [*range(after.first + 1, after.first + LAST + 1)]
    }
    spans[f"loss, steps {last[0]} to {last[-1]}"] = last
    for name, wanted in spans.items():
        steps = [step for step in wanted if step in story.losses]
        ours = sum(story.losses[step] for step in steps) / len(steps)
        beside = ""
        if control is not None:
            gap = mean_gap(story, control, steps)
            beside = f"{ours - gap:.4f} without the failure: {gap:+.4f}"
        rows.append((name, f"{ours:.4f}", beside))
    return rows


def _on_layers(story: Story) -> str:
    """Where the saving came from: which layers, and which slots, were written less often."""
    layers = story.lives[0].start["layers"]
    counts = {layer: story.times_saved(layer, "fp32") for layer in layers}
    blocks = [count for layer, count in counts.items() if layer.rsplit(".", 1)[-1].isdigit()]
    others = ", ".join(f"{layer} {count}" for layer, count in counts.items() if not layer.rsplit(".", 1)[-1].isdigit())
    spread = f"{min(blocks)} to {max(blocks)}" if blocks else "-"
    sizes = story.sizes
    slots = ", ".join(
        f"{name} {_mb(sum(sizes[unit.layer, slot] for c in story.commits for unit in c.units if unit.slot == slot))}"
        for slot, name in _SLOTS.items()
    )
    return (
        f"weights were written, in {len(story.commits)} saves: a block {spread} times; {others}. With AdamW the blocks "
        "move almost alike, so choosing among them gained little. What was gained came from the slots (written: "
        f"{slots}), and from drift that slows down with the learning rate, so that saves become rarer by themselves."
    )


def _on_frequency(story: Story) -> str:
    """What the simplest alternative is: full saves, less often, for the same bytes."""
    steps = max(story.losses) / max(1, story.written / (story.full / len(story.commits)))
    return (
        f"the same bytes would pay for a full save every {steps:.0f} steps: exact, but up to that many steps to do "
        "again. Which of the two is better depends on how often jobs fail; the table shows both sides of it."
    )


def _on_determinism(story: Story, control: Story) -> str:
    shared = sorted(story.killed.losses.keys() & control.losses.keys())
    same = sum(story.killed.losses[step] == control.losses[step] for step in shared)
    if same == len(shared):
        return f"up to the kill the two runs' losses are equal to the last bit, all {same}."
    return f"up to the kill the two runs' losses are equal to the last bit at {same} of {len(shared)} steps only."


def _certified(unit: Mapping[str, Any] | None) -> tuple[str, str]:
    if unit is None:
        return "", ""
    drift = "?" if unit["drift"] is None else "0" if unit["drift"] == 0 else f"{unit['drift']:.2g}"
    return str(unit["staleness"]), drift


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.2f}"
