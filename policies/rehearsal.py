"""A policy's rehearsal on the units of a real job, before anything depends on it.

It finds what fails at once on this model: code that raises, answers that are none. What takes long to show is for
:mod:`policies.contract`. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from policies.asked import BrokenError, answered, difference
from policies.base import Budget, History, Policy, UnitStats
from policies.bounds import incomplete
from policies.made_up import Case, unversioned, versioned
from store.errors import ConfigError


def rehearse(policy: Policy, stats: Sequence[UnitStats], *, measured: bool, limited: bool) -> None:
    """Ask ``policy``, inside its bounds, at a first save and in mid-run.

    measured: whether drift is known when it decides. limited: whether it is told of a budget. Raises ConfigError where
    it raises, breaks its contract, answers differently when asked again, or would leave the first save incomplete.
    """
    try:
        for case in _cases(stats, measured, limited):
            decision = answered(policy, case)
            differs = difference(decision, answered(policy, case))
            if differs is not None:
                raise BrokenError(f"{case}: asked twice, it says of {differs}")
            if case.history.commits == 0 and incomplete(case.stats, decision):
                raise BrokenError(f"{case}: {incomplete(case.stats, decision)[0]} is left without a version")
    except BrokenError as error:
        raise ConfigError(
            f"policy {policy.name} was rehearsed on the layers of this job before training, and failed: {error}; mend "
            "it, and look at all of it with `driftpoint policy check`"
        ) from error


def _cases(stats: Sequence[UnitStats], measured: bool, limited: bool) -> Iterator[Case]:
    fresh, later = unversioned(stats), versioned(stats, measured)
    yield Case("first save", fresh, Budget(), History(1, 0))
    yield Case("in mid-run", later, Budget(), History(1000, 7))
    if limited:
        total = sum(one.nbytes for one in later)
        yield Case("half of the bytes at hand", later, Budget(total / 2), History(1000, 7))
        yield Case("bytes not paid for yet", later, Budget(-1.0), History(1000, 7))
    sick = next((one.unit for one in later if one.moving), None)
    broken = tuple(replace(one, finite=False, drift=None) if one.unit == sick else one for one in later)
    yield Case("NaN in one layer", broken, Budget(), History(1010, 8))
