"""Capture, validate and load run state: counters, random states, user objects, and values that differ between ranks.

Run state is everything a resume needs besides the tensors that all ranks share, per rank: the random states of torch,
CUDA, numpy and python; the framework's counters and schedules (from the adapter); the user's objects; the extra state
of modules (``get_extra_state``); persistent buffers in which ranks differ.

``load_state_dict`` of user objects may raise halfway, consume random numbers or set learning rates. A resume therefore
calls it before any other state changes, and if it fails on any rank, all ranks undo it. Training thread."""

import logging
import random
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from monitor.adapters.base import Adapter
from monitor.adapters.hyperparameters import Constructed, is_schedule, with_constructed
from monitor.adapters.module_tensors import RankBuffers, bits_of, dtype_name, extra_states, memory_order, torch_dtype
from store.errors import ConfigError, DamagedError, ModelMismatchError, UsageError
from store.state_tree import Encoder, Leaf, decode, encode
from store.text import listed

_log = logging.getLogger("driftpoint")

Objects = Sequence[Any] | Mapping[str, Any]
"""The objects in ``state=``: a list, or a mapping of names to objects. None drops what is stored under a name."""


@dataclass(frozen=True)
class SavedObject:
    """The stored state of a user object. Stores of older releases and imported ones have neither name nor kind."""

    name: str | None  # None in a list
    kind: str | None  # class name
    state: Any


