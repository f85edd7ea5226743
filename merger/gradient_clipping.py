"""The bound on the gradient's norm, where only DeepSpeed's configuration tells it.

ZeRO-1/2 files hold it and engines take it from them, over their own configuration; ZeRO-3 files do not hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT = 1.0
"""What DeepSpeed 0.19 does where the configuration does not say (``runtime/constants.py``)."""


def gradient_clipping(config: Any) -> float:
    """The bound that an engine with this configuration uses; 0 is none."""
    value = config.get("gradient_clipping") if isinstance(config, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else DEFAULT
