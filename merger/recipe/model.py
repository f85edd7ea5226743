"""Define recipes: sources, rules, and selections of layers, blocks, parameters and auxiliary layers of a model.

A model's parts are found from names, shapes and the order of layers, never by the name of an architecture. Every form
of recipe (our own, its short form, MergeKit's) becomes a :class:`Recipe`. Pure."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path

from store.errors import ConfigError, UsageError
from store.schema import LayerRecord, TensorRecord
from store.text import listed, suggestion

ROLES = ("embeddings", "norm", "head")  # roles of layers that are no block: see `Model.role`
_DTYPES = {
    "float32": "F32", "float": "F32", "fp32": "F32", "f32": "F32",
    "bfloat16": "BF16", "bf16": "BF16",
    "float16": "F16", "half": "F16", "fp16": "F16", "f16": "F16",
}  # fmt: skip

_RANGE = re.compile(r"(?P<head>.*?)(?P<first>\d+)-(?P<last>\d+)\Z")


@dataclass(frozen=True)
class SourceRef:
    """A checkpoint to take from."""

    path: Path | None  # of a store or a checkpoint; None: the SOURCE of the command line
    step: int | str | None = None  # a step, a save's name, a tag, or a bound such as ``<= 120``; None: the newest


@dataclass(frozen=True)
class Rule:
    """``selection``, without the globs ``but``, comes from ``source``. ``where``: the rule's name in errors."""

    source: str
    selection: "Selection"
    where: str
    but: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """Which source each part of a checkpoint comes from."""

    sources: Mapping[str, SourceRef]  # by name
    rules: tuple[Rule, ...] = ()  # parts of the model and their sources
    rest: str | None = None  # source of everything that no rule names
    run_state: str | None = None  # source of counters, schedule, random generators and layout facts; None: the newest
    files: str | Path | None = None  # a source's name, or a directory; None: the run state's
    dtype: str | None = None  # safetensors name of the dtype of exported weights
    where: str = "the recipe"  # name of the recipe in errors
    notes: tuple[str, ...] = field(default=())  # for the user