class UserState:
    """Holds the objects in ``state=``: with state_dict and load_state_dict, or a ``torch.Generator``."""

    def __init__(self, objects: Objects) -> None:
        named = isinstance(objects, Mapping)
        items = dict(objects) if isinstance(objects, Mapping) else dict(enumerate(objects or ()))
        for key, item in items.items():
            if named and (type(key) is not str or not key):
                raise ConfigError(f"state= has the name {key!r}: names of objects are non-empty strings")
            methods = (getattr(item, name, None) for name in ("state_dict", "load_state_dict"))
            if not ((item is None and named) or isinstance(item, torch.Generator) or all(map(callable, methods))):
                raise ConfigError(
                    f"state[{key!r}] is a {type(item).__name__} without state_dict() and load_state_dict(): add both "
                    "methods, or remove it from state="
                )
        self.objects = [item for item in items.values() if item is not None]
        self._names = [str(key) for key, item in items.items() if item is not None] if named else None
        self._dropped = frozenset(str(key) for key, item in items.items() if item is None)
        self.schedules = {self.label(index): item for index, item in enumerate(self.objects) if is_schedule(item)}
        self.script = self.recorded = Constructed({}, {})
        """What the script constructed, and what saves record: after a resume, of the run that this one continues."""

    def __len__(self) -> int:
        return len(self.objects)

    def capture(self) -> list[Any]:
        return [state_of(item) for item in self.objects]

    def described(self) -> list[list[str | None]]:
        """Return [name, class name] of each object; the names are None for a list."""
        return [
            [None if self._names is None else self._names[index], type(item).__name__]
            for index, item in enumerate(self.objects)
        ]

    def label(self, index: int) -> str:
        """Return how messages name an object."""
        key = index if self._names is None else repr(self._names[index])
        return f"state[{key}] (a {type(self.objects[index]).__name__})"

    def match(self, saved: Sequence[SavedObject]) -> list[SavedObject | None]:
        """Return the saved state of each object, None for a name that is not stored.

        A list must have as many objects as were saved, of the same classes and order. Names are matched by name; if a
        list was saved, the first names take its positions. Raises ModelMismatchError if the objects differ."""
        if self._names is None:
            found = self._match_list(saved)
        elif any(one.name is not None for one in saved):
            found = self._match_names(self._names, {one.name or "": one for one in saved})
        else:
            found = self._match_positions(saved)
        for index, one in enumerate(found):
            if one is not None and not _is_kind(self.objects[index], one.kind) and not self._renamed(index, one, saved):
                raise ModelMismatchError(
                    f"{self.label(index)} is not of the class that was saved there, {one.kind}: pass the same objects "
                    'in the same order, or give them names, as in state={"scheduler": scheduler}; a class that was '
                    "renamed may inherit from one of the old name"
                )
        return found

    def _renamed(self, index: int, one: SavedObject, saved: Sequence[SavedObject]) -> bool:
        """Return whether a named object is probably the saved one, whose class was renamed.

        That is so if neither class occurs under another name, and both states have the same keys."""
        elsewhere = any(_is_kind(self.objects[index], other.kind) for other in saved)
        alone = one.name is not None and not elsewhere and not any(_is_kind(item, one.kind) for item in self.objects)
        with suppress(Exception):  # of the object's own state_dict(), or keys that it does not have
            return alone and set(one.state) == set(state_of(self.objects[index]))
        return False

    def notes(self, saved: Sequence[SavedObject]) -> list[str]:
        """Describe the objects that a resume from ``saved`` leaves as they are, and stored ones that it drops."""
        found = self.match(saved)
        new = [self.label(index) for index, one in enumerate(found) if one is None]
        dropped = sorted(self._dropped & {one.name for one in saved if one.name is not None})
        notes = [f"{name} is not in the store: it keeps its initial state" for name in new]
        notes += [
            f"{self.label(index)} takes the state that was saved under its name by a {one.kind}"
            for index, one in enumerate(found)
            if one is not None and not _is_kind(self.objects[index], one.kind)
        ]
        return notes + [f"the stored state of {name!r} is dropped, since state= has None for it" for name in dropped]

    def _match_list(self, saved: Sequence[SavedObject]) -> list[SavedObject | None]:
        names = [one.name for one in saved if one.name is not None]
        if names:
            raise ModelMismatchError(
                f"the store holds the state of named objects ({listed(names)}), and state= is a list: pass a mapping "
                f"with these names, as in state={{{names[0]!r}: ...}}"
            )
        if len(saved) != len(self.objects):
            raise ModelMismatchError(
                f"the store holds the state of {len(saved)} objects, state=[...] has {len(self.objects)}: pass the "
                "same objects in the same order as when they were saved. To add or remove objects, give them names: "
                "state={'scheduler': scheduler, ...}, first those of the list, in its order, then new ones"
            )
        return list(saved)

    def _match_positions(self, saved: Sequence[SavedObject]) -> list[SavedObject | None]:
        if len(saved) > len(self.objects):
            raise ModelMismatchError(
                f"the store holds the state of a list of {len(saved)} objects, state= names {len(self.objects)}: name "
                "all objects of the list first, in its order; after the next save they can be removed"
            )
        return [*saved, *[None] * (len(self.objects) - len(saved))]

    def _match_names(self, names: Sequence[str], saved: Mapping[str, SavedObject]) -> list[SavedObject | None]:
        left = sorted(saved.keys() - set(names) - self._dropped)
        if left:
            raise ModelMismatchError(
                f"the store holds the state of {listed(left)}, which state= does not name: pass the object, or None "
                f"to drop its state, as in state={{{left[0]!r}: None}}"
            )
        return [saved.get(name) for name in names]


def joined(own: Mapping[str, Any], objects: Objects) -> Objects:
    """Return a launcher's own objects, then the user's ``objects``: as a list if those are a list."""
    if not isinstance(objects, Mapping):
        return [*own.values(), *(objects or ())]
    taken = sorted(own.keys() & objects.keys())
    if taken:
        raise ConfigError(f"state= has the name {taken[0]!r}, which is taken: choose another name")
    return {**own, **objects}


def _is_kind(item: Any, kind: str | None) -> bool:
    return kind is None or any(base.__name__ == kind for base in type(item).__mro__)


def state_of(item: Any) -> Any:
    """Return the state of a user object, with its live tensors."""
    return item.get_state() if isinstance(item, torch.Generator) else item.state_dict()


def load_state(item: Any, state: Any) -> None:
    """Load a state from :func:`state_of`. Propagates exceptions of the object."""
    (item.set_state if isinstance(item, torch.Generator) else item.load_state_dict)(state)


