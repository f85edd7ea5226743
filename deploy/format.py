"""Numbers, sizes, times and lists as text.

Numbers and names as people read them. Pure.

Times and steps as people read them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("", " k", " M", " G", " T", " P")


def size_text(count: int) -> str:
    """Bytes in binary units, three digits: ``512 B``, ``1.50 GiB``."""
    if count < 1024:
        return f"{count} B"
    value, unit = count / 1024, _BINARY[0]
    for larger in _BINARY[1:]:
        if value < 1023.5:
            break
        value, unit = value / 1024, larger
    return f"{_three_digits(value)} {unit}"


def count_text(count: int) -> str:
    """A large number in decimal units, three digits: ``405 G``."""
    value, unit = float(count), _DECIMAL[0]
    for larger in _DECIMAL[1:]:
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return str(count) if unit == "" else f"{_three_digits(value)}{unit}"


def drift_text(drift: float | None) -> str:
    """Three significant digits; ``0`` for no drift at all, ``?`` where it is not known."""
    if drift is None:
        return "?"
    return "0" if drift == 0 else f"{drift:#.3g}".rstrip(".")


def kind_text(*, exact: bool, max_staleness: int, max_drift: float | None, lossy: Sequence[str] = ()) -> str:
    """Whether a checkpoint is exact, and how far from it where it is not. lossy: encodings that rounded values."""
    if exact:
        return "exact"
    drift = f"drift up to {drift_text(max_drift)}"
    rounded = f"rounded to {', '.join(map(printable, lossy))}"
    if lossy and max_staleness <= 0:
        return f"not exact: {rounded}, {drift}"
    return f"composite: layers up to {plural(max_staleness, 'step')} old, {drift}" + (f", {rounded}" if lossy else "")


def going_on_text(step: int, goes_on_at: int, effective_step: float) -> str:
    """Where a resume of a commit of ``step`` goes on, where that is not the step itself; else nothing."""
    if effective_step == step:
        return ""
    return f"its weights stand at step {effective_step:.1f} on average, and a job goes on at step {goes_on_at}"


def plural(count: int, noun: str) -> str:
    """The count and its noun, in the singular for one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(text: str) -> str:
    """The text with control characters spelled out: names in a store come from elsewhere, terminals obey them."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def tail(text: str, width: int) -> str:
    """The text cut to ``width`` characters at its start: layer names differ at their end."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def span_text(seconds: float) -> str:
    """A length of time in its two largest units: ``9.0 s``, ``2 min 5 s``, ``3 h 20 min``, ``2 d 4 h``."""
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
    """How long ago; clocks of two machines may differ."""
    return "just now" if -120.0 < seconds < 0.5 else f"{span_text(seconds)} ago" if seconds > 0 else "in the future"


def steps_text(steps: float) -> str:
    """A number of steps that may be an estimate."""
    return plural(round(steps), "step")


def share_text(share: float) -> str:
    """In per cent, two digits."""
    return "0 %" if share == 0 else f"{100 * share:.2g} %" if share < 0.0995 else f"{100 * share:.0f} %"


def clock(seconds: float | None) -> str:
    """A moment in universal time; '' where it is not known."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
