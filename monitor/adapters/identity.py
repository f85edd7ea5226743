"""Detect cheaply whether a job still has the tensors of the decision before, and cache lookups as long as it has.

Listing a job's tensors (names, pieces, checks) takes microseconds for each of them, and they rarely change between two
decisions. So all that the list depends on is read into plain lists, by loops that run in C, and compared. Likewise
:class:`OptimizerAttributes` detects changes of an optimizer's attributes, which its state dict lacks. A framework
calls a :class:`Hook` before it changes state."""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from store.errors import UnstorableError
from store.state_tree import CONTAINERS

T = TypeVar("T")
Integers = npt.NDArray[np.int64]
_VALUES = frozenset({bool, int, float, str, type(None)})
PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter})


@dataclass(frozen=True)
class MemoryRegions:
    """The contiguous memory regions of tensors."""

    addresses: Integers  # first byte of each
    sizes: Integers  # bytes of each
    pageable: npt.NDArray[np.bool_]  # whether it is host memory that is not pinned
    devices: frozenset[torch.device]

    @property
    def cuda(self) -> torch.device | None:
        """A CUDA device that holds any of them, or None."""
        return next((device for device in self.devices if device.type == "cuda"), None)

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "MemoryRegions":
        return cls(
            addresses_of(tensors),
            np.array([tensor.nbytes for tensor in tensors], np.int64),
            np.array([tensor.device.type == "cpu" and not tensor.is_pinned() for tensor in tensors], np.bool_),
            frozenset(tensor.device for tensor in tensors),
        )

    @classmethod
    def joined(cls, parts: Sequence["MemoryRegions"]) -> "MemoryRegions":
        """Return the regions of all parts, one after the other."""
        return cls(
            np.concatenate([part.addresses for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            np.concatenate([part.pageable for part in parts]),
            frozenset[torch.device]().union(*(part.devices for part in parts)),
        )


def addresses_of(tensors: Sequence[torch.Tensor]) -> Integers:
    """Return the address of each tensor."""
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))


@dataclass(frozen=True)
class Identity:
    """The tensors of a job at one time.

    ``layout`` is all that the list of pieces depends on: types of modules (its first item), names, objects, addresses,
    shapes, dtypes. It holds no tensor. Equal ones are the same object if they come from one :class:`IdentityReader`."""

    layout: Sequence[Any]
    tensors: Sequence[torch.Tensor]  # memory of parameters, buffers and all tensors in optimizer state, slots or not
    trained: Sequence[torch.Tensor]  # parameters of the optimizer that require gradients
    entries: Sequence[Any]  # all values in the optimizer's state, in its order