def capture_rng() -> dict[str, Any]:
    """Return the state of every global random generator of this process."""
    cuda = torch.cuda.is_available()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else [],
        "cuda_device": torch.cuda.current_device() if cuda else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the global random generators from :func:`capture_rng`; those of CUDA by :func:`cuda_generators`."""
    torch.set_rng_state(state["torch"])
    for device, generator in cuda_generators(state)[0].items():
        torch.cuda.set_rng_state(generator, device)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def cuda_generators(state: Mapping[str, Any]) -> tuple[dict[int, torch.Tensor], str | None]:
    """Return (state of the generator of each CUDA device, what is not restored), for this process.

    If another number of devices is visible than when the state was saved, only the generator of the current device has
    a counterpart: that of the device that was current then."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return match_generators(state, count, torch.cuda.current_device() if count else 0)


def match_generators(state: Mapping[str, Any], count: int, current: int) -> tuple[dict[int, torch.Tensor], str | None]:
    """Match saved generators with ``count`` visible devices; see :func:`cuda_generators`."""
    saved, device = state["cuda"], state.get("cuda_device")
    if len(saved) == count:
        return dict(enumerate(saved)), None
    note = f"the random generators of CUDA were saved with {len(saved)} visible devices, and {count} are visible now: "
    if not count or device is None or device >= len(saved):
        return {}, note + "they are not restored"
    return {current: saved[device]}, note + "only that of the current device is restored"


@dataclass(frozen=True)
class CapturedState:
    """The run state of one rank at one time.

    live: Parts that may share memory with live values. copies: Returns the other parts, in any thread."""

    live: Mapping[str, Any]
    copies: Callable[[], Mapping[str, Any]]

    def whole(self) -> dict[str, Any]:
        """Return all parts."""
        return {**self.copies(), **self.live}


def capture_run_state(
    adapter: Adapter, user: UserState, rank: int, buffers: RankBuffers | None = None
) -> CapturedState:
    """Capture the run state of this rank.

    The framework's state is the same on all ranks and names every parameter, so only rank 0 stores it, or the first
    rank of each pipeline stage: thousands of copies would be gigabytes. buffers: after :meth:`RankBuffers.compare`."""
    framework, rng = adapter.capture_run_state() if rank in adapter.leaders else None, capture_rng()
    modules = {name: part.state_dict() for name, part in extra_states(adapter.module, adapter.identity()).items()}
    attributes = {name: state for name, one in adapter.attributes().items() if (state := one.state_dict())}
    nonempty = {key: state for key, state in (("modules", modules), ("attributes", attributes)) if state}
    live = {"user": user.capture(), "objects": user.described(), **nonempty}
    differing, recorded = {} if buffers is None else buffers.captured(), user.recorded
    return CapturedState(
        {**live, **differing}, lambda: {"framework": framework and with_constructed(framework(), recorded), "rng": rng}
    )


