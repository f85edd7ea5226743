"""Parameters and buffers by name; dtype names.

The dtypes of torch by the names that safetensors gives them (``F32``, ``BF16``, ...).

A pure table, in both directions. It does not know which dtypes an encoding can handle.

What a module holds, by name: parameters (tied ones once) and persistent buffers.

It knows nothing of optimizers, shards or slots. Buffers and parameters are looked up when asked, once in a period of
:class:`monitor.adapters.base.StepCache`: a framework may have put other memory behind a name since the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from monitor.adapters.base import Piece, StepCache, TensorInfo
from store.errors import UnsupportedError
from store.names import Fragment

_TORCH_OF: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAME_OF: dict[torch.dtype, str] = {dtype: name for name, dtype in _TORCH_OF.items()}


def dtype_name(dtype: torch.dtype, what: str = "a tensor") -> str:
    """The safetensors name of a torch dtype. Raises UnsupportedError, saying ``what`` is of it, for one that
    safetensors cannot hold."""
    name = _NAME_OF.get(dtype)
    if name is None:
        raise UnsupportedError(f"{what} is of {dtype}, which cannot be saved; supported: {', '.join(_TORCH_OF)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`. Raises UnsupportedError for an unknown name."""
    dtype = _TORCH_OF.get(name)
    if dtype is None:
        raise UnsupportedError(f"unknown dtype {name!r} in a store; supported: {', '.join(_TORCH_OF)}")
    return dtype


class ParameterNames:
    """The fqn of each parameter of a module, as of one moment."""

    def __init__(self, by_id: Mapping[int, str]) -> None:
        self._by_id = by_id

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._by_id

    def of(self, parameter: torch.Tensor, holder: str) -> str:
        """The fqn of a parameter that ``holder`` holds. Raises UnsupportedError for one that is not in the model."""
        name = self._by_id.get(id(parameter))
        if name is None:
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            raise UnsupportedError(
                f"{holder} holds a parameter of shape {shape} that is not in the model, so it would not be saved; put "
                "it into the model before monitor.attach (and before the optimizer is made), or take it out"
            )
        return name


_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""Module names that activation checkpointing and torch.compile insert."""


def as_written(name: str) -> str:
    """A name as the module tree has it."""
    return name


def without_wrappers(name: str) -> str:
    """A name as the model has it without the wrappers that may be inside of it, whether they are there or not."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class ModuleTensors:
    """ParameterNames of a module's parameters and persistent buffers.

    The canonical name of a tied tensor is the first in the module's own order; the others are aliases.
    naming: what becomes of a name in the module tree.
    """

    def __init__(self, module: nn.Module, naming: Callable[[str], str] = as_written) -> None:
        self._module = module
        self.cache = StepCache()
        self._naming = naming
        self._refuse_unhandled()

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Every parameter by canonical fqn, in model order."""
        return self.cache.get("parameters", self._parameters)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {self._naming(name): parameter for name, parameter in self._module.named_parameters()}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Every persistent buffer by canonical fqn, in model order."""
        return self.cache.get("buffers", self._buffers)

    def _buffers(self) -> dict[str, torch.Tensor]:
        found: dict[int, str] = {}
        out: dict[str, torch.Tensor] = {}
        for name, buffer in self._persistent_buffers():
            if id(buffer) not in found:
                found[id(buffer)] = name
                out[name] = buffer
        return out

    def names(self) -> ParameterNames:
        """Canonical fqn of each parameter."""
        return self.cache.get(
            "names", lambda: ParameterNames({id(parameter): name for name, parameter in self.parameters().items()})
        )

    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """Further names of tied tensors, by canonical fqn. Tensors with one name only are absent."""
        return self.cache.get("aliases", self._aliases)

    def _aliases(self) -> dict[str, tuple[str, ...]]:
        every: list[tuple[str, torch.Tensor]] = [
            (self._naming(name), parameter) for name, parameter in self._module.named_parameters(remove_duplicate=False)
        ]
        every += self._persistent_buffers()
        first: dict[int, str] = {}
        out: dict[str, tuple[str, ...]] = {}
        for name, tensor in every:
            canonical = first.setdefault(id(tensor), name)
            if canonical != name:
                out[canonical] = (*out.get(canonical, ()), name)
        return out

    def infos(self, trainable: frozenset[str]) -> dict[str, TensorInfo]:
        """Every tensor by fqn, parameters first. ``trainable``: the fqns that an optimizer moves."""
        aliases = self.aliases()
        out: dict[str, TensorInfo] = {}
        for name, parameter in self.parameters().items():
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            kind = "trainable" if parameter.requires_grad or name in trainable else "frozen"
            out[name] = TensorInfo(shape, dtype_name(parameter.dtype, name), kind, aliases.get(name, ()))
        for name, buffer in self.buffers().items():
            dtype = dtype_name(buffer.dtype, name)
            out[name] = TensorInfo(tuple(buffer.shape), dtype, "buffer", aliases.get(name, ()))
        return out

    def state_dict_names(self) -> list[str]:
        """Keys of ``module.state_dict()`` that name parameters and buffers, aliases included, in order."""
        return [self._naming(name) for name in _in_state_dict_order(self._module, "")]

    def _persistent_buffers(self) -> list[tuple[str, torch.Tensor]]:
        out: list[tuple[str, torch.Tensor]] = []
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    out.append((self._naming(f"{prefix}.{name}" if prefix else name), buffer))
        return out

    def _refuse_unhandled(self) -> None:
        from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

        for name, tensor in [*self._module.named_parameters(), *self._module.named_buffers()]:
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                raise UnsupportedError(
                    f"{name} has no shape yet: run a batch through the model (and make the optimizer) before "
                    "monitor.attach"
                )
        self._refuse_sharded()

    def _refuse_sharded(self) -> None:
        from torch.distributed.tensor import DTensor

        for name, parameter in self._module.named_parameters():
            if isinstance(parameter, DTensor) or isinstance(parameter.data, DTensor):
                raise UnsupportedError(
                    f"parameter {name} is a DTensor (FSDP2 or tensor parallelism) inside of DeepSpeed or "
                    "DistributedDataParallel, which is not handled; use one of them alone"
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
    """UnsupportedError for a tensor on the meta device: what is loaded into it would be lost without a word."""
    if tensor.is_meta:
        raise UnsupportedError(
            f"{what} is on the meta device and has no values yet: call model.to_empty(device=...) and initialise it "
            "before monitor.attach"
        )


def whole_piece(fqn: str, slot: str, tensor: torch.Tensor) -> Piece:
    """A piece that spans all of ``tensor``, as a view. UnsupportedError when it is not contiguous, or on meta."""
    require_materialized(tensor, f"{fqn} ({slot})")
    if not tensor.is_contiguous():
        raise UnsupportedError(
            f"{fqn} ({slot}) is not contiguous in memory (shape {tuple(tensor.shape)}, stride {tensor.stride()}); "
            "make it contiguous before training, e.g. parameter.data = parameter.data.contiguous()"
        )
    return Piece(Fragment(fqn, slot, 0, tensor.numel()), tensor.detach().view(-1))


def slice_piece(piece: Piece, start: int, numel: int) -> Piece:
    """Elements [start, start + numel) of a piece, counted from its own beginning."""
    fragment = piece.fragment
    return Piece(
        Fragment(fragment.fqn, fragment.slot, fragment.start + start, numel), piece.tensor.narrow(0, start, numel)
    )
