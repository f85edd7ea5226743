"""Read DeepSpeed checkpoints at any ZeRO stage and world size, their model states first.

Files are read as ``engine.save_checkpoint`` wrote them; no DeepSpeed code runs, see :mod:`merger.sources.torch_file`.
The other files of a Trainer's ``checkpoint-N`` folder (configuration, tokenizer, trainer state) stay beside the state.
At ZeRO-1/2 the trained weights in the model states are casts of the masters, bit for bit, and are not read here. Frozen
parameters that ``exclude_frozen_parameters`` left out are detected by names alone: neither one that every block lacks
nor one outside the blocks is found, and gaps in a list of single modules may be modules without parameters."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from merger.checkpoint import Checkpoint, RankState, config_section, gradient_clipping
from merger.io.blocks import Damage, Extent
from merger.layers import group_layers
from merger.layouts.deepspeed_facts import ACCUMULATION, batch_of, slice_numel, slice_pieces
from merger.sources.base import FileTensor, Nest, checked_name, read_name, read_values
from merger.sources.certificates import NamedTensor, apply_merge_certificates, assemble_checkpoint
from merger.sources.deepspeed_files import WHOLE_MODEL, RankFiles, is_checkpoint, read_files, step_of
from merger.sources.deepspeed_zero import OptimizerContents, Shape, param_shapes, read_zero3, read_zero12
from merger.sources.torch_file import StandIn
from store.errors import DamagedError, MergeError, UnsupportedError
from store.names import BUFFER, FROZEN, group_by_key
from store.storage.local import LocalFiles
from store.text import counted, listed

_ADAPTER = "lora_"

OWN_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "skipped_steps", "global_steps", "global_samples", "dp_world_size",
    "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "driftpoint",
})  # fmt: skip
"""Top-level keys outside the client state, which includes ``data_sampler`` and ``random_ltd`` if they are used."""

_EXTRA = "_extra_state"  # last part of the name of a module's `get_extra_state` value


def _gaps(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return blocks whose number is missing. Single modules count as blocks only if nothing larger does."""
    numbers: dict[bool, dict[str, set[int]]] = {True: {}, False: {}}  # by whether blocks are larger than one module
    for layer in group_layers(shapes):
        parent, _, number = layer.name.rpartition(".")
        if layer.block and number.isdecimal():
            large = any("." in fqn[len(layer.name) + 1 :] for fqn in layer.fqns)
            numbers[large].setdefault(parent, set()).add(int(number))
    return [
        f"{parent}.{number}.*"
        for parent, present in (numbers[True] or numbers[False]).items()
        for number in range(max(present))
        if number not in present
    ]


