"""Layers of a model of which only the tensors' names and shapes are known, as in checkpoints of others.

Names are those that the module tree would give, wherever names alone tell: children that are numbered and alike
are one layer each; of the rest, a module without such a stack inside is one layer; what a module with stacks
inside owns itself is one, named after it. It knows no classes: numbered children are taken for a list, and
a dictionary of blocks is not told from a module of parts. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

ROOT = "(root)"
"""Name of the layer of tensors without a module path."""


@dataclass(frozen=True)
class Layer:
    """Tensors that belong together. block: one of several alike modules. fqns: in the order given."""

    name: str
    block: bool
    fqns: tuple[str, ...]


@dataclass
class _Node:
    """A module: its tensors by attribute, with their shapes, and its parts."""

    path: str
    own: dict[str, tuple[int, ...]] = field(default_factory=dict)
    children: dict[str, _Node] = field(default_factory=dict)

    @property
    def bare(self) -> bool:
        """Nothing but numbered children: a list of modules."""
        return not self.own and bool(self.children) and all(name.isdecimal() for name in self.children)

    def fqns(self) -> Iterator[str]:
        for name in self.own:
            yield f"{self.path}.{name}" if self.path else name
        for child in self.children.values():
            yield from child.fqns()

    def content(self) -> frozenset[object]:
        """What tells alike modules: names of all that is inside, with shapes where there are no parts."""
        if not self.children:
            return frozenset(self.own.items())
        begin = len(self.path) + 1
        return frozenset(fqn[begin:] for fqn in self.fqns())


def layers_of(shapes: Mapping[str, Sequence[int]]) -> tuple[Layer, ...]:
    """Group tensors, tied ones once, by name. Every name lands in exactly one layer, in the order of first names."""
    root = _Node("")
    for fqn, shape in shapes.items():
        *path, attribute = fqn.split(".")
        node = root
        for part in path:
            inner = f"{node.path}.{part}" if node.path else part
            node = node.children.setdefault(part, _Node(inner))
        node.own[attribute] = tuple(shape)
    top = root
    while not top.own and len(top.children) == 1 and not _stacked(top):
        top = next(iter(top.children.values()))
    home = {fqn: (name, block) for name, block, fqns in _trunk(top) for fqn in fqns}
    members: dict[tuple[str, bool], list[str]] = {}
    for fqn in shapes:
        members.setdefault(home[fqn], []).append(fqn)
    return tuple(Layer(name, block, tuple(fqns)) for (name, block), fqns in members.items())


def _trunk(node: _Node) -> Iterator[tuple[str, bool, Iterable[str]]]:
    """Layers of a module that is not one layer as a whole: name, whether it is a block, tensors."""
    if node.own:
        yield node.path or ROOT, False, [f"{node.path}.{name}" if node.path else name for name in node.own]
    stacked = _stacked(node)
    for name, child in node.children.items():
        if name in stacked:
            yield child.path, True, child.fqns()
        elif child.bare or _holds_stack(child):
            yield from _trunk(child)
        else:
            yield _deepest(child).path, False, child.fqns()


def _stacked(node: _Node) -> set[str]:
    """Names of the children that are blocks of a stack."""
    if not node.bare:
        return set()
    composite = {name: child for name, child in node.children.items() if child.children}
    alike = _alike(composite) | _alike({name: one for name, one in node.children.items() if not one.children})
    return alike | set(composite) if alike or len(node.children) == 1 else alike


def _alike(nodes: Mapping[str, _Node]) -> set[str]:
    """Names that are alike to at least one other: equal leaves, or parts that share half of their names."""
    by_content: dict[frozenset[object], list[str]] = {}
    for name, node in nodes.items():
        by_content.setdefault(node.content(), []).append(name)
    found = {name for names in by_content.values() if len(names) > 1 for name in names}
    if any(node.children for node in nodes.values()):
        for one, other in combinations(by_content, 2):
            if 2 * len(one & other) >= len(one | other):
                found.update(by_content[one], by_content[other])
    return found


def _holds_stack(node: _Node) -> bool:
    return bool(_stacked(node)) or any(_holds_stack(child) for child in node.children.values())


def _deepest(node: _Node) -> _Node:
    """The innermost module that still holds everything."""
    while not node.own and len(node.children) == 1:
        node = next(iter(node.children.values()))
    return node
