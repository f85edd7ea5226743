"""Group the parameters of a model into layers by the structure of its module tree.

Containers, classes, parameter names inside a block and tensor shapes decide; no model is known by name. The caller has
unwrapped DDP or an engine already. A pure function, with the same result on every rank.

The rules, outermost first:

1. A *stack* is a ModuleList, Sequential, ModuleDict (or any module with numbered children) with two or more alike
   children. Each alike child is one layer, a *block*, with all inside it. Modules with children are alike if of one
   class or, if bare containers, if they share at least half of their tensor names; modules without, if all their shapes
   are equal, too. In a ModuleList that is a stack, a single child with children of its own is a block as well (hybrid
   models), and a ModuleList of one such child is a stack of one.
2. Otherwise, a module without stacks inside is one layer (``bert.embeddings``: words, positions, types and
   their norm), unless it is a bare container: its children are grouped one by one.
3. Tensors owned directly by a module that contains stacks are one layer, named after it."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import nn

from store.errors import ConfigError
from store.names import group_by_key, similar_names

ROOT = "(root)"  # name of the layer of the tensors that the outermost module owns: its module path is empty

_BARE = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_TRANSPARENT = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""Module names that torch's own wrappers insert; names may be given with or without them."""


@dataclass(frozen=True)
class Layer:
    """A group of tensors that is measured, decided on and versioned together (per slot)."""

    name: str  # path of the module, or the name given by a pattern
    position: int  # position in model order, from 0
    block: bool  # whether it is a repeated block, or an expert
    fqns: tuple[str, ...]  # its tensors, in model order


@dataclass
class _Node:
    """A module with some of the given tensors in its subtree."""

    path: str
    module: nn.Module
    own: dict[str, str] = field(default_factory=dict)  # attribute name to fqn
    children: "dict[str, _Node]" = field(default_factory=dict)

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
    def bare(self) -> bool:
        """Whether this is a plain container: exactly torch's class, or with numbered children only."""
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
    local: Collection[str] | None = None,
) -> tuple[Layer, ...]:
    """Group tensors into layers. Every name is in exactly one layer; layers are ordered by their first name.

    Args:
        module: the unwrapped model.
        fqns: parameters and persistent buffers of ``module``, tied ones once.
        experts: make every alike child of a ModuleList or ModuleDict inside a block a layer of its own
            (``model.layers.0.mlp.experts.3``). An expert bank, a module that itself owns two or more 3-d parameters
            with an equal first dimension (Mixtral in transformers 5), becomes one layer, separate from its block.
        patterns: layer name -> regular expression. Names that match entirely go to that layer, whatever the structure
            is; a detected layer of the same name keeps its other tensors.
        local: those of ``fqns`` that ``module``, a pipeline stage, has; only they are grouped. None: all.

    Raises:
        ConfigError: if a pattern is not a regular expression, matches nothing, or matches a name that another pattern
            matches, or if a name is given twice or is not in ``module``."""
    here = fqns if local is None else [fqn for fqn in fqns if fqn in local]
    top = _tree(module, here)
    while not top.own and len(top.children) == 1 and not _stacked(top):  # skip modules that only wrap the model
        (top,) = top.children.values()
    groups, by_pattern = list(_trunk(top, experts)), _match_patterns(fqns, patterns or {})
    blocks = {group.name for group in groups if group.block}
    detected = {fqn: group.name for group in groups for fqn in group.fqns}
    members = group_by_key((by_pattern.get(fqn, detected[fqn]), fqn) for fqn in here)
    return tuple(Layer(name, at, name in blocks, tuple(names)) for at, (name, names) in enumerate(members.items()))


def join_layers(stages: Iterable[Sequence[Layer]]) -> tuple[Layer, ...]:
    """Return the layers of all pipeline stages. Layers with the same name become one."""
    joined: dict[str, Layer] = {}
    for layer in chain.from_iterable(stages):
        before = joined.get(layer.name, replace(layer, position=len(joined), fqns=()))
        fqns = tuple(dict.fromkeys((*before.fqns, *layer.fqns)))
        joined[layer.name] = replace(before, block=before.block and layer.block, fqns=fqns)
    return tuple(joined.values())


