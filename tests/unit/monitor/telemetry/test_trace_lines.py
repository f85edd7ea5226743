"""What goes into lines of a trace has to be JSON, whatever it was."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from monitor.telemetry.drift_history import Compared
from monitor.telemetry.trace import moved_line
from store.schema import as_json


def test_settings_are_json_whatever_they_hold() -> None:
    own = {"name": "my.py:Mine", "at": Path("/x"), "most": math.inf, "list": (1, None, True, 0.1), 3: np.float64(0.5)}
    found = as_json({"policy": own, "every": 10})
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["every"] == 10
    assert found["policy"] == {"name": "my.py:Mine", "at": "/x", "most": "inf", "list": [1, None, True, 0.1], "3": 0.5}


@pytest.mark.parametrize(
    ("row", "ratio"),
    [
        ((4.0, 1.0, 0.0), 2.0),
        ((0.0, 0.0, 0.0), 0.0),
        ((3.0, 0.0, 0.0), 1.0),
        ((1.0, 9.0, 0.0), 0.333333),
        ((0.0, 0.0, 1.0), None),
        ((math.inf, 1.0, 0.0), None),
        ((math.nan, 1.0, 0.0), None),
        ((1.0, math.inf, 0.0), None),
        ((1e308, 1e-300, 0.0), None),
    ],
)
def test_distances_that_are_no_numbers_are_null(row: tuple[float, ...], ratio: float | None) -> None:
    line = moved_line(5, Compared((4,), torch.tensor([[row]], dtype=torch.float64)), [None, 0])
    assert line is not None and line.since == {4: (None, ratio)}
