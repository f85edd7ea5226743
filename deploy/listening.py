"""Where metrics of the supervisor and the daemon are served and to whom, as ``metrics:`` in a job's YAML says.

For processes that live as long as the job and do without torch, which the trainer's own configuration would bring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from store.endpoint.access import LOOPBACK, Guards
from store.errors import ConfigError


@dataclass(frozen=True)
class Listening:
    """An address, and what stands before it."""

    host: str = LOOPBACK
    guards: Guards = field(default_factory=Guards)


def listening(path: Path, section: object) -> Listening:
    """What the section says. ConfigError where it is none, or lets others in; other keys are the trainer's to check."""
    if not isinstance(section, dict) or not isinstance(section.get("host", ""), str):
        raise ConfigError(f"{path}: metrics: must be a section such as `metrics: {{port: 9464}}`, and is {section!r}")
    try:
        guards = Guards.model_validate({key: section[key] for key in Guards.model_fields if key in section})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: metrics.{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from error
    host = section.get("host", LOOPBACK)
    guards.require(host if section.get("enabled", True) else LOOPBACK, "metrics.host")
    return Listening(host, guards)
