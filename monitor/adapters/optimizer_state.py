"""Capture and restore torch optimizer state: slots, scalars and hyperparameters.

For each tensor (a parameter, or a flat partition of many) an optimizer keeps *slots*, which are tensors of the same
shape, and *scalars*, which are everything else (``step``, factored moments). Hyperparameters are kept by param group.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import torch

from monitor.adapters.module_tensors import special_kind, torch_dtype
from store.errors import ModelMismatchError, UnstorableError, UnsupportedError
from store.names import BUFFER, FROZEN, WEIGHTS

NOT_STATE: Final = frozenset({WEIGHTS, FROZEN, BUFFER})  # slots that are not optimizer state

_INT_STEP = frozenset({"SparseAdam", "LBFGS"})  # optimizers of torch whose step count is not a tensor

_STACKED = 64  # elements of the largest scalars that are copied together


class JointOptimizer:
    """Several optimizers of one job, seen as one: all their param groups, in order, and all their state."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = tuple(members)
        self.state = _JointState(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members for group in member.param_groups]


class _JointState(MutableMapping[torch.Tensor, Any]):
    """The state of several optimizers by parameter. New state goes to the optimizer that holds the parameter."""

    def __init__(self, joint: JointOptimizer) -> None:
        self._joint = joint
        self._holders: dict[int, torch.optim.Optimizer] = {}

    def _of(self, parameter: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        for member in self._joint.members:
            if parameter in member.state:
                return member.state
        if id(parameter) not in self._holders:  # groups may be added
            groups = ((member, group) for member in self._joint.members for group in member.param_groups)
            self._holders = {id(one): member for member, group in groups for one in group["params"]}
        return self._holders[id(parameter)].state

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: Any) -> None:
        self._of(parameter)[parameter] = state

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._of(parameter)[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in member.state for member in self._joint.members)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(member.state for member in self._joint.members)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._joint.members)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        return next((member.state[parameter] for member in self._joint.members if parameter in member.state), default)


AnyOptimizer = torch.optim.Optimizer | JointOptimizer


def members_of(optimizer: AnyOptimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that are seen as one."""
    return optimizer.members if isinstance(optimizer, JointOptimizer) else (optimizer,)


def kind_of(optimizer: AnyOptimizer) -> str:
    """Return the class name of an optimizer, or those of several: ``Muon + AdamW``."""
    return " + ".join(type(member).__name__ for member in members_of(optimizer))


def to_host(value: Any, where: str) -> Any:
    """Return a host copy of plain values and tensors, nested or not. Raise UnsupportedError for others."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: to_host(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([to_host(item, where) for item in value])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError(
        f"{where} holds a {type(value).__name__}, which cannot be saved: use numbers, strings, tensors, lists or dicts"
    )


@dataclass(frozen=True)
class StackedScalars:
    """Copies the scalars of many parameters at once: those of one dtype, shape and device are stacked."""

    places: Mapping[str, Mapping[str, int]]  # fqn -> key -> index among the entries of the optimizer's state
    stacks: Sequence[Sequence[int]]  # the indices that are stacked with each other
    plain: Sequence[int]  # those of plain values

    @classmethod
    def of(cls, places: Mapping[str, Mapping[str, int]], entries: Sequence[Any]) -> "StackedScalars | None":
        """Return None if a scalar is a tensor of a subclass."""
        stacks: dict[Any, list[int]] = {}
        plain: list[int] = []
        for index in (index for keys in places.values() for index in keys.values()):
            value = entries[index]
            if type(value) is torch.Tensor:
                stacks.setdefault((value.dtype, value.shape, value.device), []).append(index)
            elif isinstance(value, torch.Tensor):
                return None
            else:
                plain.append(index)
        return cls(places, list(stacks.values()), plain)

    def capture(self, entries: Sequence[Any]) -> Callable[[], dict[str, dict[str, Any]]]:
        """Copy the scalars to the host. Return what puts them together, by fqn."""
        with torch.no_grad():
            copies = [_stacked([entries[index] for index in stack]) for stack in self.stacks]
        plain = {index: entries[index] for index in self.plain}

        def scalars() -> dict[str, dict[str, Any]]:
            found = dict(plain)
            for stack, copy_ in zip(self.stacks, copies, strict=True):
                found.update(zip(stack, copy_, strict=True))
            return {fqn: {key: found[index] for key, index in keys.items()} for fqn, keys in self.places.items()}

        return scalars


