"""Capture and restore torch optimizer state: slots, scalars and hyperparameters.

For each tensor (a parameter, or a flat partition of many) an optimizer keeps *slots*, which are tensors of the same
shape, and *scalars*, which are everything else (``step``, factored moments). Param groups keep hyperparameters."""

import copy
import sys
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from monitor.adapters.base import Values
from monitor.adapters.module_tensors import special_kind, torch_dtype
from store.errors import ModelMismatchError, UnstorableError, UnsupportedError
from store.names import BUFFER, FROZEN, WEIGHTS
from store.state_tree import CONTAINERS, PACKED

NOT_STATE: Final = frozenset({WEIGHTS, FROZEN, BUFFER})  # slots that are not optimizer state
_NO_SLOTS = NOT_STATE | {"step"}
_INT_STEP = frozenset({"SparseAdam", "LBFGS"})  # optimizers of torch whose step count is not a tensor
_STACKED = 64  # elements of the largest scalars that are copied together


class JointOptimizer:
    """Presents several optimizers of a job as one, with all their param groups, in order, and all their state."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = tuple(members)
        self._holders: dict[int, torch.optim.Optimizer] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> "_JointState":
        return _JointState(self)

    def holder(self, parameter: torch.Tensor) -> torch.optim.Optimizer:
        """Return the optimizer that holds a parameter."""
        if id(parameter) not in self._holders:  # groups may be added
            self.find_holders()
        return self._holders[id(parameter)]

    def find_holders(self) -> None:
        """Look up which optimizer holds each parameter. Raise UnstorableError if another one still has its state."""
        groups = ((member, group) for member in self.members for group in member.param_groups)
        self._holders = {id(one): member for member, group in groups for one in group["params"]}
        for member in self.members:
            moved = [self._holders[id(one)] for one in member.state if self._holders.get(id(one), member) is not member]
            if moved:
                raise UnstorableError(
                    f"{type(member).__name__} has state of a parameter that {type(moved[0]).__name__} holds, and "
                    "a save has one of each: delete it, as in del optimizer.state[parameter]"
                )


class _JointState(ChainMap[torch.Tensor, Any]):
    """The state of several optimizers by parameter. New state goes to the optimizer that holds the parameter."""

    def __init__(self, joint: JointOptimizer) -> None:
        super().__init__(*(member.state for member in joint.members))
        self._joint = joint

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        existing = next((state for state in self.maps if parameter in state), None)
        return (self._joint.holder(parameter).state if existing is None else existing)[parameter]

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        return self._joint.holder(parameter).state.pop(parameter, *default)


AnyOptimizer = torch.optim.Optimizer | JointOptimizer


def members_of(optimizer: AnyOptimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the members of a :class:`JointOptimizer`, or the optimizer itself."""
    return optimizer.members if isinstance(optimizer, JointOptimizer) else (optimizer,)


def kind_of(optimizer: AnyOptimizer) -> str:
    """Return the class name of an optimizer, or those of several: ``Muon + AdamW``."""
    return " + ".join(type(member).__name__ for member in members_of(optimizer))


def to_host(value: Any, where: str) -> Any:
    """Return a host copy of plain data and tensors, nested or not. Raise UnsupportedError for others.

    A tensor subclass made of plain tensors (:func:`is_packed`) becomes a mapping; :func:`to_device` rebuilds it."""
    if type(value) in _PLAIN:
        return value
    if is_packed(value):
        names, context = value.__tensor_flatten__()
        inner = {name: to_host(getattr(value, name), where) for name in names}
        size, cls = (tuple(value.shape), value.stride()), type(value)
        return {PACKED: (cls.__module__, cls.__qualname__), "inner": inner, "context": context, "size": size}
    if isinstance(value, torch.Tensor):
        return _copied(value, torch.device("cpu"))
    if (kind := _unstorable_kind(value, frozenset())) is not None:
        raise UnsupportedError(
            f"{where} holds {kind}, which cannot be saved: use numbers, strings, tensors, lists or dicts"
        )
    return _mapped(value, lambda item: to_host(item, where))


def to_device(value: Any, device: torch.device) -> Any:
    """Return a copy of what :func:`to_host` returned, with its tensors on ``device``."""
    if isinstance(value, torch.Tensor):
        return _copied(value, device)
    if type(value) is dict and PACKED in value:
        inner = {name: to_device(item, device) for name, item in value["inner"].items()}
        context, (size, stride) = copy.deepcopy(value["context"]), value["size"]
        kind: Any = _packed_type(*value[PACKED])
        return kind.__tensor_unflatten__(inner, context, torch.Size(size), stride)
    return _mapped(value, lambda item: to_device(item, device))