class Model:
    """The contents of the model states, except the parameters that the optimizer holds (``trained``)."""

    def __init__(self, files: RankFiles, trained: Mapping[str, Shape]) -> None:
        self._files, self._trained = files, trained
        self._module = dict(files.model.at("module").items())
        shared = files.model.get("shared_params")
        ties = {} if shared is None else {alias: name.text() for alias, name in shared.items()}
        # A checkpoint without its frozen parameters still names the parameters tied to them.
        self._aliases = {alias: fqn for alias, fqn in ties.items() if fqn in self._module or fqn in trained}
        self._buffers = [name.text() for name in files.model.at("buffer_names").entries()]
        frozen = files.model.get("frozen_param_shapes")
        self._frozen = {} if frozen is None else {fqn: shape.naturals() for fqn, shape in frozen.items()}
        self.problems: list[str] = []
        self._unsaved = files.stage > 1 and frozen is None
        if self._unsaved and files.stage == 3:
            for alias in ties.keys() - self._aliases.keys():
                self._module.pop(alias, None)
        self._require_supported()
        if both := [fqn for fqn in self._frozen if fqn in trained]:
            self.problems.append(
                f"{files.model.where} lists {listed(both, 6)} in param_shapes and in frozen_param_shapes, so both as "
                "trained and as frozen; the optimizer's values are taken"
            )
        self._tie_buffers()
        self._tie_parameters()
        self._left_out = self._missing(fqn for alias, fqn in ties.items() if alias not in self._aliases)
        if self._left_out:
            seems = "was" if self._unsaved else "seems to have been (stage 1 does not say)"
            self.problems.insert(
                0,
                f"{files.folder} {seems} saved without its frozen parameters ({listed(self._left_out, 6)}); "
                "neither has this",
            )

    def tensors(self) -> dict[str, NamedTensor]:
        """Return parameters, then buffers, tied ones once, in the module's order. MergeError if one is in no file."""
        others = group_by_key((fqn, alias) for alias, fqn in self._aliases.items())
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
                    f"{self._files.model.where} names the parameter {fqn}, which its module lacks: a state dict that "
                    "renames parameters is not supported"
                )
        return {**parameters, **buffers}

    def extents(self, tensors: Mapping[str, NamedTensor]) -> list[Extent]:
        """Return where buffers and frozen parameters lie."""
        out = []
        for fqn, tensor in tensors.items():
            if tensor.kind == "buffer" or (tensor.kind == "frozen" and self._files.stage != 3):
                slot = BUFFER if tensor.kind == "buffer" else FROZEN
                saved = self._module[fqn].tensor()
                out.append(saved.extent(fqn, slot, 0, saved.numel))
            elif tensor.kind == "frozen":
                out += self._slices(fqn, tensor.shape)
        return out

    def facts(self, tensors: Mapping[str, NamedTensor]) -> dict[str, Any]:
        """Return the facts about the model that writers of these files need."""
        return {
            "state_dict_names": list(self._module),
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
                f"{self._module[fqn].where} requires gradients but is in no param group, and ZeRO-3 does not save such "
                "a parameter. Freeze it, or add it to the optimizer, and save again"
            )
        if self._files.stage != 3 and saved.shape != known:
            raise MergeError(
                f"{self._module[fqn].where} has the shape {saved.shape} in the module, but {known} elsewhere in the "
                "file"
            )
        return known

    def _slices(self, fqn: str, shape: tuple[int, ...]) -> list[Extent]:
        numel, world_size, out = math.prod(shape), self._files.world_size, []
        part = slice_numel(numel, world_size)
        for rank, model in enumerate(self._files.models):
            nest = model.at("frozen_param_fragments").at(fqn)
            if nest.tensor().shape != (part,):
                raise UnsupportedError(
                    f"{nest.where} has {counted(nest.tensor().numel, 'element')}, which is not a slice of {numel} over "
                    f"{counted(world_size, 'rank')}: quantized parameters are not supported"
                )
            pieces = slice_pieces([(fqn, numel, part)], rank)
            out += [nest.tensor().extent(fqn, FROZEN, at.start, at.stop) for at in pieces if at.start < at.stop]
        return out

    def _require_supported(self) -> None:
        for fqn, nest in self._module.items():
            if not isinstance(nest.value, FileTensor) or fqn.rpartition(".")[2] == _EXTRA:
                raise UnsupportedError(
                    f"{nest.where} is extra state of a module, which is not supported. Override get_extra_state to "
                    "leave it out, and save it in the client state"
                )
        for fqn in self._buffers:
            if fqn not in self._module:
                raise DamagedError(f"{self._files.model.where} names a buffer {fqn}, which its module lacks")

    def _tie_buffers(self) -> None:
        untied: list[str] = []
        for fqn in self._buffers:
            tensor = self._module[fqn].tensor()
            same = [name for name in untied if tensor.numel and tensor.place() == self._module[name].tensor().place()]
            if same:
                self._aliases[fqn] = same[0]
            else:
                untied.append(fqn)
        for model in self._files.models[1:]:
            for fqn in untied:
                own, theirs = self._module[fqn].tensor().block, model.at("module").at(fqn).tensor().block
                if own.digest != theirs.digest:
                    self.problems.append(f"the buffer {fqn} differs between ranks; rank 0's is taken")

    def _missing(self, dangling: Iterable[str]) -> tuple[str, ...]:
        """Return frozen parameters that were left out, or patterns of them; none if all are known to be there.

        Detects gaps in the numbers of the model's blocks, and the base model of adapters. ``dangling``: missing
        parameters that others are tied to."""
        others = [fqn for fqn in self._parameters() if fqn not in self._trained and fqn not in self._aliases]
        saved = any(self._module[fqn].tensor().numel for fqn in others)
        if (self._files.stage > 1 and not self._unsaved) or (self._files.stage <= 1 and saved):
            return ()
        shapes = {fqn: nest.tensor().shape for fqn, nest in self._module.items()}
        shapes |= {fqn: shape.shape for fqn, shape in self._trained.items()}
        found = dict.fromkeys((*dangling, *_gaps(shapes)))
        if shapes and all(_ADAPTER in name for name in shapes):
            found["all but the adapters"] = None
        return tuple(found) or (("whichever there are",) if self._unsaved else ())

    def _parameters(self) -> list[str]:
        buffers = set(self._buffers)
        return [fqn for fqn in self._module if fqn not in buffers]

    def _tie_parameters(self) -> None:
        """Find modules used under two names, which DeepSpeed does not list as tied parameters."""
        held = self._trained.keys() | self._frozen.keys()
        names = [fqn for fqn in self._parameters() if fqn not in self._aliases]
        homes: dict[tuple[object, ...], list[str]] = {}
        for fqn in sorted(names, key=lambda fqn: fqn not in held):  # known names come first
            tensor = self._module[fqn].tensor()
            # At ZeRO-3 only empty tensors are left, but each parameter has its own record.
            if tensor.numel or self._files.stage == 3:
                homes.setdefault(tensor.place(), []).append(fqn)
        for first, *others in homes.values():
            orphans = [fqn for fqn in others if fqn not in held]
            # If several known parameters share a place, the orphan's owner is ambiguous.
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
    """Return ``counters``, ``loss_scaler`` and ``lr_scheduler`` of the engine, in the adapter's form."""
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
        "lr_scheduler": None if scheduler is None else read_values(scheduler.mapping()),
    }