@dataclass(frozen=True)
class Model:
    """The tensors of a checkpoint and their layers."""

    tensors: Mapping[str, TensorRecord]
    layers: tuple[LayerRecord, ...]

    @cached_property
    def members(self) -> Mapping[str, tuple[str, ...]]:
        """fqns by layer, in model order."""
        found: dict[str, list[str]] = {layer.name: [] for layer in self.layers}
        for fqn, record in self.tensors.items():
            found.setdefault(record.layer, []).append(fqn)
        return {name: tuple(fqns) for name, fqns in found.items()}

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Position of each block among the blocks, from 0. Layers inside one block (experts) share its position."""
        blocks = [layer.name for layer in self.layers if layer.block]
        known, places = set(blocks), dict[str, int]()
        paths = {name: accumulate(name.split("."), "{}.{}".format) for name in blocks}
        outermost = {name: next(filter(known.__contains__, path)) for name, path in paths.items()}
        return {name: places.setdefault(outermost[name], len(places)) for name in blocks}

    @property
    def blocks(self) -> int:
        return len(set(self.positions.values()))

    @cached_property
    def auxiliary(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers if not layer.block)

    @cached_property
    def role(self) -> Mapping[str, str]:
        """Role of each auxiliary layer.

        ``norm``: all tensors are 0-D or 1-D. Of the rest, ``embeddings`` precede the first block, ``head`` follows."""
        first = next((i for i, layer in enumerate(self.layers) if layer.block), len(self.layers))
        flat = {name: all(len(self.tensors[fqn].shape) < 2 for fqn in fqns) for name, fqns in self.members.items()}
        return {
            layer.name: "norm" if flat[layer.name] else "embeddings" if i < first else "head"
            for i, layer in enumerate(self.layers)
            if not layer.block
        }

    def names(self, fqn: str) -> tuple[str, ...]:
        return (fqn, *self.tensors[fqn].aliases)

    def matching(self, fqns: Iterable[str], pattern: str) -> list[str]:
        """Return the fqns of which any name matches a regular expression as a whole."""
        return [fqn for fqn in fqns if any(re.fullmatch(pattern, name) for name in self.names(fqn))]

    def below(self, path: str) -> tuple[str, ...]:
        """Return the layers at a module path or inside it."""
        return tuple(layer.name for layer in self.layers if layer.name == path or layer.name.startswith(f"{path}."))

    def outline(self) -> str:
        """Return the layers for messages, runs of blocks abbreviated."""
        parts: list[str] = []
        for block, layers in groupby(self.layers, lambda layer: layer.block):
            names = [layer.name for layer in layers]
            parts += [f"{names[0]} … {names[-1]}"] if block and len(names) > 1 else names
        return listed(parts, 6)


def parse_dtype(text: str) -> str:
    """Return the safetensors name of an export dtype. UsageError for any other."""
    if (found := _DTYPES.get(text.lower().removeprefix("torch."))) is None:
        raise UsageError(f"dtype {text!r} is not supported; use float32, bfloat16 or float16")
    return found


@dataclass(frozen=True)
class Layers:
    """Layers at module paths and inside them: ``model.norm``, ``model.layers.0-15`` (inclusive), ``model.layers.*``."""

    patterns: tuple[str, ...]  # globs match whole layer names

    def fqns(self, model: Model) -> list[str]:
        found = [fqn for pattern in self.patterns for layer in _layers(pattern, model) for fqn in model.members[layer]]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Blocks:
    """Blocks by position in model order, from ``first`` to ``last`` inclusive; None: to the end."""

    first: int
    last: int | None

    def fqns(self, model: Model) -> list[str]:
        last = model.blocks - 1 if self.last is None else self.last
        if not model.blocks or last >= model.blocks:
            there = f"blocks 0 to {model.blocks - 1}" if model.blocks else "no blocks"
            raise ConfigError(f"blocks {self.first}-{last} do not exist: the model has {there}")
        return _of_blocks(model, lambda position: self.first <= position <= last)


@dataclass(frozen=True)
class EveryKth:
    """Blocks whose position modulo ``k`` is ``turn``."""

    k: int
    turn: int

    def fqns(self, model: Model) -> list[str]:
        if model.blocks < self.k:
            raise ConfigError(f"parity over {self.k} sources needs {self.k} blocks; the model has {model.blocks}")
        return _of_blocks(model, lambda position: position % self.k == self.turn)


@dataclass(frozen=True)
class Parameters:
    """Parameters and buffers by globs, or by regular expressions on the whole name; any of their names counts."""

    patterns: tuple[str, ...]
    regex: bool = False

    def fqns(self, model: Model) -> list[str]:
        found: dict[str, None] = {}
        for pattern in self.patterns:
            hits = model.matching(model.tensors, pattern if self.regex else fnmatch.translate(pattern))
            if not hits:
                names = [name for fqn in model.tensors for name in model.names(fqn)]
                raise ConfigError(f"{pattern!r} matches no parameter{_nearest(pattern, names)}")
            found |= dict.fromkeys(hits)
        return list(found)


@dataclass(frozen=True)
class Auxiliary:
    """Layers that are no block: all, those of a role, or one by its name or the end of it (``embed_tokens``)."""

    name: str | None = None
    required: bool = True  # raise if there is none

    def fqns(self, model: Model) -> list[str]:
        found = [fqn for layer in model.auxiliary for fqn in model.members[layer] if self._named(layer, fqn, model)]
        if not found and self.required:
            missing = "auxiliary layer" if self.name is None else repr(self.name)
            roles = listed((f"{layer} ({model.role[layer]})" for layer in model.auxiliary), 6) or "none"
            ties = [f"; {alias} is tied to {fqn}" for fqn, one in model.tensors.items() for alias in one.aliases]
            tied = "".join(ties[:1]) if self.name == "head" else ""
            raise ConfigError(f"the model has no {missing}; its auxiliary layers: {roles}{tied}")
        return found

    def _named(self, layer: str, fqn: str, model: Model) -> bool:
        if self.name is None:
            return True
        if self.name in ROLES:
            return model.role[layer] == self.name
        # A tied tensor belongs to one layer, but has names in both.
        return any(f".{self.name}." in f".{name}." for name in (layer, *model.names(fqn)))


Selection = Layers | Blocks | EveryKth | Parameters | Auxiliary
"""A part of a model. ``fqns`` returns its tensors; ConfigError if the model has no such part."""


def exclude(fqns: Sequence[str], globs: Iterable[str], model: Model) -> list[str]:
    """Return the fqns without those matched by a glob. ConfigError for a glob that matches none."""
    left = list(fqns)
    for glob in globs:
        taken = set(model.matching(left, fnmatch.translate(glob)))
        if not taken:
            raise ConfigError(f"except {glob!r} matches no parameter of its rule")
        left = [fqn for fqn in left if fqn not in taken]
    return left


def _of_blocks(model: Model, wanted: Callable[[int], bool]) -> list[str]:
    return [fqn for layer, position in model.positions.items() if wanted(position) for fqn in model.members[layer]]


def _layers(pattern: str, model: Model) -> list[str]:
    if exact := model.below(pattern):
        return list(exact)
    if (match := _RANGE.match(pattern)) is not None:
        return _range(pattern, match["head"], int(match["first"]), int(match["last"]), model)
    if found := [layer.name for layer in model.layers if fnmatch.fnmatchcase(layer.name, pattern)]:
        return found
    if inside := [fqn for fqn in model.tensors if fqn == pattern or fqn.startswith(f"{pattern}.")]:
        record = model.tensors[inside[0]]
        raise ConfigError(
            f"{pattern!r} is a part of the layer {record.layer}: name it with `parameters: "
            f'"{pattern if inside[0] == pattern else pattern + ".*"}"`, or the whole layer'
        )
    names = [layer.name for layer in model.layers]
    raise ConfigError(f"the model has no layer {pattern!r}{_nearest(pattern, names)}; its layers: {model.outline()}")


def _range(pattern: str, head: str, first: int, last: int, model: Model) -> list[str]:
    if first > last:
        raise ConfigError(f"{pattern!r} ends before it begins; write the smaller number first")
    reach = min(last, first + len(model.layers))  # beyond it, layers are certainly missing
    found = {index: model.below(f"{head}{index}") for index in range(first, reach + 1)}
    if missing := [f"{head}{index}" for index, layers in found.items() if not layers]:
        raise ConfigError(
            f"{pattern!r} (inclusive) names {listed(missing)}, which the model lacks; its layers: {model.outline()}"
        )
    return [layer for layers in found.values() for layer in layers]


def _nearest(pattern: str, names: Sequence[str]) -> str:
    found = suggestion(pattern, names, cutoff=0.4)
    return f" ({found})" if found else ""
