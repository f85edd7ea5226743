"""What a merge tells: the certificate as a file beside the checkpoint, and as rows of a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from merger.containers.base import OutFile
from merger.containers.verbatim import Verbatim
from store.certificate import Certificate

CERTIFICATE = "driftpoint-certificate.json"

COLUMNS = ("layer", "slot", "step", "staleness", "drift", "encoding", "source", "note")


@dataclass(frozen=True)
class SourceUse:
    """One source of a merge. name: as the recipe has it. path: absolute. origin: what exactly was taken, in words."""

    name: str
    kind: str
    path: str
    origin: str
    step: int
    save: str


def certificate_file(
    certificate: Certificate, tag: str, notes: Sequence[str], sources: Sequence[SourceUse] = ()
) -> OutFile:
    """The certificate as a file of the output. tag: the checkpoint's name inside of it. sources: what it is made of."""
    document = {
        "tag": tag,
        **certificate.as_json(),
        "sources": [asdict(source) for source in sources],
        "notes": list(notes),
    }
    return OutFile(CERTIFICATE, Verbatim((json.dumps(document, indent=1) + "\n").encode()))


def rows(certificate: Certificate) -> list[tuple[str, ...]]:
    """One row per (layer, slot) and source, in the order of :data:`COLUMNS`, ready to print."""
    return [
        (
            unit.layer,
            unit.slot,
            str(unit.step),
            str(unit.staleness),
            "unknown" if unit.drift is None else f"{unit.drift:.2e}",
            unit.encoding,
            unit.source,
            _note(moving=unit.moving, fallback=unit.fallback),
        )
        for unit in certificate.units
    ]


def summary(certificate: Certificate) -> str:
    """One sentence: exact, or how old and how far moved the worst layer is."""
    if certificate.exact:
        return f"exact: every layer is of step {certificate.step}"
    drift = "unknown" if certificate.max_drift is None else f"{certificate.max_drift:.2e}"
    ages = [unit.staleness for unit in certificate.units if unit.moving]
    newer = f", or up to {-min(ages)} newer than the run state" if ages and min(ages) < 0 else ""
    return (
        f"not exact: a composite at step {certificate.step}; staleness up to {max(0, certificate.max_staleness)} steps"
        f"{newer}, drift up to {drift}"
    )


def _note(*, moving: bool, fallback: bool) -> str:
    if fallback:
        return "older version: the newest is damaged"
    return "" if moving else "does not move"
