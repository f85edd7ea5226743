"""The body of a record's file, as JSON."""

from __future__ import annotations

import json
from typing import Any

from store.schema import sealed_text


def unseal(data: bytes, what: str) -> Any:
    return json.loads(sealed_text(data, what))
