"""FSDP2 (``fully_shard``), and any model of DTensors: each rank holds a run of rows of every parameter.

Hybrid sharding holds each run on several ranks, and what is no DTensor on all of them: those share out the writing.
The parameters are the sharded ones, which the optimizer steps and which are the masters under mixed precision; where
the last forward left gathered ones in their place, those are let go first, as ``state_dict()`` does it. Used from the
training thread only, on all ranks alike. It does not know tensor parallelism, and refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from monitor.adapters.base import Piece
from monitor.adapters.inventory import Inventory, whole, without_wrappers
from monitor.adapters.optimizer_state import slots_of
from monitor.adapters.plain import PlainAdapter
from monitor.adapters.replicas import Replica
from monitor.adapters.runs import Runs, local_of
from store.errors import UnsupportedError
from store.names import Fragment


class ShardedInventory(Inventory):
    """Names of sharded parameters, whichever form the last forward left registered."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, without_wrappers)

    def _parameters(self) -> dict[str, nn.Parameter]:
        self.reshard()
        return super()._parameters()

    def _aliases(self) -> dict[str, tuple[str, ...]]:
        self.reshard()
        return super()._aliases()

    def reshard(self) -> None:
        """Have the sharded parameters registered. No collective; the next forward gathers anew."""
        for part in self.still.once("parts", self._parts):
            part.reshard()

    def _parts(self) -> list[FSDPModule]:
        return [part for part in self._module.modules() if isinstance(part, FSDPModule)]

    def _refuse_sharded(self) -> None:
        """What cannot be handled of them is refused where they are looked at."""


class Fsdp2Adapter(PlainAdapter):
    """Adapter of a sharded module and its optimizer, over all ranks of the job."""

    framework = "fsdp2"

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, around: Sequence[Any] = ()) -> None:
        if not dist.is_initialized():
            raise UnsupportedError("the model is sharded and there is no process group: was it destroyed already?")
        _require_sharded_first(module, optimizer)
        self._runs = Runs()
        super().__init__(module, optimizer, around=around)

    def owned(self) -> list[Piece]:
        """This rank's runs, and its share of what other ranks hold alike."""
        self._refuse_state()
        return super().owned()

    def run_state(self) -> dict[str, Any]:
        """See :class:`monitor.adapters.base.Adapter`. ``on_mesh``: the scalars that are DTensors, by fqn."""
        on_mesh: dict[str, list[str]] = {}
        for fqn, parameter, _ in self._optimized():
            state = self.optimizer.state.get(parameter, {})
            slots = slots_of(state, parameter)
            found = sorted(key for key, value in state.items() if isinstance(value, DTensor) and key not in slots)
            if found:
                on_mesh[fqn] = found
        return {**super().run_state(), "on_mesh": on_mesh}

    def layout_facts(self) -> dict[str, Any]:
        """See :class:`monitor.adapters.base.Adapter`."""
        meshes = {
            tuple(parameter.device_mesh.shape)
            for parameter in self._inventory.parameters().values()
            if isinstance(parameter, DTensor)
        }
        return {**super().layout_facts(), "meshes": [list(mesh) for mesh in sorted(meshes)]}

    def _take_inventory(self, module: nn.Module) -> Inventory:
        return ShardedInventory(module)

    def _replica(self, fqn: str, slot: str, tensor: torch.Tensor) -> Replica:
        if not isinstance(tensor, DTensor):
            return super()._replica(fqn, slot, tensor)
        run, local = self._runs.of(tensor, f"{fqn} ({slot})")
        here = whole(fqn, slot, local)
        return Replica(Piece(Fragment(fqn, slot, run.start, run.numel), here.tensor), run.number, run.count)

    def _scalar(self, key: str, value: Any, fqn: str) -> Any:
        return local_of(value, f"{fqn} ({key})") if isinstance(value, DTensor) else value

    def _scalars_to_be(
        self, fqn: str, parameter: nn.Parameter, group: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Beside a DTensor, state of a shape of its own is one, too, on every rank whole."""
        found = super()._scalars_to_be(fqn, parameter, group, saved)
        if not isinstance(parameter, DTensor):
            return found
        on_mesh = saved.get("on_mesh", {}).get(fqn, ())
        return {
            key: _replicated(value, parameter) if key in on_mesh or _has_a_shape(value) else value
            for key, value in found.items()
        }

    def _refuse_state(self) -> None:
        """UnsupportedError for optimizer state of which this rank has a part that cannot be told."""
        for fqn, parameter, _ in self._optimized():
            if not isinstance(parameter, DTensor):
                continue
            state = self.optimizer.state.get(parameter, {})
            slots = slots_of(state, parameter)
            for key, value in state.items():
                lies = self._how_it_lies(f"{fqn} ({key})", value, slot=key in slots)
                if lies is not None:
                    raise UnsupportedError(
                        f"{type(self.optimizer).__name__} keeps {key!r} of {fqn}, of shape {tuple(value.shape)}, "
                        f"{lies}: which part of the whole that is, is not known; use an optimizer with state per "
                        "element, such as AdamW"
                    )

    def _how_it_lies(self, what: str, value: Any, *, slot: bool) -> str | None:
        """What is wrong with a value in the state of a sharded parameter, if anything is."""
        if not isinstance(value, DTensor):
            return "as a plain tensor beside a sharded parameter" if _has_a_shape(value) else None
        if slot:
            return None  # looked at as a piece
        run, _ = self._runs.of(value, what)
        return None if run.numel == value.numel() else "cut up over the ranks"


def _has_a_shape(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _replicated(value: Any, parameter: DTensor) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    mesh = parameter.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _require_sharded_first(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer made before ``fully_shard`` steps tensors that nobody uses any more."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    live = {id(parameter) for parameter in ShardedInventory(module).parameters().values()}
    if held and not any(id(parameter) in live for parameter in held):
        raise UnsupportedError(
            f"no parameter of {type(optimizer).__name__} is one of the model's: make the optimizer after fully_shard, "
            "which replaces the parameters"
        )
