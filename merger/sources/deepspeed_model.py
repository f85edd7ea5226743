"""Model states.

What a checkpoint of DeepSpeed seems to lack, by names alone: ``exclude_frozen_parameters`` leaves no list behind.

Pure. No name tells of a frozen parameter that every block lacks, or of one outside the blocks. Numbers that a list of
single modules leaves out may be modules without parameters, such as activations: both leave the same names.

Model states of DeepSpeed's checkpoints: names, shapes, buffers, frozen and tied parameters, and the run's state.

At ZeRO-1/2 the trained weights in it are casts of the masters, bit for bit, and are not read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from merger.checkpoint import RankState
from merger.io.blocks import Extent
from merger.layers import layers_of
from merger.sources.base import FileTensor, Nest, values
from merger.sources.certificates import NamedTensor
from merger.sources.deepspeed_files import RankFiles
from merger.sources.deepspeed_zero import Shape, own_slice, slice_numel
from merger.sources.torch_file import Kept, attributes
from store.errors import DamagedError, MergeError, UnsupportedError
from store.names import BUFFER, FROZEN
from store.text import counted, listed

_ADAPTER = "lora_"

OWN_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "skipped_steps", "global_steps", "global_samples", "dp_world_size",
    "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "driftpoint",
})  # fmt: skip
"""Top-level keys that are no client state. ``data_sampler`` and ``random_ltd`` travel with it where they are used."""

_EXTRA = "_extra_state"
"""Last part of the name that torch gives to what ``get_extra_state`` returns."""


def left_out(shapes: Mapping[str, Sequence[int]], dangling: Mapping[str, str]) -> tuple[str, ...]:
    """Parameters that are missing, or patterns of them, for messages.

    shapes: of all parameters and buffers that are there. dangling: of tied parameters that are not, by the further
    names that they are tied under. Found are these, numbers left out between the model's blocks, and what adapters
    adapt.
    """
    found = dict.fromkeys(dangling.values())
    found |= dict.fromkeys(_gaps(shapes))
    if shapes and all(_ADAPTER in name for name in shapes):
        found["all but the adapters"] = None
    return tuple(found)


def _gaps(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Blocks whose number is left out. Single modules count for blocks only where nothing larger is one."""
    numbers: dict[bool, dict[str, set[int]]] = {True: {}, False: {}}
    for layer in layers_of(shapes):
        parent, _, number = layer.name.rpartition(".")
        if layer.block and number.isdecimal():
            large = any("." in fqn[len(layer.name) + 1 :] for fqn in layer.fqns)
            numbers[large].setdefault(parent, set()).add(int(number))
    return [
        f"{parent}.{number}.*"
        for parent, there in (numbers[True] or numbers[False]).items()
        for number in range(max(there))
        if number not in there
    ]


