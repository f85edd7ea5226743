"""Adapter protocol, Piece, Place.

The seam to a training framework: where its state lives, as fragments, and how to put it back.

An adapter is used from the training thread only, between optimizer steps, when the state stands still.
It leaves the user's param groups as they are.

What is looked up once while a job stands still, and forgotten when it moves on.

One decision asks a dozen times for the names of a model's parameters, and each answer is a walk over its module tree,
which takes longer than everything else in a decision. Between two decisions a script may change anything, so nothing is
kept for longer. Training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from store.names import Fragment


@dataclass(frozen=True)
class Piece:
    """A fragment and the live memory behind it.

    tensor: 1-d, contiguous, ``fragment.numel`` elements, a view on the framework's own storage:
    copying from it saves, copying into it loads.
    """

    fragment: Fragment
    tensor: torch.Tensor


@dataclass(frozen=True)
class FragmentPlace:
    """Where a load will put a fragment: a piece whose memory need not exist yet. dtype: of the live tensor."""

    fragment: Fragment
    dtype: torch.dtype


@dataclass(frozen=True)
class TensorInfo:
    """One parameter or persistent buffer of the model, whole.

    shape: global shape. dtype: of the working copy, as safetensors names it (``BF16``, ``F32``, ...).
    kind: ``trainable``, ``frozen`` or ``buffer``.
    aliases: other names under which the very same tensor (tied weights) appears in the module tree.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class StateVersions:
    """What tells whether weights, and the state of the optimizer that holds them, were changed in between: equal
    where they were not. Nothing is read but version counters, so no value is looked at. optimizer: its class."""

    optimizer: str
    weights: int
    state: int


def versions_of(values: Iterable[Any]) -> int:
    """Of tensors which they are and how often they were changed in place; of other values what they are."""
    return hash(tuple((id(v), v._version) if isinstance(v, torch.Tensor) else repr(v) for v in values))


class Adapter(Protocol):
    """One training framework.

    Fragments of all ranks together, as given by :meth:`owned`, cover every (fqn, slot) exactly once.
    Fragments given by :meth:`held` are all that this rank keeps, replicas included: what a load fills.
    The slot is :data:`store.names.WEIGHTS` for trainable weights (the fp32 master where there is one),
    :data:`store.names.FROZEN` for parameters without gradient, :data:`store.names.BUFFER` for persistent
    buffers, and the optimizer's own key (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, ...) for its
    state tensors of the parameter's shape.

    A load is checked first, which changes nothing: :meth:`expected`, :meth:`check_run_state`. Then it goes in this
    order: the states of :meth:`objects`, :meth:`prepare_load`, copying into what :meth:`held` gives,
    :meth:`load_run_state`, :meth:`finish_load`.
    """

    framework: str
    module: torch.nn.Module
    state_is_private: bool
    """Whether weights, as saved, and optimizer state are copies that only the optimizer touches (ZeRO's master
    weights), so that nothing a training script does between two optimizer steps can change them."""

    def completed_steps(self) -> int | None:
        """Optimizer steps taken so far, or None where the framework does not count them."""
        ...

    def cache_lookups(self) -> AbstractContextManager[None]:
        """Nothing of the job changes inside, so that what is asked for again need not be looked up again."""
        ...

    def check_attached(self) -> None:
        """Raise UnsupportedError, saying what to do, where the job is not what was attached any more: a parameter that
        the optimizer holds and the model does not, another optimizer or module in an engine."""
        ...

    def state_versions(self) -> StateVersions | None:
        """The :class:`StateVersions` of the attached optimizer's weights, or None where another one could not go
        unnoticed."""
        ...

    def before_update(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` in the training thread whenever an optimizer step is about to change the state."""
        ...

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every parameter and persistent buffer by fqn, tied ones once, in model order. Same on all ranks."""
        ...

    def owned(self) -> list[Piece]:
        """The pieces that this rank saves, in a fixed order."""
        ...

    def held(self) -> list[Piece]:
        """All pieces that this rank keeps: what a load has to fill."""
        ...

    def expected(self, slots: Mapping[str, Mapping[str, str]]) -> list[FragmentPlace]:
        """What :meth:`held` will give after :meth:`prepare_load` with the same ``slots``. Changes nothing.

        Raises whatever those two would raise."""
        ...

    def prepare_load(self, slots: Mapping[str, Mapping[str, str]]) -> None:
        """Make optimizer state exist before :meth:`held` is asked: slots[fqn][slot] is its dtype."""
        ...

    def finish_load(self) -> None:
        """Refresh whatever is derived from what was loaded (bf16 working weights, gathered parameters).

        Collective: all ranks call it."""
        ...

    def run_state(self) -> dict[str, Any]:
        """Counters, loss scaler, scheduler, hyperparameters per param group, scalars per parameter.

        Plain values and tensors only. Parameters are named by fqn, never by index, so that it fits any
        stage and world size."""
        ...

    def objects(self) -> Mapping[str, Any]:
        """Objects that the framework was given and that load their state themselves (a learning-rate scheduler), by
        the key of :meth:`run_state` where that state is."""
        ...

    def check_run_state(self, state: Mapping[str, Any]) -> None:
        """Raise whatever :meth:`load_run_state` would raise. Changes nothing."""
        ...

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`run_state` but for :meth:`objects`, possibly from another stage, world size or
        framework."""
        ...

    def layout_facts(self) -> dict[str, Any]:
        """JSON values from which the merger lays out this framework's own checkpoint again."""
        ...


T = TypeVar("T")


class StepCache:
    """Answers by key, kept during :meth:`period` only. They are shared: nobody changes them."""

    def __init__(self) -> None:
        self._found: dict[str, Any] | None = None

    @contextmanager
    def period(self) -> Iterator[None]:
        """The job stands still inside. One period inside another is part of it."""
        if self._found is not None:
            yield
            return
        self._found = {}
        try:
            yield
        finally:
            self._found = None

    def once(self, key: str, look: Callable[[], T]) -> T:
        """What ``look`` gives; in a period it is called once for each key, unless it raises."""
        if self._found is None:
            return look()
        if key not in self._found:
            self._found[key] = look()
        found: T = self._found[key]
        return found
