"""List the parameters and persistent buffers of a module by name, its extra state, and buffers that differ by rank.

Maps dtypes to safetensors' names, and partitions tensors that several ranks hold, so that each rank saves a part.

Tensors are looked up anew unless the :class:`monitor.adapters.identity.StepCache` is enabled, since a framework may put
other memory behind a name."""

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from monitor.adapters.base import Adapter, LiveValue, Piece, TensorInfo
from monitor.adapters.frozen import fingerprint
from monitor.adapters.identity import PLAIN_TENSORS, Identity, StepCache, has_usual_tree, modules_of
from monitor.distributed import Group
from store.encoding.base import DTYPES
from store.errors import UnstorableError, UnsupportedError
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment
from store.schema import digest

_TORCH_OF: dict[str, torch.dtype] = {name: getattr(torch, in_torch) for name, (in_torch, _) in DTYPES.items()}
_NAME_OF: dict[torch.dtype, str] = {dtype: name for name, dtype in _TORCH_OF.items()}


def dtype_name(dtype: torch.dtype, tensor: str = "a tensor") -> str:
    """Return the safetensors name of a torch dtype. Raise UnsupportedError, naming ``tensor``, if there is none."""
    if (name := _NAME_OF.get(dtype)) is None:
        raise UnsupportedError(f"{tensor} has dtype {dtype}, which cannot be saved; supported: {', '.join(_TORCH_OF)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors name. Raise UnsupportedError for an unknown name."""
    if (dtype := _TORCH_OF.get(name)) is None:
        raise UnsupportedError(f"unknown dtype {name!r} in a store; supported: {', '.join(_TORCH_OF)}")
    return dtype


def special_kind(tensor: torch.Tensor) -> str | None:
    """Return the subclass or layout of a tensor, or None if it is plain: its elements are all there is to it.

    A subclass may keep scales, indices or a dtype of its own, which its elements do not tell."""
    if type(tensor) not in PLAIN_TENSORS:
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    return None if tensor.layout is torch.strided else f"a tensor of layout {tensor.layout}"


def unstorable(name: str, kind: str, advice: str = "train with plain tensors") -> UnstorableError:
    """Return the error for a tensor of a :func:`special_kind`."""
    return UnstorableError(
        f"{name} is {kind}, not a plain tensor: a store holds elements, so it would come back as something else; "
        f"{advice}"
    )


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions as they lie in memory, outermost first; None where elements overlap or have gaps."""
    order = sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True)
    return tuple(order) if tensor.permute(order).is_contiguous() else None


class ParameterNames:
    """The fqn of each parameter of a module at one time."""

    def __init__(self, by_id: Mapping[int, str]) -> None:
        self._by_id = by_id

    def of(self, parameter: torch.Tensor, holder: str) -> str:
        """Return the fqn of a parameter that ``holder`` holds. Raise UnsupportedError if it is not in the model."""
        if (name := self._by_id.get(id(parameter))) is None:
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            raise UnsupportedError(
                f"{holder} holds a parameter of shape {shape} that is not in the model, so it would not be saved; add "
                "it to the model before creating the optimizer and calling monitor.attach, or remove it"
            )
        return name


_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""Module names that activation checkpointing and torch.compile insert."""


def without_wrappers(name: str) -> str:
    """Return a name without the parts that wrappers inside the model insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class ModuleTensors:
    """Names of a module's parameters and persistent buffers.

    The canonical name of a tied tensor is the first in the module's own order; the others are aliases.
    ``naming`` maps a name in the module tree to the fqn. ``known``: subclasses of tensors that the adapter can save.
    ``before`` is called before each lookup of the parameters."""

    def __init__(
        self,
        module: nn.Module,
        naming: Callable[[str], str] = str,
        *,
        known: frozenset[type] = frozenset(),
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._module, self._known, self.before = module, known, before
        self.cache = StepCache()
        self._naming = naming
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                raise UnsupportedError(
                    f"{name} has no shape yet: run a batch through the model (and create the optimizer) before "
                    "monitor.attach"
                )
        if not known:
            self._check_sharding()

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return every parameter by canonical fqn, in model order."""
        return self.cache.get("parameters", self._parameters)

    def _parameters(self) -> dict[str, nn.Parameter]:
        self.before()
        return {self._naming(name): parameter for name, parameter in self._module.named_parameters()}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return every persistent buffer by canonical fqn, in model order."""
        return self.cache.get("buffers", self._buffers)

    def _buffers(self) -> dict[str, torch.Tensor]:
        first: dict[int, tuple[str, torch.Tensor]] = {}
        for name, buffer in self._persistent_buffers():
            first.setdefault(id(buffer), (name, buffer))
        return dict(first.values())

    def names(self) -> ParameterNames:
        """Return the canonical fqn of each parameter."""
        return self.cache.get("names", lambda: ParameterNames({id(one): fqn for fqn, one in self.parameters().items()}))

    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """Return the other names of tied tensors, by canonical fqn. Tensors with one name are absent."""
        return self.cache.get("aliases", self._aliases)

    def _aliases(self) -> dict[str, tuple[str, ...]]:
        self.before()
        named: list[tuple[str, torch.Tensor]] = [
            (self._naming(name), parameter) for name, parameter in self._module.named_parameters(remove_duplicate=False)
        ]
        named += self._persistent_buffers()
        first: dict[int, str] = {}
        out: dict[str, tuple[str, ...]] = {}
        for name, tensor in named:
            if (canonical := first.setdefault(id(tensor), name)) != name:
                out[canonical] = (*out.get(canonical, ()), name)
        return out

    def infos(self, trainable: frozenset[str]) -> dict[str, TensorInfo]:
        """Return every tensor by fqn, parameters first. ``trainable``: the fqns that an optimizer updates."""
        parameters, aliases, out = self.parameters(), self.aliases(), dict[str, TensorInfo]()
        for name, tensor in [*parameters.items(), *self.buffers().items()]:
            shape, dtype = tuple(getattr(tensor, "ds_shape", tensor.shape)), getattr(tensor, "ds_tensor", tensor).dtype
            special = None if type(tensor) in self._known else special_kind(tensor)
            kind = "trainable" if tensor.requires_grad or name in trainable else "frozen"
            kind = kind if name in parameters else "buffer"
            out[name] = TensorInfo(shape, dtype_name(dtype, name), kind, aliases.get(name, ()), special)
        return out

    def state_dict_names(self) -> list[str]:
        """Return the keys of ``module.state_dict()`` for parameters and buffers, aliases included, in order."""
        return [self._naming(name) for name in _in_state_dict_order(self._module, "")]

    def live_values(self) -> Iterator[LiveValue]:
        """Return the values of ``module.state_dict()``; extra state is that of a module in the run state."""
        canonical = {alias: fqn for fqn, names in self.aliases().items() for alias in names}
        first = {id(module): self._naming(path) for path, module in self._module.named_modules()}
        modules = self._module.named_modules(remove_duplicate=False)
        shared = {self._naming(path): first[id(module)] for path, module in modules}
        for key, value in self._module.state_dict().items():
            name = self._naming(key)
            module, _, last = name.rpartition(".")
            stored = ("modules", shared.get(module, module)) if last == "_extra_state" else None
            yield LiveValue(f"model.state_dict()[{key!r}]", value, canonical.get(name, name), stored)

    def _persistent_buffers(self) -> list[tuple[str, torch.Tensor]]:
        out: list[tuple[str, torch.Tensor]] = []
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    out.append((self._naming(f"{prefix}.{name}" if prefix else name), buffer))
        return out

    def _check_sharding(self) -> None:
        from torch.distributed.tensor import DTensor

        for name, parameter in self._module.named_parameters():
            if isinstance(parameter, DTensor) or isinstance(parameter.data, DTensor):
                raise UnsupportedError(
                    f"parameter {name} is a DTensor (FSDP2 or tensor parallelism) inside DeepSpeed or "
                    "DistributedDataParallel, which is not supported; use one of them alone"
                )


def _in_state_dict_order(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name
    for name, child in module._modules.items():
        if child is not None:
            yield from _in_state_dict_order(child, f"{prefix}{name}.")


def require_materialized(tensor: torch.Tensor, what: str) -> None:
    """Raise UnsupportedError for a tensor on the meta device: a load into it would be lost silently."""
    if tensor.is_meta:
        raise UnsupportedError(
            f"{what} is on the meta device and has no values yet: call model.to_empty(device=...) and initialize it "
            "before monitor.attach"
        )


def whole_piece(fqn: str, slot: str, tensor: torch.Tensor, *, strided: bool = False) -> Piece:
    """Return the whole of ``tensor`` as a piece: a view. strided: copy it if it is dense, but not contiguous.

    Raises UnsupportedError if it is on the meta device or not contiguous, UnstorableError if of a :func:`special_kind`.
    Of a frozen parameter, which ``frozen: skip`` may leave out, only what ``detach()`` returns must be plain."""
    if tensor.is_meta:
        require_materialized(tensor, f"{fqn} ({slot})")
    if (kind := special_kind(tensor.detach() if slot == FROZEN else tensor)) is not None:
        raise unstorable(fqn, kind)
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(
            f"{fqn} ({slot}) is a lazily conjugated or negated view, whose memory holds other values: call "
            "resolve_conj() and resolve_neg() on it before training"
        )
    if strided and not tensor.is_contiguous() and memory_order(tensor) is not None:
        copied = tensor.detach().contiguous().view(-1)
        return Piece(Fragment(fqn, slot, 0, copied.numel()), copied, tensor)
    if not tensor.is_contiguous():
        raise UnsupportedError(
            f"{fqn} ({slot}) is not contiguous in memory (shape {tuple(tensor.shape)}, stride {tensor.stride()}); "
            "make it contiguous before training, e.g. parameter.data = parameter.data.contiguous()"
        )
    flat = tensor.detach()
    return Piece(Fragment(fqn, slot, 0, flat.numel()), flat if flat.ndim == 1 else flat.view(-1))


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor's values on the host; a lazily conjugated or negated one is resolved."""
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return host.as_strided((host.numel(),), (1,)).view(torch.uint8).numpy()  # one element may have any stride


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous 1-d host tensor of at least one element, without a copy."""
    return tensor.view(torch.uint8).numpy().data.cast("B")


def slice_piece(piece: Piece, start: int, numel: int) -> list[Piece]:
    """Return elements [start, start + numel) of a piece, counted from its beginning: one piece, or several of a box."""
    if numel == piece.fragment.numel:
        return [piece]
    fragments = piece.fragment.part(start, numel)
    starts = accumulate((fragment.numel for fragment in fragments), initial=start)
    return [Piece(one, piece.tensor.narrow(0, at, one.numel)) for one, at in zip(fragments, starts, strict=False)]


@dataclass(frozen=True)
class ExtraState:
    """The extra state of a module, loaded like that of an object."""

    module: nn.Module

    def state_dict(self) -> Any:
        return self.module.get_extra_state()

    def load_state_dict(self, state: Any) -> None:
        self.module.set_extra_state(state)


def extra_states(module: nn.Module, identity: Identity | None = None) -> dict[str, ExtraState]:
    """Return the modules with extra state, by name. Raise UnsupportedError for one that cannot take it back."""
    found: dict[str, ExtraState] = {}
    kinds: set[type[nn.Module]] = set(map(type, modules_of(module)) if identity is None else identity.layout[0])
    if has_usual_tree(module, kinds) and all(kind.get_extra_state is nn.Module.get_extra_state for kind in kinds):
        return found
    for path, part in module.named_modules():
        name, kind = without_wrappers(path), type(part)
        if kind.get_extra_state is nn.Module.get_extra_state:
            continue
        if kind.set_extra_state is nn.Module.set_extra_state:
            raise UnsupportedError(
                f"module {name!r} (a {kind.__name__}) has get_extra_state() without set_extra_state(), so a resume "
                "could not restore its state: add set_extra_state()"
            )
        found[name] = ExtraState(part)
    return found


class RankBuffers:
    """Finds persistent buffers whose values differ between ranks, such as the statistics of unsynchronized BatchNorm.

    A save stores rank 0's buffers as the model's. Other ranks add those that differ, and numbers of optimizer state, to
    their run state. Buffers that every forward overwrites with rank 0's (DistributedDataParallel) are not compared."""

    def __init__(self, adapter: Adapter, group: Group) -> None:
        self._adapter, self._group = adapter, group
        self._differing: list[str] = []  # names in which any rank differs from the first
        self._own: list[str] = []  # those in which this rank does
        self._tensors: dict[str, torch.Tensor] = {}  # as noted
        self._scalars: Mapping[str, tuple[str, str, Any]] = {}
        self._hashes: dict[str, int] = {}
        self._error: Exception | None = None
        self.every_scalar = False  # whether ranks left out steps of the optimizer; the same on all ranks

    def note(self) -> int:
        """Note the buffers of this rank as they are now. Return a hash; an error is raised by :meth:`captured`."""
        self._differing, self._own, self._error = [], [], None
        self._tensors, self._scalars, self._hashes = {}, {}, {}
        if self._group.world_size == 1 or (self._adapter.buffers_follow_rank0 and len(self._adapter.leaders) == 1):
            return 0  # DistributedDataParallel does not broadcast buffers between pipeline stages
        try:
            infos = self._adapter.tensors().items()
            numels = {fqn: math.prod(info.shape) for fqn, info in infos if info.kind == "buffer"}
            held = self._adapter.held() if numels else ()
            self._tensors = {one.fqn: tensor for one, tensor, _ in held if one.numel == numels.get(one.fqn)}
            self._scalars = self._adapter.rank_scalars(self.every_scalar)
            self._hashes = _hashes({**self._tensors, **_numbers(self._scalars)})
        except Exception as error:  # noqa: BLE001 - raised by captured(): the other ranks are in the collective
            self._error = error
        return _hash_of(self._hashes)

    def scalar_hashes(self) -> dict[str, int]:
        """Return hashes of all numbers of optimizer state that may differ between ranks."""
        return _hashes(_numbers(self._adapter.rank_scalars(every=True)))

    def compare(self, noted: Collection[int] = ()) -> None:
        """Compare the buffers of all ranks. Collective. noted: what :meth:`note` returned on all ranks, if known."""
        if not noted:
            self.note()
        self._own, self._differing = compare_hashes(self._group, self._hashes, noted)

    def captured(self) -> dict[str, Any]:
        """Return the run state of the last comparison: names that differ anywhere, and this rank's own values."""
        if self._error is not None:
            raise self._error
        if not self._differing:
            return {}
        scalars: dict[str, dict[str, Any]] = {}
        for fqn, key, value in (self._scalars[name] for name in self._own if name in self._scalars):
            scalars.setdefault(fqn, {})[key] = value
        buffers = {name: self._tensors[name] for name in self._own if name in self._tensors}
        optional = {"home": self._adapter.home, "rank_scalars": scalars} if self._scalars else {}
        return {"rank_buffers": self._differing, "buffers": buffers, **optional}


def _numbers(scalars: Mapping[str, tuple[str, str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value).reshape(1) for name, (_, _, value) in scalars.items()}


def _hash_of(hashes: Mapping[str, int]) -> int:
    return int(digest(repr(sorted(hashes.items())).encode())[:15], 16)


def compare_hashes(group: Group, hashes: Mapping[str, int], noted: Collection[int] = ()) -> tuple[list[str], list[str]]:
    """Return (names whose hash differs here from the first rank's, names whose hash does on any rank).

    Collective. Ranks without a name do not count. noted: a hash of the ``hashes`` of each rank, if known."""
    if not noted:
        high, low = group.all_reduce_max([_hash_of(hashes), -_hash_of(hashes)])
        noted = (high, -low)
    if len(set(noted)) == 1:
        return [], []
    names = _hash_of(dict.fromkeys(hashes, 0))
    high, low = group.all_reduce_max([names, -names])
    first: dict[str, int] = {}
    for known in [group.broadcast(hashes)] if high == -low else reversed(group.all_gather(hashes)):  # pipeline stages
        first |= known
    expected = {name for name in first if f"{name.rpartition('/')[0]}/{WEIGHTS}" in hashes}  # slots of weights here
    differs = [name for name in first if hashes.get(name, 0 if name in expected else first[name]) != first[name]]
    anywhere = group.all_reduce_max([name in differs for name in first])
    return differs, [name for name, differing in zip(first, anywhere, strict=True) if differing]


def compare_shards(group: Group, hashes: Mapping[Fragment, int]) -> list[str]:
    """Return the tensors in which ranks that hold the same parts (replicas of a shard) differ. Collective."""
    digests = digest(repr(sorted(hashes)).encode()), digest(repr(sorted(hashes.items())).encode())
    values_of: dict[str, set[str]] = {}  # digest of the parts that a rank holds -> digests of their values
    for parts, values in group.all_gather(digests):
        values_of.setdefault(parts, set()).add(values)
    if max(map(len, values_of.values())) == 1:
        return []
    first: dict[Fragment, int] = {}
    gathered = group.all_gather(hashes if len(values_of[digests[0]]) > 1 else {})
    differing = {part for one in gathered for part, value in one.items() if first.setdefault(part, value) != value}
    return sorted({f"{part.fqn}/{part.slot}" for part in differing})


_HASHED_ON_HOST = 1 << 16  # bytes of the largest tensor that is copied to the host to be hashed


def _hashes(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return a hash of each tensor. Large ones are hashed on their device, small ones on the host after one copy."""
    small = {name: tensor for name, tensor in tensors.items() if tensor.nbytes <= _HASHED_ON_HOST}
    hashes = {name: fingerprint(tensor, 0) for name, tensor in tensors.items() if name not in small}
    for device in {tensor.device for tensor in small.values()}:
        here = {name: tensor.view(torch.uint8) for name, tensor in small.items() if tensor.device == device}
        parts = torch.split(torch.cat(list(here.values())).cpu(), [part.numel() for part in here.values()])
        for name, part in zip(here, parts, strict=True):
            hashes[name] = int(digest(part.numpy().data)[:15], 16)
    return hashes


SMALL = 16_384  # tensors with fewer elements are written by one rank: slices would cost more than they save


class Replica(NamedTuple):
    """A piece that ``copies`` ranks hold; this rank is number ``number`` of them."""

    piece: Piece
    number: int
    copies: int


def even_slice(numel: int, rank: int, world_size: int, row: int = 1) -> tuple[int, int]:
    """Return (start, numel) of a rank's part of ``numel`` elements, in slices of ceil(rows / world size) rows each.

    The last ranks may get fewer elements or none."""
    part = -(-numel // (world_size * row)) * row
    start = min(rank * part, numel)
    return start, min(part, numel - start)


def partition_replicated(pieces: Iterable[Piece], rank: int, world_size: int) -> list[Piece]:
    """Return the parts that this rank saves of pieces that all ranks hold."""
    return partition_replicas(Replica(piece, rank, world_size) for piece in pieces)


def partition_replicas(replicas: Iterable[Replica]) -> list[Piece]:
    """Return the parts of replicated pieces that this rank saves. Over the ranks they cover each piece exactly once.

    Computed without a collective. A small tensor's writer follows from its name alone, so state that an optimizer keeps
    only on ranks with elements to update does not change the writers of other tensors. Buffers are all saved by the
    first rank, whose buffers DistributedDataParallel broadcasts: where ranks disagree (running statistics that are not
    synchronized), the others keep theirs in their run state (:class:`monitor.adapters.module_tensors.RankBuffers`)."""
    out: list[Piece] = []
    for replica in replicas:
        fragment = replica.piece.fragment
        if fragment.slot == BUFFER:
            start, numel = (0, fragment.numel) if replica.number == 0 else (0, 0)
        elif fragment.numel < SMALL:
            writer = zlib.crc32(f"{fragment.fqn}/{fragment.slot}".encode()) % replica.copies
            start, numel = (0, fragment.numel) if replica.number == writer else (0, 0)
        else:
            start, numel = even_slice(fragment.numel, replica.number, replica.copies, _row(fragment, replica.copies))
        if numel:
            out += slice_piece(replica.piece, start, numel)
    return out


def _row(fragment: Fragment, copies: int) -> int:
    """Return the elements per row of a box, if there is a row for each copy; else 1. Whole rows are one fragment."""
    rows = 1 if fragment.box is None else fragment.box.sizes[0]
    return fragment.numel // rows if rows >= copies else 1
