"""A trace that was recorded once is read, and simulated, as it was then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.simulate.simulation import Terms, read_trace, simulated, summary_json

FOLDER = Path(__file__).parent / "trace-1"

POLICIES = (
    "full",
    "{name: parity, k: 2}",
    "{name: threshold, threshold: 0.05}",
    "{policy: budget, budget: {bytes_per_hour: 1.0e+8, burst_seconds: 0.3}}",
)


def summary() -> list[dict[str, Any]]:
    """What a simulation of the golden trace says."""
    found = simulated(read_trace(FOLDER / "trace.jsonl"), POLICIES, Terms())
    return [summary_json(one, found.baseline) for one in found.summaries]


def test_the_golden_trace_says_what_it_said() -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())
    found = summary()
    assert [one["as_recorded"] for one in found] == [False, False, False, False, True]
    assert [(one["name"], one["saves"], one["bytes"]) for one in found] == [
        (one["name"], one["saves"], one["bytes"]) for one in expected
    ]
    for one, want in zip(found, expected, strict=True):
        for key in ("damage", "staleness", "lost_steps", "rewound_steps"):
            assert one[key] == pytest.approx(want[key], rel=1e-9)
        assert one["stall_seconds"] == pytest.approx(want["stall_seconds"], rel=1e-9)
