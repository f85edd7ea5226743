"""The suite that users run finds every promise broken, each by a policy that breaks it, and says where."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from examples import policy_checks as contract
from examples.policy_checks import BrokenError, any_case, broken_promises, check_policy, edge_cases, usual_units
from policies.bounds import Bounds
from policies.registry import policy_from
from store.encoding import ENCODINGS
from tests.support.policies import SOUND, policy_file, selecting

ANSWERS = "one choice a unit, with a reason"


def found(tmp_path: Path, body: str, bounds: Bounds = contract.ANY) -> dict[str, str]:
    return broken_promises(policy_from(policy_file(tmp_path, body)), bounds)


def test_a_sound_policy_keeps_every_promise(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert found(tmp_path, SOUND) == {}
    assert not recwarn.list


BROKEN = {
    "raises": (selecting("raise ValueError('no')"), ANSWERS, r"it raised ValueError\('no'\) at my.py:\d+"),
    "leaves the process": (selecting("raise SystemExit"), ANSWERS, r"it raised SystemExit\(\)"),
    "error without a text": (
        selecting("class Odd(Exception):\n    __str__ = None\nraise Odd"),
        ANSWERS,
        r"it raised Odd\('\?'\)",
    ),
    "forgets": (
        selecting("return Decision({one.unit: Choice('raw', 'x') for one in stats[1:]})"),
        ANSWERS,
        "it broke its contract \\(layer.0/\\w+: shown but not decided on; give it a choice, a skip at least\\)",
    ),
    "answers with a dict": (selecting("return {}"), ANSWERS, "select returned {}, not a Decision; return Decision"),
    "answers with nothing": (selecting("return"), ANSWERS, "select returned None, not a Decision"),
    "choices in a list": (selecting("return Decision([])"), ANSWERS, r"choices must map units to choices, not \[\]"),
    "keys that are no units": (
        selecting(
            "return Decision({one.unit.layer: Choice('raw', 'x') for one in stats} | "
            "{one.unit: Choice('raw', 'x') for one in stats})"
        ),
        ANSWERS,
        "Decision.choices has the key 'layer.0'; keys are the units shown",
    ),
    "choices that are none": (
        selecting("return Decision({one.unit: True for one in stats})"),
        ANSWERS,
        r"its choice is True; make it Choice\(encoding, reason\)",
    ),
    "no reason": (
        selecting("return Decision({one.unit: Choice('raw', '') for one in stats})"),
        ANSWERS,
        "its choice has no reason",
    ),
    "reason without end": (
        selecting("return Decision({one.unit: Choice('raw', 'x' * 5000) for one in stats})"),
        ANSWERS,
        "its reason has 5000 characters",
    ),
    "unknown encoding": (
        selecting("return Decision({one.unit: Choice('bf17', 'x') for one in stats})"),
        ANSWERS,
        r"encoding 'bf17' is unknown; there is bf16, bf16\+int8, int16-shared-exponent, int8-block, int8-log2",
    ),
    "encoding that explodes": (
        selecting("return Decision({one.unit: Choice('int8-block', 'x') for one in stats})"),
        ANSWERS,
        "exp_avg_sq divides the updates, and int8-block rounds its small values to zero: take int8-log2",
    ),
    "looks at drift that there is not": (
        selecting(
            "return Decision({one.unit: Choice('raw' if one.drift > 0.1 else None, 'x') for one in stats})", True
        ),
        "takes whatever it is shown",
        r"first save \(15 units, step 10, 0 commits\): it raised TypeError",
    ),
    "cannot do without units": (
        selecting("max(one.position for one in stats)"),
        "takes whatever it is shown",
        r"no units \(0 units, .*ValueError",
    ),
    "knows its slots": (
        selecting("[{'fp32': 1, 'exp_avg': 2, 'exp_avg_sq': 3, 'frozen': 4}[one.unit.slot] for one in stats]"),
        "takes whatever it is shown",
        "slots that nobody expects .*KeyError.*momentum_buffer",
    ),
    "remembers": (
        selecting(
            "self.turn = not getattr(self, 'turn', False)\n"
            "return Decision({one.unit: Choice('raw' if self.turn else None, 'x') for one in stats})"
        ),
        "same answer when asked again",
        r"asked again after other calls, it says of layer.0/fp32: (raw|skip) \(x\), and then (raw|skip) \(x\)",
    ),
    "draws lots": (
        selecting(
            "import random\nreturn Decision({one.unit: Choice(random.choice(['raw', None]), 'x') for one in stats})"
        ),
        "same answer when asked again",
        "asked again after other calls, it says of",
    ),
    "goes by the order": (
        selecting("return Decision({one.unit: Choice('raw', f'{at}th') for at, one in enumerate(stats)})"),
        "order of units does not matter",
        "with its units in another order, it says of",
    ),
    "changes what it is shown": (
        selecting("for one in stats:\n    object.__setattr__(one, 'drift', 0.0)"),
        "leaves its arguments alone",
        "what it was given is not the same after the call; work on a copy",
    ),
    "hides that it needs drift": (
        selecting(
            "return Decision({one.unit: Choice('raw' if (one.drift or 0) > 0.1 else None, 'x') for one in stats})"
        ),
        "says whether it needs drift",
        "needs_drift is False, and with and without drift it says of",
    ),
    "spends what is not there": (
        selecting("pass", more="spends = True"),
        "keeps to the bytes at hand",
        r"it chooses \d+ bytes that nobody demands, and -?\d+ are at hand",
    ),
    "raises in the long run": (
        selecting("if history.step == 500 and len(stats) == 19: raise KeyError('x')"),
        "bounds hold",
        r"in a made-up run it raised KeyError\(\"'x'\"\) at my.py:\d+",
    ),
}


@pytest.mark.filterwarnings("ignore:policy mine starves")
@pytest.mark.parametrize("name", sorted(BROKEN))
def test_every_broken_promise_is_found(tmp_path: Path, name: str) -> None:
    body, promise, told = BROKEN[name]
    detail = found(tmp_path, body)[promise]
    assert re.search(told, detail), detail


def test_what_starves_is_told_and_max_staleness_is_what_helps(tmp_path: Path) -> None:
    body = selecting("return Decision({one.unit: Choice('raw' if one.position else None, 'x') for one in stats})")
    told = "starves layer.0/exp_avg and 2 more: not saved in 200 decisions; set bounds.max_staleness"
    with pytest.warns(UserWarning, match=told):
        assert found(tmp_path, body) == {}
    with warnings.catch_warnings(action="error"):
        assert found(tmp_path, body, Bounds(max_staleness=100, interval=10, precision="any")) == {}


def test_lossy_encodings_are_held_to_the_bounds(tmp_path: Path) -> None:
    body = selecting("return Decision({one.unit: Choice('bf16', 'x') for one in stats})")
    assert found(tmp_path, body) == {}
    assert "'bf16' may lose bits and precision is 'exact'" in found(tmp_path, body, Bounds())[ANSWERS]
    close = found(tmp_path, body, Bounds(max_drift=1e-3, precision="any"))[ANSWERS]
    assert "'bf16' may be off by 0.0039, and max_drift is 0.001" in close


def test_one_that_dawdles_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "LIMIT", 0.0)
    detail = found(tmp_path, SOUND)[contract.TIMED]
    assert "(10000 units, " in detail and "training waits" in detail


def test_waits_for_a_busy_processor_are_not_the_policys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:  # on the same processor
            until, before = time.monotonic() + 60, contract.starved_seconds()
            while contract.starved_seconds() < before + 0.05:
                assert time.monotonic() < until
            busy.kill()
    finally:
        os.sched_setaffinity(0, allowed)
    starved = iter([0.0, 1e6])
    monkeypatch.setattr(contract, "starved_seconds", lambda: next(starved))
    monkeypatch.setattr(contract, "LIMIT", 0.0)
    assert contract.TIMED not in found(tmp_path, SOUND)


def test_a_policy_that_spends_is_held_to_the_bytes(tmp_path: Path) -> None:
    body = """
