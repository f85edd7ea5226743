"""Imported by workers that must be stock: driftpoint's packages are not to be found, installed or not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

OURS = ("store", "monitor", "merger", "policies", "deploy")


class _Barred:
    """First on the import path."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name.partition(".")[0] in OURS:
            raise ImportError(f"{name} is barred in this process")


sys.meta_path.insert(0, _Barred())  # type: ignore[arg-type]


def require_barred() -> None:
    """Fails where any of them was imported, or could be."""
    assert not any(name in sys.modules for name in OURS)
    for name in OURS:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        raise AssertionError(f"{name} can be imported: this process proves nothing")
