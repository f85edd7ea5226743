"""Format numbers, sizes, durations, times and names for people. Pure functions."""

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise

_BINARY = (" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB")
_DECIMAL = ("", " k", " M", " G", " T", " P")
_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def size_text(count: int) -> str:
    """Format bytes in binary units with three digits: ``512 B``, ``1.50 GiB``."""
    return _scaled(count, 1024, _BINARY)


def count_text(count: int) -> str:
    """Format a large number in decimal units with three digits: ``405 G``."""
    return _scaled(count, 1000, _DECIMAL)


def _scaled(count: int, base: int, units: Sequence[str]) -> str:
    value, power = float(count), 0
    while value >= base - 0.5 and power < len(units) - 1:
        value, power = value / base, power + 1
    decimals = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f}{units[power]}"


def drift_text(drift: float | None) -> str:
    """Format a drift with three significant digits; ``0`` for none, ``?`` if unknown."""
    if drift is None:
        return "?"
    return "0" if drift == 0 else f"{drift:#.3g}".rstrip(".")


def kind_text(*, exact: bool, max_staleness: int, max_drift: float | None, lossy: Sequence[str] = ()) -> str:
    """Describe a checkpoint: exact, or its staleness, drift and lossy encodings."""
    if exact:
        return "exact"
    drift = f"drift up to {drift_text(max_drift)}"
    rounded = f"rounded to {', '.join(map(printable, lossy))}"
    if lossy and max_staleness <= 0:
        return f"not exact: {rounded}, {drift}"
    return f"composite: layers up to {plural(max_staleness, 'step')} old, {drift}" + (f", {rounded}" if lossy else "")


def resume_step_text(step: int, goes_on_at: int, effective_step: float) -> str:
    """Describe the step at which a resume continues; '' if it is ``step`` itself."""
    if effective_step == step:
        return ""
    return f"effective step {effective_step:.1f}; a job resumes at step {goes_on_at}"


def plural(count: int, noun: str) -> str:
    """Return the count and its noun, in the singular for one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(text: str) -> str:
    """Escape control characters. Names in a store are untrusted and must not control the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def tail(text: str, width: int) -> str:
    """Cut the text at its start to ``width`` characters, because layer names differ at their end."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def span_text(seconds: float) -> str:
    """Format a duration in its two largest units: ``9.0 s``, ``2 min 5 s``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.0005 else "0 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for (large, length), (small, part) in pairwise(_UNITS):
        if seconds >= length:
            high, low = divmod(round(seconds / part) * part, length)
            return f"{high} {large}" + (f" {low // part} {small}" if low else "")
    return f"{round(seconds)} s"


def ago_text(seconds: float) -> str:
    """Format the time since an event. Negative beyond 2 minutes means that the clocks of two machines differ."""
    return "just now" if -120.0 < seconds < 0.5 else f"{span_text(seconds)} ago" if seconds > 0 else "in the future"


def steps_text(steps: float) -> str:
    """Format a number of steps, rounded because it may be an estimate."""
    return plural(round(steps), "step")


def share_text(share: float) -> str:
    """Format a share in per cent with two digits."""
    return "0 %" if share == 0 else f"{100 * share:.2g} %" if share < 0.0995 else f"{100 * share:.0f} %"


def installed_version() -> str:
    """Return the version of the installed package; '' if it runs from source."""
    try:
        return version("driftpoint")
    except PackageNotFoundError:
        return ""


def clock(seconds: float | None) -> str:
    """Format a Unix time in UTC; '' if unknown."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
