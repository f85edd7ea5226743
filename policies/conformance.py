"""Check that a policy keeps its contract: :func:`check_policy` in its tests, and a check before training.

The suite runs the policy on seeded synthetic models and runs, so a finding can be reproduced. It cannot prove that a
promise holds, and it does not detect a policy that never returns. The check before training runs on the units of the
real job and finds failures that occur at once. Neither writes anything."""

import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from policies.base import Budget, Choice, Decision, History, Policy, UnitStats, nonfinite_slots, worth_saving
from policies.bounds import Bounded, Bounds, incomplete
from policies.budget import spends
from policies.builtin import Observe
from policies.encodings import expected_bytes
from policies.synthetic import SimulatedRun, SyntheticCase, any_case, edge_cases, unversioned, usual_units, versioned
from policies.validation import checked_answer, failure_of
from store.errors import ConfigError
from store.text import listed

ANY = Bounds(precision="any")  # bounds that allow everything that any policy may do


class BrokenError(Exception):
    """Raised if a policy breaks a promise; the message gives the case and the policy's behaviour."""


def query_policy(
    policy: Policy, case: SyntheticCase, bounds: Bounds = ANY, stats: Sequence[UnitStats] | None = None
) -> Decision:
    """Return the policy's decision, checked. stats: replace the case's own. Raises BrokenError."""
    shown = case.stats if stats is None else stats
    try:
        return checked_answer(policy.name, case.stats, policy.select(shown, case.budget, case.history), bounds.refusal)
    except (Exception, SystemExit) as error:
        raise BrokenError(f"{case}: it {failure_of(error).located}") from error


def _require_same(first: Decision, second: Decision, how: str) -> None:
    """Raise BrokenError with the first difference between two decisions on the same units."""
    for unit, choice in first.choices.items():
        other = second.choices[unit]
        if other != choice:
            raise BrokenError(f"{how} it says of {unit}: {_format(choice)}, and then {_format(other)}")


def _format(choice: Choice) -> str:
    return f"{choice.encoding or 'skip'} ({choice.reason[:80]})"


MODELS = 120  # synthetic models on which promises about single decisions are tried
PATIENCE = 200  # decisions within which a unit that keeps drifting should be saved again
LARGE = 10_000  # units of the large model: more than the largest models have
LIMIT = 5.0  # seconds that a decision on the large model may take
TIMED = "decides on 10 000 units in time"


def check_policy(policy: Policy, bounds: Bounds = ANY) -> None:
    """Try every promise on a policy, as a test of it; on the inner policy of ``observe``.

    Warns of units that starve. Raises BrokenError with all that it breaks."""
    if broken := broken_promises(policy, bounds):
        raise BrokenError("; ".join(f"{promise}: {detail}" for promise, detail in broken.items()))


