"""Collect incidents of a run from its trace and store. Pure.

A condition that lasts for several decisions is one incident. Names in the texts are untrusted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from deploy.format import plural, span_text
from deploy.health.facts import Severity
from store.text import listed
from store.trace import ResumedLine


@dataclass(frozen=True)
class Incident:
    """An event in a run. ``step`` and ``at``: step and Unix time of its begin, None if unknown."""

    kind: str
    severity: Severity
    text: str
    step: int | None = None
    at: float | None = None
    until: int | None = None  # last step
    times: int = 1  # decisions at which it held
    key: str = ""  # consecutive incidents with the same key are merged


class Incidents:
    """Collects incidents in order and keeps the newest ``most``; ``dropped`` counts the others."""

    def __init__(self, most: int = 400) -> None:
        self._most = most
        self._found: list[Incident] = []
        self._open: dict[str, int] = {}
        self.dropped = 0

    def add(self, incident: Incident) -> None:
        self._found.append(incident)
        if len(self._found) > 2 * self._most:
            self.dropped += len(self._found) - self._most
            self._found = self._found[-self._most :]
            self._open.clear()

    def update(self, incidents: Sequence[Incident], step: int) -> None:
        """Update the conditions that hold at a decision: continue those that held before, begin new ones, end the rest.

        Harmless ones (``plain``) may pause: they are merged over the whole incarnation."""
        still = {key: place for key, place in self._open.items() if self._found[place].severity == "plain"}
        for incident in incidents:
            place = self._open.get(incident.key)
            if place is None:
                self.add(incident)
                still[incident.key] = len(self._found) - 1
            else:
                before = self._found[place]
                self._found[place] = replace(before, until=step, times=before.times + 1)
                still[incident.key] = place
        self._open = still

    def ended(self) -> None:
        """End all conditions because the process ended."""
        self._open.clear()

    def listed(self) -> tuple[Incident, ...]:
        extra = max(0, len(self._found) - self._most)
        self.dropped += extra
        return tuple(self._found[extra:])


def nonfinite_incident(kind: Literal["not finite", "withheld"], units: Sequence[str], step: int, at: float) -> Incident:
    """Return the incident of units with NaN or Inf at a decision, or ``withheld`` from the commit that follows it."""
    when, key = ("", f"sick {'|'.join(units)}") if kind == "not finite" else (" when the save was written", "")
    text = f"{listed(units, 4)} contained NaN or Inf{when}: not saved, the last finite version is kept"
    return Incident(kind, "bad", text, step, at, key=key)


def restart_incident(line: ResumedLine, epoch: int, at: float, gap: float, last_step: int | None) -> Incident:
    """Return the incident of a restart.

    ``gap``: seconds since the last line of the job before. ``last_step``: step of its last decision, or None."""
    text = f"epoch {epoch} resumed at step {line.step}"
    if line.newest != line.step:
        text += f", from the commit of step {line.newest}"
    if last_step is not None and last_step > line.step:
        text += f": {plural(last_step - line.step, 'step')} repeated"
    if gap > 1.0:
        text += f"; {span_text(gap)} after the last trace line of the job before"
    return Incident("restart", "look", text, line.step, at)