def loss_scaler(files: RankFiles) -> dict[str, Any] | None:
    """Return the attributes of the loss scaler, and its class."""
    if (found := files.optims[0].get("loss_scaler")) is None:
        return None
    if not isinstance(found.value, StandIn):
        raise DamagedError(f"{found.where} is a {type(found.value).__name__}, but must be a loss scaler")
    plain = {key: value for key, value in vars(found.value).items() if isinstance(value, bool | int | float)}
    return {"class": type(found.value).__name__, **plain}


def _accumulation(config: Nest, world_size: int) -> int:
    settings = config.mapping()
    given = settings.get(ACCUMULATION)
    if isinstance(given, int) and given > 0:
        return given
    batch = batch_of({**settings, ACCUMULATION: None}, world_size)
    return 1 if batch is None else batch.accumulation


def run_states(files: RankFiles) -> dict[int, RankState]:
    """Return the run state that a merge put into the client state of every rank; else empty."""
    out = {}
    for model in files.models:
        if (ours := model.get("driftpoint")) is None:
            continue
        for rank, state in ours.at("ranks").mapping().items():
            nest = Nest(state, f"{ours.where}, {rank}")
            user, named = read_values(nest.at("user").value), nest.get("state")
            names = [] if named is None else [*named.mapping()]
            objects = [[name, None] for name in names] if names and len(names) == len(user) else None
            out[int(rank)] = RankState(read_values(nest.at("rng").value), user, objects=objects)
    return dict(sorted(out.items()))


def build_checkpoint(
    files: RankFiles, shapes: Sequence[Sequence[Shape]], optimized: OptimizerContents, beside: Path | None
) -> Checkpoint:
    """Build the checkpoint of ordinary or universal DeepSpeed files.

    ``shapes``: parameters that the optimizer holds, by group. ``beside``: directory with the files beside the state.
    Raises MergeError for incomplete or contradictory files, UnsupportedError."""
    if files.model.at("mp_world_size").natural() != 1:
        raise UnsupportedError(f"{files.folder} uses tensor or pipeline parallelism, which is not supported")
    if files.model.mapping().get("num_experts"):
        raise UnsupportedError(f"{files.folder} is of a model with experts (MoE), which is not supported")
    model = Model(files, {shape.fqn: shape for group in shapes for shape in group})
    named = model.tensors()
    optimized.extents += model.extents(named)
    optimized.problems += model.problems
    trained = bool(files.model.at("ds_config").mapping())  # by an engine; a merge of another run writes none
    engine = engine_state(files) if trained else {"counters": {}, "loss_scaler": None, "lr_scheduler": None}
    engine_keys = OWN_KEYS | {key for key in ("data_sampler", "random_ltd") if files.model.get(key) is None}
    return assemble_checkpoint(
        files.folder,
        files.model.at("global_steps").natural(),
        named,
        optimized,
        framework="deepspeed" if trained else "torch",
        framework_state={"optimizer": _optimizer(files), **engine},
        facts={**(_engine_facts(files) | optimized.facts if trained else {}), **model.facts(named)},
        run_states=run_states(files),
        files=beside,
        client_state={key: read_values(v) for key, v in files.model.mapping().items() if key not in engine_keys},
    )


def _optimizer(files: RankFiles) -> str:
    """Return the base optimizer's name from the configuration; the files do not have it."""
    kind = config_section(files.model.at("ds_config").value, "optimizer").get("type")
    return "unknown" if kind is None else str(kind)


