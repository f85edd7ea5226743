"""Optimizer steps that a target has one of where the layers bring several: what was chosen, in the certificate.

An optimizer's step count is state like any other, so a checkpoint in which a layer's is another than it had is not
exact. Pure; it does not know which targets share a step, nor why one was chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from store.certificate import Certificate


@dataclass(frozen=True)
class Had:
    """A step, and the layers that brought parameters with it."""

    step: float
    layers: tuple[str, ...]


@dataclass(frozen=True)
class ChosenStep:
    """The one step that is written for parameters of a param group, and what there was. had: oldest first."""

    param_group: int
    chosen: float
    had: tuple[Had, ...]

    @property
    def changes(self) -> bool:
        """Whether any layer had another step than it gets."""
        return any(one.step != self.chosen for one in self.had)


@dataclass(frozen=True)
class StepsCertificate(Certificate):
    """A certificate that also says which optimizer steps are written."""

    optimizer_steps: tuple[ChosenStep, ...] = ()


def chosen_steps(found: Iterable[tuple[int, float, Sequence[tuple[str, float]]]]) -> tuple[ChosenStep, ...]:
    """For the records: flat partitions of one param group that get the same step are told as one.

    found: (param group, step that is written, (layer, the step that it had) of each parameter).
    """
    had: dict[tuple[int, float], dict[float, dict[str, None]]] = {}
    for group, chosen, steps in found:
        theirs = had.setdefault((group, chosen), {})
        for layer, step in steps:
            theirs.setdefault(step, {})[layer] = None
    return tuple(
        ChosenStep(group, chosen, tuple(Had(step, tuple(layers)) for step, layers in sorted(theirs.items())))
        for (group, chosen), theirs in had.items()
    )


def with_steps(certificate: Certificate, steps: tuple[ChosenStep, ...]) -> StepsCertificate:
    """The certificate of a checkpoint in which these steps are written; not exact where any layer's is changed."""
    values = {one.name: getattr(certificate, one.name) for one in fields(Certificate)}
    values["exact"] = certificate.exact and not any(one.changes for one in steps)
    return StepsCertificate(**values, optimizer_steps=steps)


def changed_steps(certificate: Certificate) -> tuple[ChosenStep, ...]:
    """Where a layer gets another optimizer step than it had."""
    steps = certificate.optimizer_steps if isinstance(certificate, StepsCertificate) else ()
    return tuple(one for one in steps if one.changes)
