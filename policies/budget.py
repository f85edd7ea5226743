"""Policy ``budget``: the bytes at hand go where they take away the most expected damage.

docs/budget.md derives what is done here and says what is assumed. It knows neither the clock nor how bytes come to
be at hand (that is the caller's token bucket), nor what a unit will pack to but by its newest version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from policies.base import Budget, Choice, Decision, History, Policy, UnitStats
from policies.damage import gain, scales
from policies.health import worth_saving
from policies.line import bids, bought
from policies.observe import Observe
from policies.options import options
from policies.setting import check_number, described
from store.errors import ConfigError
from store.names import RAW, WEIGHTS, Unit

_NO_GAIN = Choice(None, "saving it would take no damage away")


@dataclass(frozen=True)
class Budgeted:
    """Saves what stands first in line, until the bytes at hand are spent.

    A unit's place in line is the damage that saving it takes away, times its staleness, a byte. Where the first in
    line cannot be paid, nothing behind it is saved either, so that a large unit does not starve.

    lags: for slots other than the weights, how many steps of the weights being wholly out of date counts as, > 0;
    see :data:`policies.damage.LAG`, which holds for slots that are not named. encodings: the coarsest encoding that
    each slot may have, raw where it has none; no setting of the policy, but the job's ``encoding``.
    """

    lags: Mapping[str, float] = field(default_factory=dict, hash=False)
    encodings: Mapping[str, str] = field(default_factory=dict, hash=False, metadata={"setting": False})

    spends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_lags(self.lags)
        object.__setattr__(self, "lags", dict(self.lags))  # copies: the caller may change theirs
        object.__setattr__(self, "encodings", dict(self.encodings))

    @property
    def name(self) -> str:
        """``budget``."""
        return "budget"

    @property
    def needs_drift(self) -> bool:
        """True."""
        return True

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """From the head of the line, what the bytes at hand pay. What has no version is saved whatever it costs."""
        del history
        fixed, costs = self._fixed(stats, budget)
        worth, scale = worth_saving(stats), scales(stats, self.lags)
        line = [
            bid
            for one in stats
            if one.unit in worth and one.unit not in fixed
            for bid in bids(
                one.unit,
                [
                    (option, gain(one, option.error, scale[one.unit.layer][one.unit.slot]))
                    for option in options(one, self._coarsest(one))
                ],
            )
        ]
        purse = math.inf if budget.bytes is None else budget.bytes
        paid = bought(line, purse - costs)
        return Decision({one.unit: fixed.get(one.unit) or paid.get(one.unit) or _NO_GAIN for one in stats})

    def _fixed(self, stats: Sequence[UnitStats], budget: Budget) -> tuple[Mapping[Unit, Choice], float]:
        """What is saved without asking for its worth, in the coarsest way; and its bytes."""
        fixed: dict[Unit, Choice] = {}
        costs = 0.0
        for one in stats:
            if one.unit in budget.demanded or one.staleness is None:
                option = options(one, self._coarsest(one))[0]
                why = "no version yet" if one.staleness is None else "saved whatever this policy says"
                fixed[one.unit] = Choice(option.encoding, why)
                costs += option.nbytes
        return fixed, costs

    def _coarsest(self, one: UnitStats) -> str:
        return self.encodings.get(one.unit.slot, RAW)


def spends(policy: Policy) -> bool:
    """Whether the policy, or the one that it observes, asks what bytes are at hand and keeps to them.

    It says so by an attribute ``spends`` that is True."""
    return getattr(policy.inner if isinstance(policy, Observe) else policy, "spends", False) is True


def _check_lags(lags: object) -> None:
    if not isinstance(lags, Mapping):
        raise ConfigError(
            f"policy budget: lags must map names of slots to steps, such as {{exp_avg: 3}}, not {described(lags)}"
        )
    for slot, steps in lags.items():
        if not isinstance(slot, str) or slot == WEIGHTS:
            raise ConfigError(
                f"policy budget: lags must have names of slots other than {WEIGHTS} for keys, not {described(slot)}: "
                "they say how many steps of the weights another slot counts as"
            )
        check_number("policy budget", f"lags.{slot}", steps)
        if not 1e-6 <= steps <= 1e6:
            raise ConfigError(f"policy budget: lags.{slot} must lie between 1e-6 and 1e6, not {described(steps)}")
