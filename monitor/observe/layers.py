"""Layers: the parameters of a model, grouped by the shape of its module tree.

What counts is structure: containers, classes, parameter names inside a block, tensor shapes. It knows no
model by name, no optimizer, no slot and no framework; the caller has unwrapped DDP or an engine already.
Pure function of the module and the names given, the same on every rank; nothing is kept.

The rules, outermost first:

1. A *stack* is a ModuleList, Sequential, ModuleDict (or any module whose children are numbered) with at
   least two alike children. Each alike child is one layer, a *block*, with all that lies inside it. Modules
   with children are alike if they are of one class, or, if they are bare containers, share at least half of
   their tensor names: T5's first block (it alone holds a relative attention bias) and a residual block with
   a projection are still blocks. Modules without children are alike if all their shapes are equal, too.
   In a ModuleList that is a stack, a lone child with children of its own is a block as well (hybrid models),
   and a ModuleList of a single such child is a stack of one.
2. Of the rest, a module that holds no stack inside is one layer (``bert.embeddings``: words, positions,
   types and their norm), unless it is a bare container: its children are looked at one by one.
3. Tensors owned directly by a module that does hold stacks are one layer, named after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import nn

from store.errors import ConfigError

ROOT = "(root)"
"""Name of the layer of tensors that the outermost module owns itself: its module path is empty."""

_BARE = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_TRANSPARENT = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""Module names that torch's own wrappers insert; names may be given with or without them."""


@dataclass(frozen=True)
class Layer:
    """A group of tensors that is measured, decided on and versioned together (per slot).

    name: path of the module, or the name given by a pattern. position: place in model order, from 0.
    block: whether it is one of several alike modules (or an expert). fqns: its tensors, in model order.
    """

    name: str
    position: int
    block: bool
    fqns: tuple[str, ...]


@dataclass
class _Node:
    """A module that holds some of the given tensors, in itself or below."""

    path: str
    module: nn.Module
    own: dict[str, str] = field(default_factory=dict)
    """Attribute name to fqn."""
    children: dict[str, _Node] = field(default_factory=dict)

    def fqns(self) -> Iterator[str]:
        yield from self.own.values()
        for child in self.children.values():
            yield from child.fqns()

    def relative_names(self) -> set[str]:
        inner = {f"{name}.{rest}" for name, child in self.children.items() for rest in child.relative_names()}
        return set(self.own) | inner

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: _shape(self.module, name) for name in self.own}

    @property
    def composite(self) -> bool:
        return bool(self.children)

    @property
    def bare(self) -> bool:
        """A container without meaning of its own: exactly torch's class, or numbered children only."""
        if type(self.module) in _BARE:
            return True
        return not self.own and bool(self.children) and all(name.isdigit() for name in self.children)


@dataclass(frozen=True)
class _Group:
    name: str
    block: bool
    fqns: tuple[str, ...]


def find_layers(
    module: nn.Module,
    fqns: Sequence[str],
    *,
    experts: bool = False,
    patterns: Mapping[str, str] | None = None,
) -> tuple[Layer, ...]:
    """Group ``fqns`` (parameters and persistent buffers of ``module``, tied ones once) into layers.

    Every name lands in exactly one layer. Layers come in the order of their first name in ``fqns``.

    experts: inside a block, every alike child of a ModuleList or ModuleDict is a layer of its own
    (``model.layers.0.mlp.experts.3``). Where a model keeps all experts of a block fused in 3-d parameters
    (Mixtral, Qwen2-MoE and others in transformers 5), one tensor holds them all and a tensor belongs to one
    layer: there the expert bank as a whole becomes a layer (``model.layers.0.mlp.experts``), apart from the
    block's attention, norms and router. An expert bank is a module that itself owns two or more 3-d
    parameters with an equal first dimension.

    patterns: {layer name: regular expression}: names that match as a whole go to that layer, whatever the
    structure says. A name that belongs to a found layer too is added to it.

    Raises ConfigError for a pattern that is no regular expression, matches nothing, or matches a name that
    another pattern matches as well, and for a name that is given twice or is not in ``module``.
    """
    groups = _structure(_tree(module, fqns), experts)
    claimed = _claims(fqns, patterns or {})
    members: dict[str, list[str]] = {}
    blocks = {group.name for group in groups if group.block}
    home = {fqn: group.name for group in groups for fqn in group.fqns}
    for fqn in fqns:
        members.setdefault(claimed.get(fqn, home[fqn]), []).append(fqn)
    return tuple(
        Layer(name, position, name in blocks, tuple(names)) for position, (name, names) in enumerate(members.items())
    )


def _tree(module: nn.Module, fqns: Sequence[str]) -> _Node:
    """The part of the module tree that holds the named tensors."""
    root = _Node("", _seen_through(module))
    seen: set[str] = set()
    for fqn in fqns:
        if fqn in seen:
            raise ConfigError(f"{fqn!r} is listed twice; list every tensor once, tied ones under one name")
        seen.add(fqn)
        *path, attribute = (part for part in fqn.split(".") if part not in _TRANSPARENT)
        node = root
        for part in path:
            node = _descend(node, part, fqn)
        if attribute not in node.module._parameters and attribute not in node.module._buffers:
            raise _unknown(fqn)
        node.own[attribute] = fqn
    return root


def _descend(node: _Node, part: str, fqn: str) -> _Node:
    if part not in node.children:
        child = node.module._modules.get(part)
        if child is None:
            raise _unknown(fqn)
        path = f"{node.path}.{part}" if node.path else part
        node.children[part] = _Node(path, _seen_through(child))
    return node.children[part]


def _seen_through(module: nn.Module) -> nn.Module:
    """The module inside torch's own wrappers (activation checkpointing, torch.compile, FSDP1)."""
    for name in _TRANSPARENT:
        inner = module._modules.get(name)
        if inner is not None:
            return _seen_through(inner)
    return module


