"""Define the interface to a training framework: where its state lives, as fragments, and how to restore it.

An adapter is used from the training thread only, between optimizer steps, while the state does not change.
It leaves the user's param groups as they are.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from monitor.adapters.identity import Identity
from store.names import Fragment


class Piece(NamedTuple):
    """A fragment and the live memory behind it."""

    fragment: Fragment
    tensor: torch.Tensor
    """1-d, contiguous, ``fragment.numel`` elements, a view on the framework's own storage: copying from it saves,
    copying into it loads."""
    target: torch.Tensor | None = None
    """The framework's tensor if ``tensor`` is a copy of it, because its memory is in another order (channels-last): a
    load copies into it, too."""


@dataclass(frozen=True)
class FragmentPlace:
    """A fragment that a load will fill; its memory need not exist yet."""

    fragment: Fragment
    dtype: torch.dtype  # of the live tensor
    new: bool = field(default=False, compare=False)
    """The memory does not exist, and may be the host memory that the values were read into."""


@dataclass(frozen=True)
class TensorInfo:
    """One parameter or persistent buffer of the model."""

    shape: tuple[int, ...]  # global shape
    dtype: str  # dtype of the working copy, as safetensors names it (``BF16``, ``F32``, ...)
    kind: str  # ``trainable``, ``frozen`` or ``buffer``
    aliases: tuple[str, ...] = ()  # other names of the same tensor (tied weights) in the module tree
    special: str | None = None  # its subclass or layout, if it is not a plain tensor that the adapter can save


@dataclass(frozen=True)
class LiveValue:
    """A value in the framework's own state dicts, and where a save has it."""

    name: str  # as a script reaches it
    value: Any
    fqn: str | None = None  # parameter or buffer of the model that it belongs to
    stored: tuple[Any, ...] | None = None  # path in the run state; None if it is the memory of a piece


@dataclass(frozen=True)
class StateVersions:
    """Version counters of weights and optimizer state: equal if neither was changed. No value is read."""

    optimizer: str  # class name
    weights: Any
    state: Any


class Adapter(Protocol):
    """Access to the state of one training framework.

    The fragments that :meth:`owned` returns on all ranks together cover every (fqn, slot) exactly once.
    :meth:`held` returns all fragments on this rank, replicas included: a load fills them.
    The slot is :data:`store.names.WEIGHTS` for trainable weights (the fp32 master where there is one),
    :data:`store.names.FROZEN` for parameters without gradient, :data:`store.names.BUFFER` for persistent
    buffers, and the optimizer's own key (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, ...) for its
    state tensors of the parameter's shape.

    A load is checked first, without changing anything: :meth:`expected`, :meth:`check_run_state`. Then follow, in this
    order: the states of :meth:`objects`, :meth:`prepare_load`, copying into the pieces of :meth:`held`,
    :meth:`load_run_state`, :meth:`finish_load`."""

    framework: str
    module: torch.nn.Module
    state_is_private: bool
    """Whether weights, as saved, and optimizer state are copies that only the optimizer touches (ZeRO's master
    weights), so that nothing a training script does between two optimizer steps can change them."""
    buffers_follow_rank0: bool  # every forward overwrites the persistent buffers of all ranks with those of rank 0

    def completed_steps(self) -> int | None:
        """Return the number of optimizer steps taken, or None if the framework does not count them."""

    def cache_lookups(self) -> AbstractContextManager[None]:
        """Cache lookups inside the context, in which nothing of the job may change."""

    def check_attached(self) -> None:
        """Raise UnsupportedError if the job is no longer the attached one.

        Cases: the optimizer holds a parameter that is not in the model; an engine has another optimizer or module."""

    def state_versions(self) -> StateVersions | None:
        """Return version counters of the optimizer's weights and state.

        None if a replaced optimizer is always detected without them."""

    def identity(self) -> Identity | None:
        """Return the tensors of the job now. Where the layout is equal, so are the names and places of all pieces.

        None if that cannot be told, so that everything is listed anew."""

    def before_update(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` in the training thread whenever an optimizer step is about to change the state."""

    def before_change(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` before every optimizer step, and before other public calls that change the state in place.

        Such as loading a checkpoint of the framework's own. Changes through ``.data`` cannot be intercepted."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every parameter and persistent buffer by fqn, tied ones once, in model order. Same on all ranks."""

    def owned(self) -> list[Piece]:
        """Return the pieces that this rank saves, in a fixed order."""

    def held(self) -> list[Piece]:
        """Return all pieces on this rank, which a load has to fill."""

    def expected(self, slots: Mapping[str, Mapping[str, str]]) -> list[FragmentPlace]:
        """Return the places :meth:`held` will have after :meth:`prepare_load` with the same ``slots``.

        Changes nothing. Raises the errors that those two would raise."""

    def prepare_load(
        self, slots: Mapping[str, Mapping[str, str]], values: Mapping[Fragment, Any] = MappingProxyType({})
    ) -> None:
        """Create optimizer state before :meth:`held` is called; slots[fqn][slot] is its dtype.

        values: what the load will fill; new state may take over their host memory. What is not in it becomes zeros."""

    def finish_load(self) -> None:
        """Refresh everything derived from the loaded state (bf16 working weights, gathered parameters). Collective."""

    def run_state(self) -> dict[str, Any]:
        """Return counters, loss scaler, scheduler, hyperparameters per param group and scalars per parameter.

        Plain values and tensors only. Parameters are named by fqn, never by index, so that it fits any stage and world
        size. All are copies, which training does not change."""

    def capture_run_state(self) -> Callable[[], dict[str, Any]]:
        """Copy what :meth:`run_state` returns. Return what puts it together, in any thread."""

    def objects(self) -> Mapping[str, Any]:
        """Return the framework's objects that load their own state (a learning-rate scheduler).

        Keyed as their state is in :meth:`run_state`."""

    def check_run_state(self, state: Mapping[str, Any]) -> None:
        """Raise the errors that :meth:`load_run_state` would raise. Changes nothing."""

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`run_state`, except :meth:`objects`; it may be of another stage, world size or framework."""

    def live_values(self) -> Iterable[LiveValue]:
        """Return all that the state dicts of model and optimizer hold on this rank. Nothing is gathered."""

    def layout_facts(self) -> dict[str, Any]:
        """Return JSON values from which the merger rebuilds the framework's own checkpoint layout."""


def wrap_methods(
    target: Any, names: Sequence[str], hook: Callable[[], None] | None = None, *, then: Callable[[], None] | None = None
) -> None:
    """Call ``hook`` before, and ``then`` after, each call of these methods of one object. Methods that it lacks do not
    matter: releases of DeepSpeed differ."""
    for name in names:
        method = getattr(target, name, None)
        if method is not None:
            if inspect.ismethod(method) and name not in vars(target):  # of the class, where others may replace it later
                method = partial(_call_method, target, name)
            setattr(target, name, _wrapped(method, hook, then))


def _call_method(target: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(type(target), name)(target, *args, **kwargs)


def _wrapped(
    method: Callable[..., Any], hook: Callable[[], None] | None, then: Callable[[], None] | None
) -> Callable[..., Any]:
    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if hook is not None:
            hook()
        result = method(*args, **kwargs)
        if then is not None:
            then()
        return result

    return called