class _Model(BaseModel):
    """A part of the run state. Keys that are not listed are not checked."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True, extra="allow")


_Number = bool | int | float | torch.Tensor
_Names = list[str] | tuple[str, ...]


class _Scalars(_Model):
    step: _Number | None = None


class _ParamGroup(_Model):
    params: _Names
    hyper: dict[str, Any]
    constructed: dict[str, Any] | None = None


class _LossScaler(_Model):
    kind: Annotated[str, Field(alias="class")]
    __pydantic_extra__: dict[str, _Number | None]


class _Framework(_Model):
    optimizer: str | None = None
    param_groups: list[_ParamGroup]
    scalars: dict[str, _Scalars]
    slots: dict[str, _Names] = {}
    counters: dict[str, int] | None = None
    loss_scaler: _LossScaler | None = None
    on_mesh: dict[str, _Names] = {}
    schedules: dict[str, dict[str, Any]] = {}
    stages: list[int] = []
    require_forward_param_sync: dict[str, bool] = {}


class _Generators(_Model):
    torch_state: Annotated[torch.Tensor, Field(alias="torch")]
    cuda: list[torch.Tensor]
    cuda_device: Annotated[int, Field(ge=0)] | None = None
    numpy: tuple[Any, ...] | list[Any] | dict[str, Any]
    python: tuple[Any, ...] | list[Any]


class _RunState(_Model):
    framework: _Framework
    rng: _Generators | None
    user: list[Any] | None
    objects: list[tuple[str | None, str] | list[str | None]] | None = None
    modules: dict[str, Any] | None = None
    attributes: dict[str, dict[str, Any]] = {}
    rank_buffers: list[str] = []
    buffers: dict[str, torch.Tensor] = {}
    home: str = ""
    rank_scalars: dict[str, _Scalars] = {}


@dataclass(frozen=True)
class RunState:
    """The stored run state of a rank, validated."""

    framework: Mapping[str, Any]
    rng: Mapping[str, Any] | None  # None in imported stores
    user: tuple[SavedObject, ...] | None  # likewise
    modules: Mapping[str, Any] = field(default_factory=dict)  # extra state by module
    rank_buffers: tuple[str, ...] = ()  # buffers in which ranks differed
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # this rank's own values of them
    home: str = ""  # of the rank that saved, see :class:`monitor.adapters.base.Adapter`
    rank_scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # this rank's own, by fqn
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of optimizers


def parse_run_state(tree: Any) -> RunState:
    """Return a run state as :func:`capture_run_state` returns it. Raise DamagedError if a type in it is wrong."""
    try:
        _RunState.model_validate(tree)
        user, described = tree["user"], tree.get("objects")
        known = [(None, None)] * len(user or ()) if described is None else described
        pairs = zip(known, user or (), strict=True)
        objects = None if user is None else tuple(SavedObject(name, kind, state) for (name, kind), state in pairs)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise DamagedError(f"the run state has a wrong value: {where}: {first['msg']}") from error
    except ValueError as error:
        raise DamagedError(f"the run state names {len(known)} objects and has the state of {len(user)}") from error
    modules, differing = tree.get("modules") or {}, tuple(tree.get("rank_buffers", ()))
    own = tree.get("buffers", {}), tree.get("home", ""), tree.get("rank_scalars", {}), tree.get("attributes", {})
    return RunState(tree["framework"], tree["rng"], objects, modules, differing, *own)


def to_tree(state: Any) -> tuple[Any, list[Leaf]]:
    """Copy plain data and tensors into a JSON tree and leaves."""
    return encode(state, tensor_leaf)


def begin_tree(state: CapturedState) -> Callable[[], tuple[Any, list[Leaf]]]:
    """Encode the live parts of a captured run state. Return a function that encodes the rest, once, in any thread."""
    encoder = Encoder(tensor_leaf)
    live = encoder.encode(dict(state.live))
    return lambda: ({**encoder.encode(dict(state.copies())), **live}, encoder.leaves)


def from_tree(tree: Any, leaves: Sequence[Leaf]) -> Any:
    """Return the data of :func:`to_tree`, with tensors in host memory."""
    return decode(tree, leaves, leaf_tensor)


def tensor_leaf(value: Any) -> Leaf | None:
    """Return a tensor, shape or dtype as a leaf; None for any other value, and for tensors of other classes."""
    if type(value) is torch.Size:
        return Leaf("I64", (len(value),), np.array(value, dtype="<i8").tobytes(), "size")
    if type(value) is torch.dtype:
        name = dtype_name(value).encode()
        return Leaf("U8", (len(name),), name, "dtype")
    # Other subclasses (DTensor, quantized tensors) would come back as plain tensors.
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided:
        return None
    like = " ".join(["parameter"] * (type(value) is nn.Parameter) + ["grad"] * value.requires_grad)
    order = () if value.is_contiguous() else memory_order(value) or ()
    return Leaf(dtype_name(value.dtype), tuple(value.shape), bits_of(value).tobytes(), like=like, order=order)


def leaf_tensor(leaf: Leaf) -> torch.Tensor | torch.Size | torch.dtype:
    """Return what :func:`tensor_leaf` stored, with tensors in host memory."""
    if leaf.kind == "dtype":
        return torch_dtype(bytes(leaf.data).decode())
    dtype, data = torch_dtype(leaf.dtype), bytearray(leaf.data)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    tensor = flat.reshape(leaf.shape)
    if leaf.kind == "size":
        return torch.Size(tensor.tolist())
    if leaf.order:
        tensor = tensor.permute(leaf.order).contiguous().permute([leaf.order.index(i) for i in range(tensor.ndim)])
    grad = "grad" in leaf.like
    return nn.Parameter(tensor, grad) if "parameter" in leaf.like else tensor.requires_grad_(grad)


def unrestored_state(saved: RunState, adapter: Adapter, generators: bool, modules: Set[str] = frozenset()) -> list[str]:
    """Describe the state of this rank that a resume from ``saved`` does not restore, so that it is not exact.

    modules: those with extra state on any rank."""
    notes: list[str] = []
    if generators and saved.rng is not None:
        notes += [note for note in cuda_generators(saved.rng)[1:] if note is not None]
    live = extra_states(adapter.module).keys()
    if new := sorted(live - saved.modules.keys()):
        notes.append(f"the store has no extra state of the modules {listed(new)}: they keep their initial state")
    if gone := sorted(saved.modules.keys() - live - modules):
        notes.append(f"the extra state of the modules {listed(gone)} is dropped: in this model they have none")
    if others := sorted(saved.attributes.keys() - adapter.attributes().keys()):
        notes.append(f"the attributes of {listed(others)} are dropped: this job has no such optimizer")
    return notes


class StateLoader:
    """Loads saved state into user objects and random generators, and can undo it. Construction changes nothing.

    generators: whether the saved random states belong to this rank. before: the framework's run state at present.
    Raises UsageError if the present state of an object cannot be captured."""

    def __init__(
        self, saved: RunState, adapter: Adapter, user: UserState, generators: bool, *, before: Mapping[str, Any]
    ) -> None:
        self.objects = [
            (f"the engine's {key} (a {type(item).__name__})", item, saved.framework[key])
            for key, item in adapter.objects().items()
            if saved.framework.get(key) is not None
        ]
        self.objects += [
            (f"module {name!r} (a {type(item.module).__name__})", item, saved.modules[name])
            for name, item in extra_states(adapter.module).items()
            if name in saved.modules
        ]
        own = [(f"attributes of {name}", one, saved.attributes.get(name)) for name, one in adapter.attributes().items()]
        self.objects += [(name, one, state or {}) for name, one, state in own if state or one.state_dict()]
        self.objects += [
            (user.label(index), user.objects[index], one.state)
            for index, one in enumerate([] if saved.user is None else user.match(saved.user))
            if one is not None
        ]
        self._rng = saved.rng if generators else None
        self._adapter = adapter
        self._before: list[Any] = [_copy_state(name, item) for name, item, _ in self.objects]
        self._framework_before = before
        self._rng_before = capture_rng()
        self._attempted = 0

    def load(self) -> None:
        """Load every object, then the generators. Raises UsageError if one rejects its state: call :meth:`undo`."""
        for name, item, state in self.objects:
            self._attempted += 1
            try:
                load_state(item, state)
            except Exception as error:
                raise UsageError(
                    f"{name} cannot load its saved state: {error!r}. Nothing was resumed. Pass the object that was "
                    "saved there, or remove it from both runs"
                ) from error
        if self._rng is None:
            return
        try:
            restore_rng(self._rng)
        except Exception as error:
            raise UsageError(
                f"the random generators of this process cannot load their saved state: {error!r}. Nothing was resumed. "
                "Use the versions of python, torch and numpy of the run that saved it"
            ) from error

    def undo(self) -> bool:
        """Restore all that :meth:`load` changed, including param groups and generators. Return whether that worked."""
        whole = True
        attempted = list(zip(self.objects, self._before, strict=True))[: self._attempted]
        for (name, item, _), state in reversed(attempted):
            try:
                load_state(item, state)
            except Exception as error:  # noqa: BLE001 - logged, so that the other objects are restored
                _log.error("%s cannot load its state from before the resume either: %r", name, error)
                whole = False
        try:
            self._adapter.load_run_state(self._framework_before)
            restore_rng(self._rng_before)
        except Exception as error:  # noqa: BLE001 - likewise
            _log.error("the optimizer's run state from before the resume cannot be loaded: %r", error)
            whole = False
        return whole


def _copy_state(name: str, item: Any) -> Any:
    try:
        return from_tree(*to_tree(state_of(item)))
    except Exception as error:
        raise UsageError(
            f"the state of {name} cannot be captured, so a refused resume could not restore it: {error!r}"
        ) from error
