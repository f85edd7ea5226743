"""What a merge tells: the certificate as a file beside the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from merger.containers.base import OutFile
from merger.containers.verbatim import Verbatim
from store.certificate import Certificate

CERTIFICATE = "driftpoint-certificate.json"


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
