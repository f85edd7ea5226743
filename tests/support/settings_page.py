"""What of the documentation is made from the settings' models; run as a module, it is written anew."""

from __future__ import annotations

import json
import re

from deploy.settings_text import documented, schema
from tests.support.cli import ROOT

PAGE = ROOT / "docs" / "configuration.md"
SCHEMA = ROOT / "docs" / "driftpoint.schema.json"

_BLOCK = re.compile(r"(?<=```yaml\n).*?(?=```)", re.S)


def page() -> str:
    """The page as it should be: its first block of YAML holds the settings."""
    return _BLOCK.sub(lambda _: documented(), PAGE.read_text(), count=1)


def schema_text() -> str:
    """The schema as it should be."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    SCHEMA.write_text(schema_text())
