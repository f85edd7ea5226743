"""The drift meter by its name in the configuration."""

from __future__ import annotations

from monitor.drift.base import DriftMeter
from monitor.drift.exact import ExactMeter
from monitor.drift.sketch import SketchMeter
from store.errors import ConfigError

METHODS = ("exact", "sketch")


def meter_for(method: str, width: int, seed: int) -> DriftMeter:
    """``exact`` (width and seed do not matter) or ``sketch``. Raises ConfigError for any other name."""
    if method == "exact":
        return ExactMeter()
    if method == "sketch":
        return SketchMeter(width, seed)
    raise ConfigError(f"there is no drift method {method!r}; choose one of {', '.join(METHODS)}")