def _stacked(values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return host copies. Large ones are not stacked, which would take memory of their device."""
    if values[0].numel() > _STACKED:
        return [value.to("cpu", copy=True) for value in values]
    return torch.stack(list(values)).cpu().unbind()


def equal(one: Any, other: Any) -> bool:
    """Return whether two plain values or tensors are equal, whatever containers or number types hold them."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def slots_of(state: Mapping[str, Any], parameter: torch.Tensor) -> list[str]:
    """Return the sorted keys of a parameter's state that are slots: tensors of its shape.

    ``step`` is never a slot, not even for a parameter without dimensions."""
    if not state:
        return []
    shape = parameter.shape
    return sorted(
        [
            key
            for key, value in state.items()
            if key != "step" and isinstance(value, torch.Tensor) and value.shape == shape
        ]
    )


def planned_slots(
    state: Mapping[str, Any], parameter: torch.Tensor, wanted: Mapping[str, str]
) -> dict[str, torch.dtype]:
    """Return the slots and dtypes that a parameter's state has after :func:`fit_slots`. Changes nothing.

    ``wanted``: slot -> stored dtype. An existing slot keeps its dtype. Raises UnsupportedError for an unknown dtype."""
    live = slots_of(state, parameter)
    return {
        slot: state[slot].dtype if slot in live else torch_dtype(dtype)
        for slot, dtype in wanted.items()
        if slot not in NOT_STATE
    }


def require_by_parameter(optimizer: AnyOptimizer) -> None:
    """Raise UnsupportedError if an optimizer has state under a key that is not a tensor."""
    states: Mapping[Any, Any] = optimizer.state
    for key, value in states.items():
        if not isinstance(key, torch.Tensor) and value:
            raise UnsupportedError(
                f"{kind_of(optimizer)} keeps state under {key!r}, which is not a parameter, so it would not be "
                "saved; keep it in its param groups, or use an optimizer with state per parameter, such as AdamW"
            )


_STORABLE = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None)})


def require_storable(
    optimizer: AnyOptimizer, name_of: Callable[[torch.Tensor], str], known: frozenset[type] = frozenset()
) -> None:
    """Raise UnstorableError if state of an optimizer has a type that no save can hold.

    The state has parameters as keys, see :func:`require_by_parameter`; ``name_of`` names one for the error. The adapter
    saves ``known`` subclasses of tensors."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if type(value) not in _STORABLE and (kind := _unstorable_kind(value, known)) is not None:
                raise _unstorable(optimizer, key, name_of(parameter), kind)


def require_storable_groups(optimizer: AnyOptimizer, known: frozenset[type] = frozenset()) -> None:
    """Raise UnstorableError if hyperparameters have a type that no save can hold; see :func:`require_storable`."""
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and (kind := _unstorable_kind(value, known)) is not None:
                raise _unstorable(optimizer, key, f"param group {index}", kind)


def _unstorable_kind(value: Any, known: frozenset[type]) -> str | None:
    if type(value) in _STORABLE or type(value) in known:
        return None
    if isinstance(value, torch.Tensor):
        return special_kind(value)
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return next((kind for item in items if (kind := _unstorable_kind(item, known)) is not None), None)
    if isinstance(value, bool | int | float | str):
        return None
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _unstorable(optimizer: AnyOptimizer, key: Any, holder: str, kind: str) -> UnstorableError:
    return UnstorableError(
        f"{kind_of(optimizer)} keeps {key!r} of {holder} as {kind}, which a save would not bring back as it is: "
        "a store holds the elements of plain tensors, numbers, strings, lists and dicts. Use an optimizer that keeps "
        "those, such as torch.optim.AdamW"
    )


def new_slot(parameter: torch.Tensor, dtype: torch.dtype, value: Any = None) -> torch.Tensor:
    """Return a new slot of ``parameter``, on its device.

    value: what the load will fill the slot with; 1-d host memory of its own becomes the slot. Without it: zeros."""
    if value is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    own = isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() == value.nbytes
    if own and can_take_over(parameter) and (value.dtype, value.numel()) == (dtype, parameter.numel()):
        taken: torch.Tensor = value.view(parameter.shape)
        return taken
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def can_take_over(parameter: torch.Tensor) -> bool:
    """Return whether a new slot of ``parameter`` may be host memory that a resume has read."""
    return special_kind(parameter) is None and parameter.device.type == "cpu"


def fit_slots(
    optimizer: AnyOptimizer,
    parameter: torch.Tensor,
    wanted: Mapping[str, str],
    values: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Create the slots in ``wanted`` (slot -> dtype) and drop others. ``values``: by slot, see :func:`new_slot`."""
    state = optimizer.state.get(parameter, {})
    planned, live = planned_slots(state, parameter, wanted), slots_of(state, parameter)
    for slot in live if parameter.numel() else ():  # an empty tensor has nothing in the store and nothing to lose
        if slot not in planned:
            del state[slot]
    for slot, dtype in planned.items():
        if slot not in live:
            optimizer.state[parameter][slot] = new_slot(parameter, dtype, values.get(slot))


