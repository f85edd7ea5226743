"""What a merge tells: the certificate as a file beside the checkpoint, and as rows of a table."""

from __future__ import annotations

import json
from collections.abc import Sequence

from merger.containers.base import OutFile
from merger.containers.verbatim import Verbatim
from store.certificate import Certificate

CERTIFICATE = "driftpoint-certificate.json"

COLUMNS = ("layer", "slot", "step", "staleness", "drift", "encoding", "note")


def certificate_file(certificate: Certificate, tag: str, notes: Sequence[str]) -> OutFile:
    """The certificate as a file of the output. tag: the checkpoint's name inside of it."""
    document = {"tag": tag, **certificate.as_json(), "notes": list(notes)}
    return OutFile(CERTIFICATE, Verbatim((json.dumps(document, indent=1) + "\n").encode()))


def rows(certificate: Certificate) -> list[tuple[str, ...]]:
    """One row per (layer, slot), in the order of :data:`COLUMNS`, ready to print."""
    return [
        (
            unit.layer,
            unit.slot,
            str(unit.step),
            str(unit.staleness),
            "unknown" if unit.drift is None else f"{unit.drift:.2e}",
            unit.encoding,
            _note(moving=unit.moving, fallback=unit.fallback),
        )
        for unit in certificate.units
    ]


def summary(certificate: Certificate) -> str:
    """One sentence: exact, or how old and how far moved the worst layer is."""
    if certificate.exact:
        return f"exact: every layer is of step {certificate.step}"
    drift = "unknown" if certificate.max_drift is None else f"{certificate.max_drift:.2e}"
    return (
        f"not exact: a composite at step {certificate.step}; staleness up to {certificate.max_staleness} steps, "
        f"drift up to {drift}"
    )


def _note(*, moving: bool, fallback: bool) -> str:
    if fallback:
        return "older version: the newest is damaged"
    return "" if moving else "does not move"