class IdentityReader:
    """Reads the identity of a module and its optimizer again and again, and recognizes an unchanged layout.

    ``memory_of`` returns the memory that a tensor has on this rank, if that is not its own."""

    def __init__(self, memory_of: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._memory_of = memory_of
        self._last: Sequence[Any] = ()
        self._guard: _MemoryGuard | None = None  # of the tensors of the last layout

    def read(self, module: nn.Module, optimizer: Any, others: Sequence[torch.Tensor] = ()) -> Identity | None:
        """Return the identity; None for optimizer state of unknown form. others: tensors that pieces may lie in too."""
        states: Mapping[Any, Any] = optimizer.state
        plain = {dict}.issuperset(map(type, states.values()))
        if not plain or not all(issubclass(kind, torch.Tensor) for kind in set(map(type, states))):
            return None
        modules = modules_of(module)
        children = _flat([part._modules for part in modules])
        parameters = _flat([part._parameters for part in modules])
        buffers = _flat([part._buffers for part in modules])
        entries = _flat(list(states.values()))
        kinds, module_types = list(map(type, entries.values)), list(map(type, modules))
        if not has_usual_tree(module, module_types):
            return None
        tensors = {kind for kind in set(kinds) if issubclass(kind, torch.Tensor)}
        if not (tensors | _VALUES).issuperset(kinds):
            return None
        slots = [*compress(entries.values, map(tensors.__contains__, kinds)), *others]
        groups = [group["params"] for group in optimizer.param_groups]
        grouped = list(chain.from_iterable(groups))
        live = [value for value in chain(parameters.values, buffers.values) if value is not None] + slots
        live = list(dict(zip(map(id, live), live, strict=True)).values())  # a tied one once, or the guard refuses it
        memory = live if self._memory_of is None else list(map(self._memory_of, live))
        layout: Sequence[Any] = [
            module_types,
            list(map(type, parameters.values)),
            list(map(type, buffers.values)),
            *((one.names, _ids(one.values), one.counts) for one in (children, parameters, buffers)),
            [(i, {*names}) for i, part in enumerate(modules) if (names := part._non_persistent_buffers_set)],
            [value is not None and value.requires_grad for value in parameters.values],
            list(map(len, groups)),
            _ids(grouped),
            _ids(states),
            entries.names,
            entries.counts,
            kinds,
            _ids(slots),
        ]
        trained = [one for one in grouped if one.requires_grad]
        return Identity(self._reuse_equal(layout, memory), memory, trained, entries.values)

    def _reuse_equal(self, layout: Sequence[Any], memory: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Return the last layout if it is equal and ``memory`` is as it was then, otherwise ``layout``."""
        if self._guard is None or layout != self._last or not self._guard.holds(memory):
            self._last, self._guard = layout, _MemoryGuard(memory)
        return self._last


class _MemoryGuard:
    """Detects changes of tensors in class, dtype, device, shape, strides, lazy conjugation and address.

    Compares in C++, by the guards of torch.compile. Construction raises an error for tensors that those do not know."""

    def __init__(self, memory: Sequence[torch.Tensor]) -> None:
        from torch._C._dynamo.guards import TensorGuards

        sizes, strides = ([list(get(one)) for one in memory] for get in (torch.Tensor.size, torch.Tensor.stride))
        dims = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
        self._guards = TensorGuards(*memory, **dims)  # type: ignore[arg-type]  # its stub knows one tensor only
        self._addresses = addresses_of(memory)

    def holds(self, memory: Sequence[torch.Tensor]) -> bool:
        same = len(memory) == len(self._addresses) and self._guards.check(*memory)
        return same and np.array_equal(self._addresses, addresses_of(memory))


@dataclass(frozen=True)
class _Flat:
    """The items of several mappings, concatenated."""

    names: list[str]
    values: list[Any]
    counts: list[int]


def _ids(values: Collection[Any]) -> bytes:
    """Return the id() of each value. A list of integers takes longer to compare, and for the garbage collector."""
    return np.fromiter(map(id, values), np.int64, len(values)).tobytes()


def _flat(mappings: Sequence[Mapping[str, Any]]) -> _Flat:
    values = chain.from_iterable(map(methodcaller("values"), mappings))
    return _Flat(list(chain.from_iterable(mappings)), list(values), list(map(len, mappings)))


def has_usual_tree(module: nn.Module, kinds: Iterable[type[nn.Module]]) -> bool:
    """Return whether no module overrides the lookups that :func:`modules_of` replaces. kinds: types of the modules."""
    usual, root = nn.Module, type(module)
    plain = root.named_parameters is usual.named_parameters and root.named_buffers is usual.named_buffers
    return plain and all(kind.named_modules is usual.named_modules for kind in set(kinds))


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return a module and all modules inside, each once. Faster than ``modules()``, which also builds their names."""
    found = level = {id(module): module}
    while level:  # by depth
        children = chain.from_iterable(map(methodcaller("values"), map(attrgetter("_modules"), level.values())))
        level = {id(child): child for child in children if child is not None}
        for known in level.keys() & found.keys():
            del level[known]
        found |= level
    return list(found.values())


def version_of(tensor: torch.Tensor) -> int:
    """Return autograd's in-place version counter; 0 for a tensor made under ``inference_mode``, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(values: Sequence[Any]) -> tuple[bytes, list[Any]]:
    """Return (ids of the values, in-place version counters of tensors and other values as text)."""
    ids = _ids(values)
    if all(issubclass(kind, torch.Tensor) for kind in set(map(type, values))):
        with suppress(RuntimeError):  # of a tensor made under inference_mode
            return ids, list(map(attrgetter("_version"), values))
    return ids, [version_of(v) if isinstance(v, torch.Tensor) else repr(v) for v in values]


class Hook:
    """What a framework is given to call, until ``call`` is None. A pickle or a deep copy of it calls nothing."""

    __slots__ = ("call",)  # torch copies attributes of a hook

    def __init__(self, hooks: list["Hook"], call: Callable[..., None]) -> None:
        self.call: Callable[..., None] | None = call
        hooks.append(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled optimizer step would trace it
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self.call is not None:
            self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # does nothing; unpickling needs no module of this package


class StepCache:
    """Caches values by key inside :meth:`enabled` only. The values are shared: do not change them.

    One decision asks a dozen times for the names of a model's parameters, and each lookup walks the module tree, which
    takes longer than everything else in a decision. Between two decisions a script may change anything."""

    def __init__(self) -> None:
        self._values: dict[str, Any] | None = None
        self._kept: dict[str, Any] = {}
        self._layout: Any = None  # that the kept values belong to

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Cache values until the outermost context ends."""
        if self._values is not None:
            yield
            return
        self._values = {}
        try:
            yield
        finally:
            self._values = None

    def get(self, key: str, compute: Callable[[], T]) -> T:
        """Return ``compute()``, called once per key while the cache is enabled; errors are not cached."""
        if self._values is None:
            return compute()
        if key not in self._values:
            self._values[key] = compute()
        value: T = self._values[key]
        return value

    def keep(self, identity: Identity | None, key: str, compute: Callable[[], T]) -> T:
        """Return ``compute()``, called once per key and layout of the job. The value must hold no tensor of the job."""
        if identity is None:
            return self.get(key, compute)
        if self._layout is not identity.layout:
            self._kept, self._layout = {}, identity.layout
        if key not in self._kept:
            self._kept[key] = compute()
        value: T = self._kept[key]
        return value


_HELD, _CONSTANT = {"state", "param_groups", "optimizer"}, {"_numel_cache", "name2qmap"}
_OTHERS = {"_step_count", "_opt_called", "grad_scale", "found_inf", "_zero_grad_profile_name"}
_IGNORED = _HELD | _CONSTANT | _OTHERS | {"_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused"}
"""Saved by other means, constants of LBFGS and bitsandbytes, or set by schedulers, gradient scalers and torch."""
_INNER = "another optimizer, with state"


class OptimizerAttributes:
    """The attributes of an optimizer, or of a wrapper around it. Loaded like an object in ``state=``.

    Its state are the plain values that changed since construction: numbers, strings, None, containers of them. A
    tensor, an array or a generator that appears or changes is refused, and so is another optimizer with state. The
    attributes of other objects are not looked into."""

    def __init__(self, holder: Any, optimizer: torch.optim.Optimizer) -> None:
        self.kind, self.optimizer = type(holder).__name__, optimizer
        self._values: dict[str, Any] = getattr(holder, "__dict__", {})
        own = {id(value) for group in optimizer.param_groups for value in _items_of(group)}
        defaults = _items_of(getattr(optimizer, "defaults", {}))
        self._defaults = [one for one in defaults if isinstance(one, torch.Tensor) and id(one) in own]
        self._first, self._seen = copy.deepcopy(self._plain()), self._marks()
        self.check()

    def check(self) -> None:
        """Raise UnstorableError if an attribute is state that no save can hold. Call it at every decision."""
        state, inner = self._values.get("state"), type(self.optimizer).__name__
        if isinstance(state, Mapping) and state is not self.optimizer.state and any(state.values()):
            raise UnstorableError(
                f"{self.kind} around {inner} keeps state of its own, which would not be saved: attach the {inner} "
                "itself and pass the wrapper's state as an object in state=[...], or remove the wrapper"
            )
        for name, mark in self._marks().items():
            if mark is _INNER or mark != self._seen.get(name):
                raise UnstorableError(
                    f"{self.kind} keeps {_INNER if mark is _INNER else 'a value that changes'}, in its attribute "
                    f"{name}, which a save does not hold, so it would not come back: keep it in optimizer.state or the "
                    "param groups, or attach inner optimizers, attach((model, [first, second]))"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the plain values that changed since construction."""
        return {name: item for name, item in self._plain().items() if repr(item) != repr(self._first.get(name, self))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the values in ``state``. Others that changed get their values at construction."""
        for name in self.state_dict():
            del self._values[name]
            if name in self._first:
                self._values[name] = copy.deepcopy(self._first[name])
        self._values.update(state)

    def _plain(self) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if name not in _IGNORED and _is_plain(value)}

    def _marks(self) -> dict[str, Any]:
        """Return, by name, a mark of each value that is not plain: it differs once the value has changed."""
        parts = dict(_parts({key: item for key, item in self._values.items() if key not in _IGNORED}))
        if any(isinstance(value, torch.Tensor) for value in parts.values()):
            saved = {id(one) for group in self.optimizer.param_groups for one in _items_of(group)}
            saved |= {id(value) for state in self.optimizer.state.values() for value in state.values()}
            saved |= set(map(id, self._defaults))  # in a group at first, as a tensor ``lr`` until training replaces it
            parts = {k: one for k, one in parts.items() if not isinstance(one, torch.Tensor) or id(one) not in saved}
        return {name: _mark(one) for name, one in parts.items()}


def _items_of(group: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values of a param group, and those in lists and tuples, such as its parameters."""
    for value in group.values():
        yield from value if isinstance(value, list | tuple) else (value,)


def _is_plain(value: Any) -> bool:
    if type(value) in CONTAINERS:
        values = value.values() if isinstance(value, Mapping) else ()
        return all(map(_is_plain, value)) and all(map(_is_plain, values))
    if type(value) is int:
        return abs(value) < 1 << 32  # larger ones may be the id() of an object, which another process does not have
    return type(value) in (bool, float, str, type(None)) or isinstance(value, np.generic)


def _parts(values: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of attributes that are not plain and may change, also of those in containers."""
    kinds = (int, float, np.ndarray, torch.Tensor, torch.Generator, torch.optim.Optimizer)
    for index, (key, value) in enumerate(values.items()):
        name = f"{prefix}[{index if isinstance(key, torch.Tensor) else key!r}]" if prefix else str(key)
        if isinstance(value, kinds) and (prefix or not _is_plain(value)):
            yield name, value
        elif isinstance(value, Mapping | list | tuple | deque | set) and depth < 3 and not _is_plain(value):
            yield from _parts(value if isinstance(value, Mapping) else dict(enumerate(value)), name, depth + 1)


def _mark(value: Any) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        return _INNER if any(value.state.values()) else None
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    value = value.get_state().numpy() if isinstance(value, torch.Generator) else value
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value)