def _unknown(fqn: str) -> ConfigError:
    return ConfigError(
        f"{fqn!r} names no parameter or buffer of the model; pass the module that the names were taken from"
    )


def _structure(root: _Node, experts: bool) -> list[_Group]:
    top = root
    # A model wrapped in modules that hold nothing else is that model.
    while not top.own and len(top.children) == 1 and not _stacked(top):
        top = next(iter(top.children.values()))
    return list(_trunk(top, experts))


def _trunk(node: _Node, experts: bool) -> Iterator[_Group]:
    """Layers of a module that is not one layer as a whole."""
    if node.own:
        yield _Group(node.path or ROOT, False, tuple(node.own.values()))
    stacked = _stacked(node)
    for name, child in node.children.items():
        if name in stacked:
            yield from _block(child, experts)
        elif child.bare or _holds_stack(child):
            yield from _trunk(child, experts)
        else:
            yield _Group(_deepest(child).path, False, tuple(child.fqns()))


def _block(node: _Node, experts: bool) -> Iterator[_Group]:
    """A repeated block: one layer, or with its experts set apart."""
    apart = [group for child in node.children.values() for group in _experts(child)] if experts else []
    taken = {fqn for group in apart for fqn in group.fqns}
    rest = tuple(fqn for fqn in node.fqns() if fqn not in taken)
    if rest:
        yield _Group(node.path, True, rest)
    yield from apart


def _experts(node: _Node) -> Iterator[_Group]:
    if _is_fused_bank(node):
        yield _Group(node.path, True, tuple(node.fqns()))
        return
    # A Sequential inside a block runs one after the other: a part of the block, no choice of experts.
    chosen = set() if isinstance(node.module, nn.Sequential) else _alike_children(node)
    for name, child in node.children.items():
        if name in chosen:
            yield _Group(child.path, True, tuple(child.fqns()))
        else:
            yield from _experts(child)


def _is_fused_bank(node: _Node) -> bool:
    firsts = [shape[0] for shape in node.shapes().values() if len(shape) == 3]
    return len(firsts) >= 2 and len(set(firsts)) == 1 and firsts[0] >= 2


def _stacked(node: _Node) -> set[str]:
    """Names of the children of ``node`` that are blocks of a stack."""
    alike = _alike_children(node)
    if isinstance(node.module, nn.ModuleList) and (alike or len(node.children) == 1):
        return alike | {name for name, child in node.children.items() if child.composite}
    return alike


def _alike_children(node: _Node) -> set[str]:
    if not (node.bare or isinstance(node.module, _BARE)):
        return set()
    candidates = dict(node.children)
    if isinstance(node.module, nn.ModuleDict):  # named members: leaves of equal shape may mean anything
        candidates = {name: child for name, child in candidates.items() if child.composite}
    by_class: dict[tuple[type, bool], list[str]] = {}
    for name, child in candidates.items():
        by_class.setdefault((type(child.module), child.composite), []).append(name)
    found: set[str] = set()
    for names in by_class.values():
        if candidates[names[0]].composite and not candidates[names[0]].bare:
            found |= set(names) if len(names) >= 2 else set()
        else:
            found |= _alike_by_content({name: candidates[name] for name in names})
    return found


def _alike_by_content(nodes: Mapping[str, _Node]) -> set[str]:
    """Names that are alike to at least one other: leaves by shapes, containers by what they hold."""
    if not any(node.composite for node in nodes.values()):
        shapes = {name: tuple(sorted(node.shapes().items())) for name, node in nodes.items()}
        values = list(shapes.values())
        return {name for name, shape in shapes.items() if values.count(shape) >= 2}
    contents = {name: node.relative_names() for name, node in nodes.items()}
    pairs = combinations(contents, 2)
    close = [(a, b) for a, b in pairs if 2 * len(contents[a] & contents[b]) >= len(contents[a] | contents[b])]
    return {name for pair in close for name in pair}


def _holds_stack(node: _Node) -> bool:
    return bool(_stacked(node)) or any(_holds_stack(child) for child in node.children.values())


def _deepest(node: _Node) -> _Node:
    """The innermost module that still holds everything ``node`` holds."""
    while not node.own and len(node.children) == 1:
        node = next(iter(node.children.values()))
    return node


def _shape(module: nn.Module, name: str) -> tuple[int, ...]:
    """Global shape. ZeRO-3 empties a parameter between uses and notes its shape beside it."""
    tensor: torch.Tensor | None = module._parameters.get(name)
    if tensor is None:
        tensor = module._buffers.get(name)
    assert isinstance(tensor, torch.Tensor)
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _claims(fqns: Sequence[str], patterns: Mapping[str, str]) -> dict[str, str]:
    """fqn to layer name, for the names that a pattern claims."""
    claimed: dict[str, str] = {}
    for layer, pattern in patterns.items():
        matched = [fqn for fqn in fqns if _compiled(layer, pattern).fullmatch(fqn)]
        if not matched:
            raise ConfigError(
                f"the pattern {pattern!r} of layer {layer!r} matches no tensor; it must match a whole name, "
                f"such as {fqns[0] if fqns else 'lm_head.weight'!r}"
            )
        for fqn in matched:
            if fqn in claimed:
                raise ConfigError(
                    f"{fqn!r} matches the patterns of two layers, {claimed[fqn]!r} "
                    f"({patterns[claimed[fqn]]!r}) and {layer!r} ({pattern!r}); narrow one of them"
                )
            claimed[fqn] = layer
    return claimed


def _compiled(layer: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"the pattern {pattern!r} of layer {layer!r} is not a regular expression: {error}") from error
