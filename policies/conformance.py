"""Check a policy before training: ask it about the units of the real job, at a first save and in mid-run.

It finds failures that occur at once. It cannot prove that a policy keeps its contract, and it does not detect one that
never returns. ``examples/policy_checks.py`` has a longer suite, for tests of a policy of your own."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from policies.base import Budget, Choice, Decision, History, Policy, UnitStats
from policies.bounds import Bounds, incomplete
from policies.validation import checked_answer, failure_of
from store.errors import ConfigError
from store.names import RAW

_UNLIMITED, _LATER = Budget(), History(1000, 10)

ANY = Bounds(precision="any")  # bounds that allow everything that any policy may do


class BrokenError(Exception):
    """Raised if a policy breaks a promise; the message gives the case and the policy's behaviour."""


@dataclass(frozen=True)
class SyntheticCase:
    """The arguments of one decision. title: its special property."""

    title: str
    stats: tuple[UnitStats, ...]
    budget: Budget = _UNLIMITED
    history: History = _LATER

    def __str__(self) -> str:
        size = f"{len(self.stats)} {'unit' if len(self.stats) == 1 else 'units'}"
        return f"{self.title} ({size}, step {self.history.step}, {self.history.commits} commits)"


def query_policy(
    policy: Policy, case: SyntheticCase, bounds: Bounds = ANY, stats: Sequence[UnitStats] | None = None
) -> Decision:
    """Return the policy's decision, checked. stats: replace the case's own. Raises BrokenError."""
    shown = case.stats if stats is None else stats
    try:
        return checked_answer(policy.name, case.stats, policy.select(shown, case.budget, case.history), bounds.refusal)
    except (Exception, SystemExit) as error:
        raise BrokenError(f"{case}: it {failure_of(error).located}") from error


def require_same(first: Decision, second: Decision, how: str) -> None:
    """Raise BrokenError with the first difference between two decisions on the same units."""
    for unit, choice in first.choices.items():
        other = second.choices[unit]
        if other != choice:
            raise BrokenError(f"{how} it says of {unit}: {_format(choice)}, and then {_format(other)}")


def _format(choice: Choice) -> str:
    return f"{choice.encoding or 'skip'} ({choice.reason[:80]})"


def unversioned(stats: Sequence[UnitStats]) -> tuple[UnitStats, ...]:
    """Return the units as before their first save."""
    return tuple(
        replace(one, drift=None, staleness=None, encoding=None, stored_bytes=0, error=0.0, changed_shape=False)
        for one in stats
    )


def versioned(stats: Sequence[UnitStats], measured: bool) -> tuple[UnitStats, ...]:
    """Return the units as in mid-run. measured: whether the drift of moving units is known."""
    chance = random.Random("mid-run")
    made = [with_version(one, chance, one.numel or one.nbytes // 4) for one in stats]
    return tuple(one if measured or not one.moving else replace(one, drift=None) for one in made)


def with_version(one: UnitStats, chance: random.Random, numel: int) -> UnitStats:
    """Return the unit with a version of random age and drift."""
    age = chance.randint(1, 60)
    drift = age * 10 ** chance.uniform(-5, -2) if one.moving else 0.0
    made = replace(one, drift=drift, staleness=age, error=0.0, changed_shape=False)
    return replace(made, encoding=RAW, stored_bytes=one.nbytes, numel=numel)


def check_before_training(policy: Policy, stats: Sequence[UnitStats], *, measured: bool, limited: bool) -> None:
    """Try a bounded policy on the units of a job: at a first save and in mid-run.

    measured: whether drift is known at a decision. limited: whether the job has a budget. Raises ConfigError if the
    policy raises, returns an invalid decision, decides differently when asked again, or leaves the first save
    incomplete."""
    try:
        for case in _check_cases(stats, measured, limited):
            decision = query_policy(policy, case)
            require_same(decision, query_policy(policy, case), f"{case}: asked twice,")
            if case.history.commits == 0 and incomplete(case.stats, decision):
                raise BrokenError(f"{case}: {incomplete(case.stats, decision)[0]} is left without a version")
    except BrokenError as error:
        raise ConfigError(
            f"policy {policy.name} failed the check on the layers of this job before training: {error}; fix it, and "
            "try `check_policy` of examples/policy_checks.py on it for all checks"
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