class Model:
    """What the model states of a checkpoint say, beside the parameters that the optimizer holds (``trained``)."""

    def __init__(self, files: RankFiles, trained: Mapping[str, Shape]) -> None:
        self._files, self._trained = files, trained
        self._module = dict(files.model.at("module").items())
        shared = files.model.get("shared_params")
        ties = {} if shared is None else {alias: name.text() for alias, name in shared.items()}
        # A checkpoint without its frozen parameters still names what is tied to them.
        self._aliases = {alias: fqn for alias, fqn in ties.items() if fqn in self._module or fqn in trained}
        self._buffers = [name.text() for name in files.model.at("buffer_names").entries()]
        frozen = files.model.get("frozen_param_shapes")
        self._frozen = {} if frozen is None else {fqn: shape.naturals() for fqn, shape in frozen.items()}
        self.problems: list[str] = []
        self._unsaved = files.stage > 1 and frozen is None
        if self._unsaved and files.stage == 3:
            for alias in ties.keys() - self._aliases.keys():
                self._module.pop(alias, None)
        self._refuse_strange()
        self._tie_buffers()
        self._tie_parameters()
        self._left_out = self._missing({alias: fqn for alias, fqn in ties.items() if alias not in self._aliases})
        if self._left_out:
            seems = "was" if self._unsaved else "seems to have been (stage 1 does not say)"
            self.problems.insert(
                0,
                f"{files.folder} {seems} saved without its frozen parameters ({listed(self._left_out, 6)}); "
                "neither has this",
            )

    def tensors(self) -> dict[str, NamedTensor]:
        """Every parameter and buffer, tied ones once: parameters first, both in the module's order.

        MergeError for a parameter that is in no file.
        """
        others: dict[str, list[str]] = {}
        for alias, fqn in self._aliases.items():
            others.setdefault(fqn, []).append(alias)
        parameters: dict[str, NamedTensor] = {}
        buffers: dict[str, NamedTensor] = {}
        for fqn, nest in self._module.items():
            if fqn in self._aliases:
                continue
            kind = "buffer" if fqn in self._buffers else "trainable" if fqn in self._trained else "frozen"
            found = NamedTensor(self._shape(fqn, kind), nest.tensor().dtype, kind, tuple(others.get(fqn, ())))
            (buffers if kind == "buffer" else parameters)[fqn] = found
        for fqn in (*self._trained, *self._aliases.values(), *self._frozen):
            if fqn not in parameters and fqn not in buffers:
                raise UnsupportedError(
                    f"{self._files.model.where} names the parameter {fqn}, which its module does not have: the model's "
                    "state dict renames parameters, and that is not handled"
                )
        return {**parameters, **buffers}

    def extents(self, tensors: Mapping[str, NamedTensor]) -> list[Extent]:
        """Where buffers and frozen parameters lie."""
        out = []
        for fqn, tensor in tensors.items():
            if tensor.kind == "buffer" or (tensor.kind == "frozen" and self._files.stage != 3):
                slot = BUFFER if tensor.kind == "buffer" else FROZEN
                saved = self._module[fqn].tensor()
                out.append(saved.extent(fqn, slot, 0, saved.numel))
            elif tensor.kind == "frozen":
                out += self._slices(fqn, tensor.shape)
        return out

    def names(self) -> list[str]:
        """Keys of the module's state dict."""
        return list(self._module)

    def facts(self, tensors: Mapping[str, NamedTensor]) -> dict[str, Any]:
        """What a writer of these files needs to know about the model."""
        return {
            "state_dict_names": self.names(),
            "buffer_names": list(self._buffers),
            "frozen_left_out": list(self._left_out),
            "frozen": [fqn for fqn, tensor in tensors.items() if tensor.kind == "frozen"],
            "shared_params": {alias: fqn for alias, fqn in self._aliases.items() if tensors[fqn].kind != "buffer"},
        }

    def _shape(self, fqn: str, kind: str) -> tuple[int, ...]:
        saved = self._module[fqn].tensor()
        known = self._trained[fqn].shape if kind == "trainable" else self._frozen.get(fqn)
        if kind == "buffer" or (known is None and self._files.stage != 3):
            return saved.shape
        if known is None:
            raise MergeError(
                f"{self._module[fqn].where} is a parameter that no file holds: it takes gradients, but is in no param "
                "group, and ZeRO-3 saves no such parameter. Freeze it, or give it to the optimizer, and save again"
            )
        if self._files.stage != 3 and saved.shape != known:
            raise MergeError(
                f"{self._module[fqn].where} has the shape {saved.shape} in the module and {known} beside it"
            )
        return known

    def _slices(self, fqn: str, shape: tuple[int, ...]) -> list[Extent]:
        numel = 1
        for size in shape:
            numel *= size
        world_size, out = self._files.world_size, []
        for rank, model in enumerate(self._files.models):
            nest = model.at("frozen_param_fragments").at(fqn)
            if nest.tensor().shape != (slice_numel(numel, world_size),):
                raise UnsupportedError(
                    f"{nest.where} has {counted(nest.tensor().numel, 'element')}, which is no slice of {numel} over "
                    f"{counted(world_size, 'rank')}: it may be quantized, which is not handled"
                )
            start, stop = own_slice(numel, world_size, rank)
            if start < stop:
                out.append(nest.tensor().extent(fqn, FROZEN, start, stop))
        return out

    def _refuse_strange(self) -> None:
        for nest in self._module.values():
            if not isinstance(nest.value, FileTensor):
                raise UnsupportedError(f"{nest.where} is no tensor: extra state of a module is not handled")
        for fqn, nest in self._module.items():
            if fqn.rpartition(".")[2] == _EXTRA:
                raise UnsupportedError(
                    f"{nest.where} is extra state of a module, neither parameter nor buffer, and which rank or stage "
                    "it fits is not known: not handled. Save it elsewhere, in the client state for one, and override "
                    "get_extra_state to leave it out"
                )
        for fqn in self._buffers:
            if fqn not in self._module:
                raise DamagedError(f"{self._files.model.where} names a buffer {fqn}, which its module does not have")

    def _tie_buffers(self) -> None:
        kept: list[str] = []
        for fqn in self._buffers:
            tensor = self._module[fqn].tensor()
            same = [other for other in kept if tensor.same_place(self._module[other].tensor())]
            if same:
                self._aliases[fqn] = same[0]
            else:
                kept.append(fqn)
        for model in self._files.models[1:]:
            for fqn in kept:
                mine, theirs = self._module[fqn].tensor().block, model.at("module").at(fqn).tensor().block
                if mine.digest != theirs.digest:
                    self.problems.append(f"the buffer {fqn} differs between ranks; rank 0's is taken")

    def _missing(self, dangling: Mapping[str, str]) -> tuple[str, ...]:
        """Frozen parameters that were left out, for messages; none where it is known that all are there."""
        others = [fqn for fqn in self._parameters() if fqn not in self._trained and fqn not in self._aliases]
        kept = any(self._module[fqn].tensor().numel for fqn in others)
        if (self._files.stage > 1 and not self._unsaved) or (self._files.stage <= 1 and kept):
            return ()
        shapes = {fqn: nest.tensor().shape for fqn, nest in self._module.items()}
        known = {fqn: shape.shape for fqn, shape in self._trained.items()}
        return left_out({**shapes, **known}, dangling) or (("whichever there are",) if self._unsaved else ())

    def _parameters(self) -> list[str]:
        buffers = set(self._buffers)
        return [fqn for fqn in self._module if fqn not in buffers]

    def _tie_parameters(self) -> None:
        """Find modules that are used under two names: DeepSpeed lists tied parameters, but not those."""
        held = self._trained.keys() | self._frozen.keys()
        names = [fqn for fqn in self._parameters() if fqn not in self._aliases]
        homes: dict[tuple[object, ...], list[str]] = {}
        for fqn in sorted(names, key=lambda fqn: fqn not in held):  # those that are known by their name come first
            tensor = self._module[fqn].tensor()
            # At ZeRO-3 only empty tensors are left, but each parameter's has a record of its own.
            if tensor.numel or self._files.stage == 3:
                homes.setdefault(tensor.place(), []).append(fqn)
        for first, *others in homes.values():
            orphans = [fqn for fqn in others if fqn not in held]
            # Where several that are known lie in one place, the place does not tell whose an orphan is.
            if len(others) == len(orphans) and (first in held or self._files.stage != 3):
                self._aliases |= dict.fromkeys(orphans, first)
        if self._files.stage == 2 and not self._unsaved:
            for fqn in names:
                if fqn not in held and fqn not in self._aliases and self._module[fqn].tensor().numel:
                    self.problems.append(
                        f"{fqn} is neither trained, frozen nor a buffer; it is taken for a parameter that is in no "
                        "param group"
                    )


