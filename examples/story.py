"""What a run came to: its journal and its commits, put in order. Pure; every claim of the demo is a property here.

A *life* is one incarnation of the job: from a start to a kill, or to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from examples.commits import Commit


@dataclass
class Life:
    """first: the step it began at. losses and seconds by step; decisions as in the journal, in order."""

    first: int
    start: Mapping[str, Any]
    losses: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    decisions: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The last step that was finished."""
        return max(self.losses, default=self.first)


@dataclass
class Story:
    """One run. commits: of all lives; the n-th life has epoch n, as its store is new."""

    lives: list[Life]
    commits: Sequence[Commit]
    finished_at: int | None
    deepspeed_save: Mapping[str, Any] | None

    @property
    def resumed(self) -> Life | None:
        """The last life, if it began where an earlier one had committed."""
        return self.lives[-1] if len(self.lives) > 1 and self.lives[-1].first > 0 else None

    @property
    def killed(self) -> Life:
        """The life that was killed; the only one where none was."""
        return self.lives[-2] if len(self.lives) > 1 else self.lives[-1]

    @property
    def steps_lost(self) -> int:
        """Finished steps that had to be done again."""
        return sum(max(0, life.last - after.first) for life, after in pairwise(self.lives))

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """Of what was resumed last."""
        return None if self.resumed is None else self.resumed.start["certificate"]

    @property
    def is_composite(self) -> bool:
        """Whether what was resumed came from several steps."""
        exact = bool(self.certificate["exact"]) if self.certificate else True
        return not exact and len(self.resumed_steps) > 1

    @property
    def resumed_steps(self) -> list[int]:
        """The steps that the resumed state came from."""
        return sorted({unit["step"] for unit in self.certificate["units"]}) if self.certificate else []

    @property
    def is_selective(self) -> bool:
        """Whether most saves left something out."""
        return sum(commit.avoided > 0 for commit in self.commits) * 2 > len(self.commits)

    @property
    def written(self) -> int:
        """Bytes of all commits."""
        return sum(commit.nbytes for commit in self.commits)

    @property
    def full(self) -> int:
        """Bytes that the same commits would have been, had each been full."""
        return sum(commit.nbytes + commit.avoided for commit in self.commits)

    @property
    def stalls(self) -> list[float]:
        """Seconds that each decision kept the training, saves or not."""
        return [decision["stall_seconds"] for life in self.lives for decision in life.decisions]

    @property
    def losses(self) -> dict[int, float]:
        """By step, as the run that counts: what was done again replaces what was lost."""
        kept: dict[int, float] = {}
        for life in self.lives:
            kept = {step: loss for step, loss in kept.items() if step <= life.first} | life.losses
        return kept

    @property
    def sizes(self) -> dict[tuple[str, str], int]:
        """Bytes of each (layer, slot) when stored raw."""
        decisions = (decision for life in self.lives for decision in life.decisions)
        return {(unit["layer"], unit["slot"]): unit["nbytes"] for one in decisions for unit in one["units"]}

    def times_saved(self, layer: str, slot: str) -> int:
        """How many commits wrote a unit."""
        return sum(len(self.saved_at(life, layer, slot)) for life in range(len(self.lives)))

    def saved_at(self, life: int, layer: str, slot: str) -> set[int]:
        """Steps of the commits of a life (counted from 0) that wrote a unit."""
        return {
            commit.step
            for commit in self.commits
            if commit.epoch == life + 1 and any((unit.layer, unit.slot) == (layer, slot) for unit in commit.units)
        }


def tell(events: Iterable[Mapping[str, Any]], commits: Sequence[Commit] = ()) -> Story:
    """The story of a journal. ValueError where it does not begin with a start."""
    story = Story([], commits, None, None)
    for event in events:
        if event["event"] == "start":
            story.lives.append(Life(event["step"], event))
        elif not story.lives:
            raise ValueError(f"the journal begins with {event['event']!r}, not with a start")
        elif event["event"] == "step":
            story.lives[-1].losses[event["step"]] = event["loss"]
            story.lives[-1].seconds[event["step"]] = event["seconds"]
        elif event["event"] == "decision":
            story.lives[-1].decisions.append(event)
        elif event["event"] == "deepspeed_save":
            story.deepspeed_save = event
        elif event["event"] == "end":
            story.finished_at = event["step"]
    return story


def mean_gap(story: Story, other: Story, steps: Iterable[int]) -> float:
    """Mean of the loss of ``story`` less that of ``other`` over ``steps``: the same batches in both."""
    return fmean(story.losses[step] - other.losses[step] for step in steps)