def broken_promises(policy: Policy, bounds: Bounds = ANY) -> dict[str, str]:
    """Return how the policy, inside ``bounds``, breaks each promise that it does not keep."""
    inner, broken = policy.inner if isinstance(policy, Observe) else policy, {}
    for promise, trial in TRIALS.items():
        try:
            trial(inner, bounds)
        except BrokenError as error:
            broken[promise] = str(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge to the user's own code, in a simulated run
            broken[promise] = f"in a made-up run it {failure_of(error).located}"
    return broken


def _models() -> Iterator[SyntheticCase]:
    return map(any_case, range(MODELS))


def _cases() -> list[SyntheticCase]:
    return [*edge_cases(), *_models()]


def _answers(policy: Policy, bounds: Bounds) -> None:
    for case in _models():
        query_policy(policy, case, bounds)


def _edges(policy: Policy, bounds: Bounds) -> None:
    for case in edge_cases():
        query_policy(policy, case, bounds)


def _repeats(policy: Policy, bounds: Bounds) -> None:
    cases = _cases()
    first = [query_policy(policy, case, bounds) for case in cases]
    for case, before in reversed(list(zip(cases, first, strict=True))):
        _require_same(before, query_policy(policy, case, bounds), f"{case}: asked again after other calls,")


def _unordered(policy: Policy, bounds: Bounds) -> None:
    for seed, case in enumerate(_models()):
        mixed = random.Random(seed).sample(case.stats, len(case.stats))
        usual, other = query_policy(policy, case, bounds), query_policy(policy, case, bounds, mixed)
        _require_same(usual, other, f"{case}: with its units in another order,")


def _leaves_alone(policy: Policy, bounds: Bounds) -> None:
    for case in _models():
        stats = list(case.stats)
        before = copy.deepcopy((stats, case.budget, case.history))
        query_policy(policy, case, bounds, stats)
        if (stats, case.budget, case.history) != before:
            raise BrokenError(f"{case}: what it was given is not the same after the call; work on a copy")


def _needs_drift(policy: Policy, bounds: Bounds) -> None:
    for case in () if policy.needs_drift else _models():
        blind = [replace(one, drift=None) if one.moving else one for one in case.stats]
        seeing, other = query_policy(policy, case, bounds), query_policy(policy, case, bounds, blind)
        _require_same(seeing, other, f"{case}: needs_drift is False, and with and without drift")


def _spends(policy: Policy, bounds: Bounds) -> None:
    for case in _models() if spends(policy) else ():
        if case.budget.bytes is not None:
            spent = _optional_bytes(case.stats, case.budget, query_policy(policy, case, bounds))
            if spent > max(0.0, case.budget.bytes):
                at_hand = f"{case.budget.bytes:.0f} are at hand"
                raise BrokenError(f"{case}: it chooses {spent:.0f} bytes that nobody demands, and {at_hand}")


def _optional_bytes(stats: Sequence[UnitStats], budget: Budget, decision: Decision) -> float:
    worth = worth_saving(stats)
    return sum(
        expected_bytes(one, encoding)
        for one in stats
        if one.unit in worth and one.unit not in budget.demanded and one.staleness is not None
        if (encoding := decision.choices[one.unit].encoding) is not None
    )


def _first_save(policy: Policy, bounds: Bounds) -> None:
    bounded = Bounded(policy, bounds)
    for case in _models():
        sick = nonfinite_slots(case.stats)
        for unit in incomplete(case.stats, query_policy(bounded, case, bounds)):
            if unit.layer not in sick:
                raise BrokenError(f"{case}: {unit} is left without a version")


def _bounds(policy: Policy, bounds: Bounds) -> None:
    limits = Bounds(max_staleness=40, max_drift=0.3, precision=bounds.precision, interval=10)
    run = SimulatedRun(Bounded(policy, limits), 10, spends(policy), sick=range(300, 360))
    for _ in range(100):
        run.decide()
        for one in run.units.values():
            stale = one.moving and (one.staleness or 0) > 40 - 10
            if not run.is_sick(one) and (stale or (one.drift or 0.0) > 0.3):
                raise BrokenError(f"step {run.step} of a made-up run: {one.unit} is {one.staleness} steps old")


def _starves(policy: Policy, bounds: Bounds) -> None:
    run = SimulatedRun(Bounded(policy, bounds), bounds.interval or 10, spends(policy))
    run.decide()
    gaps = longest = {unit: 0 for unit, one in run.units.items() if one.moving}
    for _ in range(3 * PATIENCE):
        saved = set(run.decide().saved)
        gaps = {unit: 0 if unit in saved else gap + 1 for unit, gap in gaps.items()}
        longest = {unit: max(longest[unit], gap) for unit, gap in gaps.items()}
    starved = sorted(unit for unit, gap in longest.items() if gap >= PATIENCE)
    if starved:
        text = f"policy {policy.name} starves {listed(starved, 1)}: not saved in {PATIENCE} decisions"
        warnings.warn(f"{text}; set bounds.max_staleness", stacklevel=2)


def _in_time(policy: Policy, bounds: Bounds) -> None:
    case = SyntheticCase("a large model", usual_units(1 + LARGE // 3)[:LARGE], Budget(1e9), History(1000, 10))
    began = time.perf_counter() - starved_seconds()
    query_policy(policy, case, bounds)
    took = time.perf_counter() - starved_seconds() - began
    if took > LIMIT:
        raise BrokenError(f"{case}: it took {took:.1f} s, during which training waits; {LIMIT:.0f} s at most")


def starved_seconds() -> float:
    """Return how long this thread has waited for a processor since it began; 0.0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


TRIALS: dict[str, Callable[[Policy, Bounds], None]] = {
    "one choice a unit, with a reason": _answers,
    "takes whatever it is shown": _edges,
    "same answer when asked again": _repeats,
    "order of units does not matter": _unordered,
    "leaves its arguments alone": _leaves_alone,
    "says whether it needs drift": _needs_drift,
    "keeps to the bytes at hand": _spends,
    "first save is full": _first_save,
    "bounds hold": _bounds,
    "no layer starves": _starves,
    TIMED: _in_time,
}
"""Every promise that one process can try, in the order reported."""


def check_before_training(policy: Policy, stats: Sequence[UnitStats], *, measured: bool, limited: bool) -> None:
    """Try a bounded policy on the units of a job: at a first save and in mid-run.

    measured: whether drift is known at a decision. limited: whether the job has a budget. Raises ConfigError if the
    policy raises, returns an invalid decision, decides differently when asked again, or leaves the first save
    incomplete."""
    try:
        for case in _check_cases(stats, measured, limited):
            decision = query_policy(policy, case)
            _require_same(decision, query_policy(policy, case), f"{case}: asked twice,")
            if case.history.commits == 0 and incomplete(case.stats, decision):
                raise BrokenError(f"{case}: {incomplete(case.stats, decision)[0]} is left without a version")
    except BrokenError as error:
        raise ConfigError(
            f"policy {policy.name} failed the check on the layers of this job before training: {error}; fix it, and "
            "try `policies.conformance.check_policy` on it for all checks"
        ) from error


def _check_cases(stats: Sequence[UnitStats], measured: bool, limited: bool) -> Iterator[SyntheticCase]:
    fresh, later = unversioned(stats), versioned(stats, measured)
    yield SyntheticCase("first save", fresh, Budget(), History(1, 0))
    yield SyntheticCase("in mid-run", later, Budget(), History(1000, 7))
    if limited:
        total = sum(one.nbytes for one in later)
        yield SyntheticCase("half of the bytes at hand", later, Budget(total / 2), History(1000, 7))
        yield SyntheticCase("bytes not paid for yet", later, Budget(-1.0), History(1000, 7))
    sick = next((one.unit for one in later if one.moving), None)
    broken = tuple(replace(one, finite=False, drift=None) if one.unit == sick else one for one in later)
    yield SyntheticCase("NaN in one layer", broken, Budget(), History(1010, 8))