def engine_state(files: RankFiles) -> dict[str, Any]:
    """``counters``, ``loss_scaler`` and ``lr_scheduler`` of the engine, as the adapter gives them."""
    model, config = files.model, files.model.at("ds_config")
    steps, accumulation = model.at("global_steps").natural(), _accumulation(config, files.world_size)
    scheduler = model.get("lr_scheduler")
    return {
        "counters": {
            "global_steps": steps,
            "global_samples": model.at("global_samples").natural(),
            "micro_steps": steps * accumulation,  # not saved: whole windows, as DeepSpeed itself assumes
            "skipped_steps": model.at("skipped_steps").natural(),
            "gradient_accumulation_steps": accumulation,
        },
        "loss_scaler": loss_scaler(files),
        "lr_scheduler": None if scheduler is None else values(scheduler.mapping()),
    }


def loss_scaler(files: RankFiles) -> dict[str, Any] | None:
    """Attributes of the loss scaler, and its class."""
    found = files.optims[0].get("loss_scaler")
    if found is None:
        return None
    if not isinstance(found.value, Kept):
        raise DamagedError(f"{found.where} is a {type(found.value).__name__} and should be a loss scaler")
    plain = {key: value for key, value in attributes(found.value).items() if isinstance(value, bool | int | float)}
    return {"class": type(found.value).__name__, **plain}


def _accumulation(config: Nest, world_size: int) -> int:
    found = config.mapping()
    steps, batch = found.get("gradient_accumulation_steps"), found.get("train_batch_size")
    micro = found.get("train_micro_batch_size_per_gpu")
    if isinstance(steps, int) and steps > 0:
        return steps
    if isinstance(batch, int) and isinstance(micro, int) and batch > 0 and micro > 0:
        return max(1, batch // (micro * world_size))
    return 1


def client_state(files: RankFiles) -> dict[str, Any]:
    """What the user gave DeepSpeed to keep, rank 0's."""
    own = OWN_KEYS | {key for key in ("data_sampler", "random_ltd") if files.model.get(key) is None}
    return {key: values(value) for key, value in files.model.mapping().items() if key not in own}


def run_states(files: RankFiles) -> dict[int, RankState]:
    """What a merge put into the client state for every rank; empty in checkpoints that nobody prepared."""
    out = {}
    for model in files.models:
        ours = model.get("driftpoint")
        if ours is None:
            continue
        for rank, state in ours.at("ranks").mapping().items():
            nest = Nest(state, f"{ours.where}, {rank}")
            out[int(rank)] = RankState(values(nest.at("rng").value), values(nest.at("user").value))
    return dict(sorted(out.items()))
