"""Which encoding a policy's choices are stored in, where the configuration names one for each slot.

Named policies choose what to save and say ``raw``; here raw becomes the encoding of the slot. What does not move
(frozen parameters, buffers) stays raw: it is stored once. A policy that names other encodings itself keeps them, and
``budget``, which weighs encodings against each other, is told which one is the coarsest that each slot may have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from policies.base import Budget, Choice, Decision, History, Policy, UnitStats
from policies.bounds import Bounded, Bounds
from policies.budget import Budgeted
from policies.observe import Observe
from store.encoding import encoding_named
from store.errors import ConfigError
from store.names import RAW


@dataclass(frozen=True)
class Encoded:
    """A policy whose raw choices are stored in the encodings of their slots; a policy itself.

    Goes around the bounds, so that what they demand is encoded too."""

    policy: Policy
    encodings: Mapping[str, str]

    @property
    def name(self) -> str:
        """The inner policy's."""
        return self.policy.name

    @property
    def needs_drift(self) -> bool:
        """The inner policy's."""
        return self.policy.needs_drift

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """The inner policy's decision, encoded."""
        inner = self.policy.select(stats, budget, history)
        return Decision({one.unit: self._encoded(one, inner.choices[one.unit]) for one in stats})

    def _encoded(self, one: UnitStats, choice: Choice) -> Choice:
        encoding = self.encodings.get(one.unit.slot, RAW)
        if choice.encoding != RAW or not one.moving or encoding == RAW:
            return choice
        return Choice(encoding, choice.reason)


def encoded(policy: Policy, encodings: Mapping[str, str], bounds: Bounds) -> Policy:
    """The policy with encodings by slot. Observe stays outermost. ConfigError where the bounds forbid what is lossy.

    What an encoding loses is drift from the moment it is stored, so max_drift has to be at least what it may lose."""
    lossy = sorted({name for name in encodings.values() if not encoding_named(name).lossless})
    if lossy and bounds.precision == "exact":
        raise ConfigError(
            f"encoding {', '.join(lossy)} loses bits, and bounds.precision is 'exact': drop one of the two"
        )
    for slot, name in encodings.items():
        most = encoding_named(name).relative_bound
        if bounds.max_drift is not None and most > bounds.max_drift:
            raise ConfigError(
                f"bounds.max_drift {bounds.max_drift!r} cannot hold: {slot} stored as {name} may be off by {most:.2g}; "
                "raise max_drift, or take a finer encoding for the slot"
            )
    if not encodings:
        return policy
    if isinstance(policy, Observe):
        return Observe(_encoded(policy.inner, encodings))
    return _encoded(policy, encodings)


def _encoded(policy: Policy, encodings: Mapping[str, str]) -> Policy:
    if isinstance(policy, Bounded) and isinstance(policy.policy, Budgeted):
        # Its raw is a choice like another, so only what the bounds demand is theirs to encode.
        return replace(policy, policy=replace(policy.policy, encodings=encodings), encodings=encodings)
    return Encoded(policy, encodings)
