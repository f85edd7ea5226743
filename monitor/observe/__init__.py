"""Choose the drift meter by its name in the configuration."""

from monitor.observe.drift_meter import DriftMeter, ExactMeter
from monitor.observe.sketch_meter import SketchMeter
from store.errors import ConfigError

METHODS = ("exact", "sketch")


def meter_for(method: str, width: int, seed: int) -> DriftMeter:
    """Return the meter ``exact``, or ``sketch`` with ``width`` and ``seed``. Raise ConfigError for any other name."""
    if method == "exact":
        return ExactMeter()
    if method == "sketch":
        return SketchMeter(width, seed)
    raise ConfigError(f"unknown drift method {method!r}; choose one of {', '.join(METHODS)}")