def _copied(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = value.detach().to(device, copy=True)
    grad = value.requires_grad
    return torch.nn.Parameter(made, grad) if type(value) is torch.nn.Parameter else made.requires_grad_(grad)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of plain data in which ``change`` replaces each item of a container."""
    if isinstance(value, Mapping):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = change(item)  # type: ignore[index]
        return made
    if isinstance(value, deque):
        return deque(map(change, value), value.maxlen)
    return type(value)(map(change, value)) if type(value) in (list, tuple) else copy.deepcopy(value)


def is_packed(value: Any) -> bool:
    """Return whether a value is a tensor subclass made of plain tensors (torchao's 8-bit state) that can be rebuilt."""
    kind = type(value)
    if kind in _STORABLE or kind.__name__ == "DTensor" or not is_traceable_wrapper_subclass(value):
        return False
    names, context = value.__tensor_flatten__()
    parts = [*(getattr(value, name) for name in names), context]
    return _packed_type(kind.__module__, kind.__qualname__) is kind and all(
        _unstorable_kind(part, frozenset()) is None for part in parts
    )


def _packed_type(module: str, name: str) -> type | None:
    """Return a tensor subclass by name, if it is imported already: reading a store must not import anything."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, torch.Tensor) else None


@dataclass(frozen=True)
class StackedScalars:
    """Copies the scalars of many parameters in few copies: those of one dtype, shape and device are stacked."""

    places: Mapping[str, Mapping[str, int]]  # fqn -> key -> index among the entries of the optimizer's state
    stacks: Sequence[Sequence[int]]  # the indices that are stacked with each other
    others: Sequence[tuple[int, str, str]]  # index, key, fqn of those that are no plain tensors

    @classmethod
    def of(cls, places: Mapping[str, Mapping[str, int]], entries: Sequence[Any]) -> "StackedScalars":
        stacks: dict[Any, list[int]] = {}
        others: list[tuple[int, str, str]] = []
        for index, key, fqn in ((index, key, fqn) for fqn, keys in places.items() for key, index in keys.items()):
            value = entries[index]
            if type(value) is torch.Tensor and not value.requires_grad:
                stacks.setdefault((value.dtype, value.shape, value.stride(), value.device), []).append(index)
            else:
                others.append((index, key, fqn))
        return cls(places, list(stacks.values()), others)

    def capture(
        self, entries: Sequence[Any], host: Callable[[str, Any, str], Any]
    ) -> Callable[[], dict[str, dict[str, Any]]]:
        """Begin to copy the scalars to the host. Return a function that waits for the device, and assembles them.

        host: copies those that are no plain tensors."""
        with torch.no_grad():
            copies = [_stacked([entries[index] for index in stack]) for stack in self.stacks]
        others = {index: host(key, entries[index], fqn) for index, key, fqn in self.others}

        def scalars() -> dict[str, dict[str, Any]]:
            values = dict(others)
            for stack, finish in zip(self.stacks, copies, strict=True):
                values.update(zip(stack, finish(), strict=True))
            return {fqn: {key: values[index] for key, index in keys.items()} for fqn, keys in self.places.items()}

        return scalars


def _stacked(values: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
    """Begin to copy values to the host; return a function that returns them. Large or strided ones are not stacked."""
    if values[0].numel() > _STACKED or not values[0].is_contiguous():
        whole = [value.to("cpu", copy=True) for value in values]
        return lambda: whole
    stack = torch.stack(list(values))
    if stack.device.type != "cuda":
        return stack.cpu().unbind
    host = torch.empty_like(stack, device="cpu", pin_memory=True).copy_(stack, non_blocking=True)
    copied = torch.cuda.current_stream(stack.device).record_event()

    def wait() -> Sequence[torch.Tensor]:
        copied.synchronize()
        return host.unbind()

    return wait


def equal(one: Any, other: Any) -> bool:
    """Return whether two plain values or tensors are equal, whatever containers or number types hold them."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        numbers = all(isinstance(value, bool | int | float | torch.Tensor) for value in (one, other))
        return numbers and torch.equal(torch.as_tensor(one, device="cpu"), torch.as_tensor(other, device="cpu"))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(np.array_equal(one, other) if np.ndarray in (type(one), type(other)) else one == other)


def slots_of(state: Mapping[str, Any], parameter: torch.Tensor) -> list[str]:
    """Return the sorted keys of a parameter's state that are slots: tensors of its shape.

    ``step`` is never a slot, not even for a parameter without dimensions; nor are keys in ``NOT_STATE``."""
    if not state:
        return []
    shape = parameter.shape
    tensors = [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor) and key not in _NO_SLOTS]
    return sorted(key for key, one in tensors if one.shape == shape and not one.requires_grad and not is_packed(one))


def planned_slots(
    parameter: torch.Tensor, state: Mapping[str, Any], live: Sequence[str], wanted: Mapping[str, str]
) -> dict[str, torch.dtype]:
    """Return the slots and dtypes that a parameter's state has after :func:`fit_slots`. Changes nothing.

    ``live``: its slots now. ``wanted``: slot -> stored dtype, also of the weights. State in the dtype of its weights
    follows the parameter, as in ``load_state_dict()``. Raises UnsupportedError for an unknown dtype."""
    new = {one: parameter.dtype if one == wanted.get(WEIGHTS) else torch_dtype(one) for one in {*wanted.values()}}
    stored = {slot: one for slot, one in wanted.items() if slot not in NOT_STATE}
    return {slot: state[slot].dtype if slot in live else new[one] for slot, one in stored.items()}


def require_by_parameter(optimizer: AnyOptimizer) -> None:
    """Raise UnstorableError if state has a key that is no tensor, or belongs to a parameter of another optimizer."""
    if isinstance(optimizer, JointOptimizer):
        optimizer.find_holders()
    states: Mapping[Any, Any] = optimizer.state
    for key, value in states.items():
        if not isinstance(key, torch.Tensor) and value:
            raise UnstorableError(
                f"{kind_of(optimizer)} keeps state under {key!r}, which is not a parameter, so it would not be "
                "saved; keep it in its param groups, or use an optimizer with state per parameter, such as AdamW"
            )


_PLAIN = frozenset({bool, int, float, str, type(None)})
_STORABLE = _PLAIN | {torch.Tensor, torch.nn.Parameter}


def require_storable(
    optimizer: AnyOptimizer, name_of: Callable[[torch.Tensor], str], known: frozenset[type] = frozenset()
) -> None:
    """Raise UnstorableError if state of an optimizer has a type that no save can hold.

    Its keys are parameters (:func:`require_by_parameter`). name_of: for errors. known: tensor subclasses to save."""
    for parameter, state in optimizer.state.items():
        if type(state) is not dict:
            raise _unstorable(optimizer, "the state", name_of(parameter), f"a {type(state).__qualname__}")
        for key, value in state.items():
            unnamed = f"the value of a key of type {type(key).__qualname__}"
            kind = _unstorable_kind(value, known) if isinstance(key, str) else unnamed
            if kind is not None:
                raise _unstorable(optimizer, key, name_of(parameter), kind)
    _require_own_memory(optimizer, name_of)


def _require_own_memory(optimizer: AnyOptimizer, name_of: Callable[[torch.Tensor], str]) -> None:
    """Raise UnstorableError if state shares memory with a parameter or other state: a resume would separate them.

    One tensor under several keys is allowed, because it is restored as one."""
    states: Mapping[torch.Tensor, Mapping[str, Any]] = optimizer.state
    entries = [(value, (key, parameter)) for parameter, state in states.items() for key, value in state.items()]
    placed: list[Any] = list({id(value): (value, place) for value, place in entries}.values())
    placed += [(one, place) for value, place in entries if type(value) in CONTAINERS for one in tree_leaves(value)]
    placed += [(one, None) for group in optimizer.param_groups for one in group["params"]]
    end, last, shared = 0, 0, set[int]()
    for start, stop, number in sorted((*_span(one), index) for index, (one, _) in enumerate(placed) if _is_plain(one)):
        shared |= {number, last} if start < end else set()
        end, last = (stop, number) if stop > end else (end, last)
    for key, parameter in (placed[number][1] for number in sorted(shared) if placed[number][1]):
        raise _unstorable(optimizer, key, name_of(parameter), "a view of other state or of a parameter")


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and value.numel() > 0


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


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
        return None if is_packed(value) else special_kind(value)
    if type(value) in CONTAINERS:
        items = chain(value, value.values()) if isinstance(value, Mapping) else value
        return next((kind for item in items if (kind := _unstorable_kind(item, known)) is not None), None)
    plain_numpy = isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf"
    if plain_numpy or type(value) in (torch.Size, torch.dtype):
        return None
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _unstorable(optimizer: AnyOptimizer, key: Any, holder: str, kind: str) -> UnstorableError:
    return UnstorableError(
        f"{kind_of(optimizer)} keeps {key!r} of {holder} as {kind}, which a save would not bring back as it is: "
        "a store holds plain tensors, numbers, strings, lists, dicts and the like. Use an optimizer that keeps "
        "those, such as torch.optim.AdamW"
    )


def unusual_strides(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, list[int]]:
    """Return the strides of the slots whose memory is in another order than a new one's would be."""
    strided = [key for key in slots_of(state, parameter) if state[key].layout is parameter.layout is torch.strided]
    if not strided:
        return {}  # others are refused by name where the units are listed
    usual = (parameter if parameter.is_contiguous() else torch.empty_like(parameter, device="meta")).stride()
    return {slot: list(state[slot].stride()) for slot in strided if state[slot].stride() != usual}


def with_stride(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return ``tensor``, or a copy, whose memory has these strides. A DTensor keeps its own."""
    if tensor.stride() == tuple(stride) or special_kind(tensor) is not None:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def new_slot(parameter: torch.Tensor, dtype: torch.dtype, value: Any = None) -> torch.Tensor:
    """Return a new slot of ``parameter``, on its device.

    value: what the load will fill it with; 1-d host memory that holds nothing else becomes the slot. None: zeros."""
    if value is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    exclusive = isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() == value.nbytes
    if exclusive and can_take_over(parameter) and (value.dtype, value.numel()) == (dtype, parameter.numel()):
        slot: torch.Tensor = value.view(parameter.shape)
        return slot
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def can_take_over(parameter: torch.Tensor) -> bool:
    """Return whether a new slot of ``parameter`` may be host memory that a resume has read."""
    return special_kind(parameter) is None and parameter.device.type == "cpu" and parameter.is_contiguous()


def fit_slots(
    optimizer: AnyOptimizer, parameter: torch.Tensor, wanted: Mapping[str, str], values: Values = MappingProxyType({})
) -> None:
    """Create the slots in ``wanted`` (slot -> dtype) and drop others. ``values``: by slot, see :func:`new_slot`."""
    state = optimizer.state.get(parameter, {})
    live = slots_of(state, parameter)
    planned = planned_slots(parameter, state, live, wanted)
    for slot in live if parameter.numel() else ():  # an empty tensor has nothing in the store and nothing to lose
        if slot not in planned:
            del state[slot]
    for slot, dtype in planned.items():
        if slot not in live:
            optimizer.state[parameter][slot] = new_slot(parameter, dtype, values.get(slot))


def complete_state(optimizer: AnyOptimizer, parameter: torch.Tensor, slots: Collection[str], scalars: bool) -> bool:
    """Make the loaded state of ``parameter`` complete, or drop it. Partial state would break the optimizer's next step.

    If some of the saved ``slots`` were loaded, the others become zeros. If none was loaded, or there was no state, the
    state is dropped and the parameter starts fresh. Returns whether there is state to take the saved scalars."""
    state = optimizer.state.get(parameter, {})
    loaded = [slot for slot in slots if slot in state or not parameter.numel()]  # empty tensors are not in the store
    if not (loaded if slots else scalars):
        optimizer.state.pop(parameter, None)
        return False
    for slot in slots:
        if slot not in state:
            optimizer.state[parameter][slot] = torch.zeros_like(parameter, requires_grad=False)
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
            same = saved_by == type(optimizer).__name__
            out[key] = to_device(value if same else value.to(old.dtype), old.device)
            continue
        # torch keeps step counts on the host, unless fused or captured, and n-d tensors on the parameter's device.
        on_host = isinstance(value, torch.Tensor) and not value.ndim
        on_device = not on_host or group.get("fused") or group.get("capturable")
        foreign = saved_by != type(optimizer).__name__ or type(old) not in (type(None), type(value))
        new = _step_like(value, old, optimizer) if key == "step" and foreign else value
        out[key] = to_device(new, parameter.device if on_device else torch.device("cpu"))
    return out


def _step_like(value: Any, live: Any, optimizer: torch.optim.Optimizer) -> Any:
    kind = type(optimizer)
    as_tensor = isinstance(live, torch.Tensor) or (
        live is None and kind.__module__.startswith("torch.optim") and kind.__name__ not in _INT_STEP
    )
    return torch.tensor(float(value), dtype=torch.float32, device="cpu") if as_tensor else int(value)


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