class Mine:
    name = "mine"
    needs_drift = True
    spends = True

    def select(self, stats, budget, history):
        left, choices = float("inf") if budget.bytes is None else budget.bytes, {}
        for one in sorted(stats, key=lambda one: one.unit):
            takes = one.unit in budget.demanded or one.staleness is None
            if not takes and one.nbytes <= left:
                left, takes = left - one.nbytes, True
            choices[one.unit] = Choice("raw" if takes else None, "while bytes last")
        return Decision(choices)
"""
    with pytest.warns(UserWarning, match="starves"):  # by name, the last ones never get their turn
        assert found(tmp_path, body) == {}


def test_made_up_models_are_the_same_everywhere_and_of_every_kind() -> None:
    assert repr(any_case(7)) == repr(any_case(7))
    every = [one for seed in range(contract.MODELS) for one in any_case(seed).stats]
    assert {one.encoding for one in every} <= {None, *ENCODINGS}
    for kind in (
        [one for one in every if not one.finite],
        [one for one in every if not one.moving],
        [one for one in every if one.staleness is None],
        [one for one in every if one.changed_shape],
        [one for one in every if one.nbytes == 0],
        [one for one in every if one.drift is not None and one.drift != one.drift],
    ):
        assert len(kind) > 10
    assert len({case.title for case in edge_cases()}) == 13
    assert len(usual_units(7)) == 21


def test_a_test_of_a_users_policy_is_told_all_that_is_broken(tmp_path: Path) -> None:
    check_policy(policy_from("parity"))
    body, promise, _ = BROKEN["forgets"]
    with pytest.raises(BrokenError, match=promise):
        check_policy(policy_from(policy_file(tmp_path, body)))