def _engine_facts(files: RankFiles) -> dict[str, Any]:
    first, config = files.optims[0].mapping(), files.model.at("ds_config")
    fp16 = bool(config_section(config.value, "fp16").get("enabled"))
    return {
        "ds_version": files.model.at("ds_version").text(),
        "zero_stage": files.stage,
        "world_size": files.world_size,
        "dtype": "bf16" if files.bf16 else "fp16" if fp16 else "fp32",
        "ds_config": config.value,
        "optimizer": _optimizer(files),
        "dynamic_loss_scale": bool(first.get("dynamic_loss_scale", False)),
        "clip_grad": float(first["clip_grad"]) if "clip_grad" in first else gradient_clipping(config.value),
    }


class DeepSpeedSource:
    """A directory of checkpoints, or one checkpoint. ``files``: directory with the files beside the state, or None."""

    kind = "deepspeed"
    latest = "latest"  # file that names the newest one
    is_one = staticmethod(is_checkpoint)  # whether a directory is a checkpoint

    def __init__(self, root: Path, files: Path | None = None) -> None:
        self.root, self._files = root.absolute(), files

    def steps(self) -> tuple[int, ...]:
        """Return the steps that tags name, newest first."""
        tags = [self.root.name] if self.is_one(self.root) else self._tags()
        return tuple(sorted({step for step in map(step_of, tags) if step is not None}, reverse=True))

    def checkpoint(self, step: int | str | None, _: Set[Damage] = frozenset()) -> Checkpoint:
        files, optimized = self._read(self._folder(step))
        built = build_checkpoint(files, param_shapes(files.model), optimized, self._files)
        return self._verified(apply_merge_certificates(built, files), step)

    def _read(self, folder: Path) -> tuple[RankFiles, OptimizerContents]:
        files = read_files(folder)
        return files, read_zero3(files) if files.stage == 3 else read_zero12(files)

    def _tags(self) -> list[str]:
        paths = (self.root / name for name in LocalFiles(self.root).list_dir(""))
        return [path.name for path in paths if not path.is_symlink() and self.is_one(path)]

    def _folder(self, step: int | str | None) -> Path:
        """Return the directory of the checkpoint at a step or tag, or of the newest for None.

        Raises MergeError, naming the existing ones, if it does not exist or leads elsewhere."""
        if self.is_one(self.root):
            if step is not None and not _means(step, self.root.name):
                raise MergeError(f"{self.root} is one checkpoint, and not {step}; name its parent directory")
            return self.root
        tag = read_name(self.root, self.latest) if step is None else str(step)
        if tag is None:
            raise MergeError(f"{self.root} has no file {self.latest!r}: name one of its checkpoints, {self._names()}")
        if step is not None:
            tag = next((one for one in self._tags() if _means(step, one)), tag)
        name = checked_name(tag, "the requested tag")
        folder = self.root / name
        if folder.is_symlink() or not self.is_one(folder):
            by = f", which {self.latest} names" if step is None else ""
            raise MergeError(f"{self.root} has no checkpoint {name}{by}{_why_none(folder)}; there are: {self._names()}")
        return folder

    def _verified(self, checkpoint: Checkpoint, step: int | str | None) -> Checkpoint:
        """Return the checkpoint of ``step`` if its own step counter agrees with its directory's name.

        Raises MergeError if not; adds a problem if the directory itself was named, so no step was requested."""
        step_in_name = step_of(checkpoint.certificate.save)
        if step_in_name in (None, checkpoint.step):
            return checkpoint
        line = f"{checkpoint.origin} is called after step {step_in_name} and holds step {checkpoint.step}"
        if step is None and self.is_one(self.root):
            return replace(checkpoint, problems=(*checkpoint.problems, line))
        raise MergeError(f"{line}: restore its name, or name that directory itself to merge it as it is")

    def _names(self) -> str:
        links = [path.name for path in self.root.iterdir() if path.is_symlink() and self.is_one(path)]
        none = f"none, apart from the symbolic links {listed(sorted(links), 6)}" if links else "none"
        return listed(self._tags(), 6) or none


def _means(step: int | str, tag: str) -> bool:
    return str(step) == tag or (step_of(tag) is not None and str(step) == str(step_of(tag)))


def _why_none(folder: Path) -> str:
    if folder.is_symlink():
        return f": it is a symbolic link to {folder.readlink()}, and tags are not followed; name that directory itself"
    if folder.is_dir():
        return f": the directory has no model states ({WHOLE_MODEL} or zero_pp_rank_0_{WHOLE_MODEL})"
    return ""
