"""The report as one HTML page that needs nothing else: no script, no font, no image, no address outside.

It lays out what others found and judged. Names come from stores and traces, which anybody may have written: the
template escapes everything, and control characters are spelled out before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from deploy.cli.door import parameters
from deploy.cli.text import count_text, plural, printable
from deploy.report.certificate import Certified, certified
from deploy.report.cost import Cost, cost_of
from deploy.report.history import History
from deploy.report.incidents import Incident, by_time
from deploy.report.maps import Maps, maps_of
from deploy.safety.facts import Facts
from deploy.safety.verdict import Verdict
from deploy.safety.words import clock
from store.schema import ManifestRecord

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Content:
    """What a page is made of. missing: why there is no history, and how to get one; '' where there is."""

    facts: Facts
    verdict: Verdict
    history: History | None
    incidents: Sequence[Incident]
    missing: str
    version: str


def render(content: Content) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["clean"] = printable
    environment.filters["clock"] = clock
    return environment.get_template("page.html").render(**_context(content))


def _context(content: Content) -> Mapping[str, Any]:
    facts, history = content.facts, content.history
    certificate = None if facts.status is None else facts.status.certificate
    table: Certified | None = None
    if certificate is not None and facts.status is not None and facts.status.resumed is not None:
        table = certified(certificate, parameters(facts.status.resumed))
    maps: Maps | None = None if history is None or not history.units else maps_of(history)
    cost: Cost | None = None if history is None or not history.totals.saves else cost_of(history)
    return {
        "facts": facts,
        "verdict": content.verdict,
        "model": "" if facts.newest is None else _model(facts.newest),
        "history": history,
        "maps": maps,
        "cost": cost,
        "incidents": by_time(content.incidents),
        "table": table,
        "missing": content.missing,
        "version": content.version,
        "words": {"good": "ok", "plain": "–", "look": "look", "bad": "bad"},
    }


def _model(newest: ManifestRecord) -> str:
    return (
        f"{plural(len(newest.layers), 'layer')}, {count_text(parameters(newest))} parameters, {newest.framework} on "
        f"{plural(newest.world_size, 'rank')}, policy {newest.policy}"
    )