def _tree(module: nn.Module, fqns: Sequence[str]) -> _Node:
    root = _Node("", _unwrap(module))
    seen: set[str] = set()
    for fqn in fqns:
        if fqn in seen:
            raise ConfigError(f"{fqn!r} is listed twice; list every tensor once, tied ones under one name")
        seen.add(fqn)
        *path, attribute = (part for part in fqn.split(".") if part not in _TRANSPARENT)
        node = root
        for part in path:
            if part not in node.children:
                child = node.module._modules.get(part)
                if child is None:
                    raise _unknown(fqn)
                node.children[part] = _Node(f"{node.path}.{part}" if node.path else part, _unwrap(child))
            node = node.children[part]
        if attribute not in node.module._parameters and attribute not in node.module._buffers:
            raise _unknown(fqn)
        node.own[attribute] = fqn
    return root


def _unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside torch's own wrappers (activation checkpointing, torch.compile, FSDP1)."""
    for name in _TRANSPARENT:
        inner = module._modules.get(name)
        if inner is not None:
            return _unwrap(inner)
    return module


def _unknown(fqn: str) -> ConfigError:
    return ConfigError(f"{fqn!r} is not a parameter or buffer of the model; pass the module that the names are from")


def _trunk(node: _Node, experts: bool) -> Iterator[_Group]:
    """Group a module that is not one layer as a whole."""
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
    """Group a repeated block: one layer, and one per expert."""
    separate = [group for child in node.children.values() for group in _experts(child)] if experts else []
    taken = {fqn for group in separate for fqn in group.fqns}
    rest = tuple(fqn for fqn in node.fqns() if fqn not in taken)
    if rest:
        yield _Group(node.path, True, rest)
    yield from separate


def _experts(node: _Node) -> Iterator[_Group]:
    firsts = [shape[0] for shape in node.shapes().values() if len(shape) == 3]
    if len(firsts) >= 2 and len(set(firsts)) == 1 and firsts[0] >= 2:  # a fused bank of experts
        yield _Group(node.path, True, tuple(node.fqns()))
        return
    # The children of a Sequential inside a block run one after the other, so they are not experts.
    alike = set() if isinstance(node.module, nn.Sequential) else _alike_children(node)
    for name, child in node.children.items():
        if name in alike:
            yield _Group(child.path, True, tuple(child.fqns()))
        else:
            yield from _experts(child)


def _stacked(node: _Node) -> set[str]:
    alike = _alike_children(node)
    if isinstance(node.module, nn.ModuleList) and (alike or len(node.children) == 1):
        return alike | {name for name, child in node.children.items() if child.children}
    return alike


def _alike_children(node: _Node) -> set[str]:
    if not (node.bare or isinstance(node.module, _BARE)):
        return set()
    candidates = dict(node.children)
    if isinstance(node.module, nn.ModuleDict):  # named members: leaves of equal shape may be unrelated
        candidates = {name: child for name, child in candidates.items() if child.children}
    by_class = group_by_key(((type(one.module), bool(one.children)), name) for name, one in candidates.items())
    alike: set[str] = set()
    for names in by_class.values():
        if candidates[names[0]].children and not candidates[names[0]].bare:
            alike |= set(names) if len(names) >= 2 else set()
        else:
            alike |= _alike_by_content({name: candidates[name] for name in names})
    return alike


def _alike_by_content(nodes: Mapping[str, _Node]) -> set[str]:
    """Return the nodes that are alike to at least one other: leaves by shapes, containers by their tensor names."""
    nested = any(node.children for node in nodes.values())
    contents = {name: node.relative_names() if nested else node.shapes().items() for name, node in nodes.items()}
    return similar_names({name: frozenset(content) for name, content in contents.items()}, partly=nested)


def _holds_stack(node: _Node) -> bool:
    return bool(_stacked(node)) or any(_holds_stack(child) for child in node.children.values())


def _deepest(node: _Node) -> _Node:
    while not node.own and len(node.children) == 1:
        (node,) = node.children.values()
    return node


def _shape(module: nn.Module, name: str) -> tuple[int, ...]:
    """Return the global shape. ZeRO-3 empties a parameter between uses and keeps its shape in ``ds_shape``."""
    tensor: torch.Tensor | None = module._parameters.get(name)
    if tensor is None:
        tensor = module._buffers.get(name)
    assert isinstance(tensor, torch.Tensor)
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _match_patterns(fqns: Sequence[str], patterns: Mapping[str, str]) -> dict[str, str]:
    claimed: dict[str, str] = {}
    for layer, pattern in patterns.items():
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"pattern {pattern!r} of layer {layer!r} is not a regular expression: {error}") from error
        matched = [fqn for fqn in fqns if compiled.fullmatch(fqn)]
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