def complete_state(optimizer: AnyOptimizer, parameter: torch.Tensor, slots: Collection[str], scalars: bool) -> bool:
    """Make the loaded state of ``parameter`` complete, or drop it. Partial state would break the optimizer's next step.

    If some of the saved ``slots`` were loaded, the others become zeros. If none was loaded, or there was no state,
    the state is dropped and the parameter starts fresh. Returns whether there is state, which can take the saved
    scalars."""
    state = optimizer.state.get(parameter, {})
    loaded = [slot for slot in slots if slot in state]
    if not (loaded if slots else scalars):
        optimizer.state.pop(parameter, None)
        return False
    for slot in slots:
        if slot not in state:
            state[slot] = torch.zeros_like(parameter, requires_grad=False)
    return True


def restored_scalars(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    scalars: Mapping[str, Any],
    saved_by: str | None,
) -> dict[str, Any]:
    """Return saved scalars as the optimizer's state of ``parameter`` takes them. Changes nothing.

    Type and dtype are kept exactly if the same optimizer class, ``saved_by``, saved them. Otherwise a step count gets
    the type this class counts with: a number where a class expects a tensor would silently never be increased."""
    live, out = optimizer.state.get(parameter, {}), {}
    for key, value in scalars.items():
        old = live.get(key)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
            out[key] = value.to(device=old.device, dtype=old.dtype, copy=True)
            continue
        # torch keeps step counts on the host, unless the step is fused or captured; tensors with dimensions are beside
        # their parameter.
        has_shape = isinstance(value, torch.Tensor) and value.ndim
        on_device = has_shape or group.get("fused") or group.get("capturable")
        converts = key == "step" and (old is not None or saved_by != type(optimizer).__name__)
        new = _step_like(value, old, optimizer) if converts else value
        device = parameter.device if on_device else torch.device("cpu")
        out[key] = new.to(device, copy=True) if isinstance(new, torch.Tensor) else copy.deepcopy(new)
    return out


def _step_like(value: Any, live: Any, optimizer: torch.optim.Optimizer) -> Any:
    kind = type(optimizer)
    as_tensor = isinstance(live, torch.Tensor) or (
        live is None and kind.__module__.startswith("torch.optim") and kind.__name__ not in _INT_STEP
    )
    return torch.tensor(float(value), dtype=torch.float32) if as_tensor else int(value)


def common_scalars(fqns: Sequence[str], saved: Mapping[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """Return (slots, scalars) that the parameters of a flat partition had in common; empty if none had any state.

    A flat partition has one step count for all of them. Raises ModelMismatchError if they differ, UnsupportedError for
    scalars with dimensions."""
    scalars_of, names_of = saved["scalars"], saved.get("slots", {})
    known = [fqn for fqn in fqns if scalars_of.get(fqn) or names_of.get(fqn)]
    if not known:
        return set(), {}
    first = scalars_of.get(known[0], {})
    for key, value in first.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            raise UnsupportedError(
                f"optimizer state {key!r} of {known[0]} has the shape {tuple(value.shape)} and cannot be put into a "
                "flat partition; resume without ZeRO"
            )
    for fqn in known[1:]:
        other = scalars_of.get(fqn, {})
        if not equal(first, other):
            raise ModelMismatchError(
                f"{known[0]} and {fqn} share a flat partition but were saved with different optimizer scalars "
                f"({_brief(first)} and {_brief(other)}); resume with the param groups of the saved run, or without ZeRO"
            )
    return {slot for fqn in known for slot in names_of.get(fqn, ())}, dict(first)


def _brief(scalars: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in scalars.items()) or "none"
