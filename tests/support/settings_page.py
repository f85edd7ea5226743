"""What of the documentation is made from the settings' models; run as a module, it is written anew."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from monitor.config.load import ADVANCED, COMMON, Config, config_schema, setting_lines
from tests.support.cli import ROOT

PAGE = ROOT / "docs" / "configuration.md"
SCHEMA = ROOT / "docs" / "driftpoint.schema.json"

_BLOCK = re.compile(r"(?<=```yaml\n).*?(?=```)", re.S)


def documented(keys: Iterable[str]) -> str:
    """Return settings with their defaults and meanings, as docs/configuration.md shows them."""
    fields, defaults = Config.model_fields, Config().model_dump()
    return "".join(f"{line}\n" for key in keys for line in setting_lines(key, fields[key], defaults, ""))


def page() -> str:
    """Return the page as it should be: its first two blocks of YAML hold the common and the advanced settings."""
    blocks = iter([documented(COMMON), documented(ADVANCED)])
    return _BLOCK.sub(lambda _: next(blocks), PAGE.read_text(), count=2)


def schema_text() -> str:
    """The schema as it should be."""
    return json.dumps(config_schema(), indent=2) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    SCHEMA.write_text(schema_text())
