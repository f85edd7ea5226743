"""Group tensors into layers by name and shape, for checkpoints without their module classes.

The names are those that the module tree would give. Numbered children that are similar are one layer each; a module
without such a stack inside is one layer; the tensors that a module with stacks owns itself are one layer, named after
it. Numbered children are taken for a ``ModuleList``; a ``ModuleDict`` of blocks looks like any module."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from store.names import group_by_key, similar_names

ROOT = "(root)"  # layer of the tensors without a module path


@dataclass(frozen=True)
class Layer:
    """Tensors that belong together. ``block``: one of several similar modules. ``fqns``: in the given order."""

    name: str
    block: bool
    fqns: tuple[str, ...]


@dataclass
class _Node:
    """A module: the shapes of its own tensors by attribute, and its child modules."""

    path: str
    own: dict[str, tuple[int, ...]] = field(default_factory=dict)
    children: "dict[str, _Node]" = field(default_factory=dict)

    @property
    def is_list(self) -> bool:
        """Whether it has only numbered children, as a list of modules."""
        return not self.own and bool(self.children) and all(name.isdecimal() for name in self.children)

    def fqns(self) -> Iterator[str]:
        for name in self.own:
            yield f"{self.path}.{name}" if self.path else name
        for child in self.children.values():
            yield from child.fqns()

    def content(self) -> frozenset[object]:
        """Names of all tensors inside, with shapes if there are no child modules: equal for equal modules."""
        if not self.children:
            return frozenset(self.own.items())
        return frozenset(fqn[len(self.path) + 1 :] for fqn in self.fqns())


def group_layers(shapes: Mapping[str, Sequence[int]]) -> tuple[Layer, ...]:
    """Group tensors, tied ones once. Every name is in exactly one layer; layers are in order of first names."""
    root = _Node("")
    for fqn, shape in shapes.items():
        *path, attribute = fqn.split(".")
        node = root
        for part in path:
            node = node.children.setdefault(part, _Node(f"{node.path}.{part}" if node.path else part))
        node.own[attribute] = tuple(shape)
    top = root
    while not top.own and len(top.children) == 1 and not _block_names(top):
        top = next(iter(top.children.values()))
    home = {fqn: (name, block) for name, block, fqns in _split_module(top) for fqn in fqns}
    members = group_by_key((home[fqn], fqn) for fqn in shapes)
    return tuple(Layer(name, block, tuple(fqns)) for (name, block), fqns in members.items())


def _split_module(node: _Node) -> Iterator[tuple[str, bool, Iterable[str]]]:
    """Yield (name, whether it is a block, tensors) of each layer of a module that is more than one layer."""
    if node.own:
        yield node.path or ROOT, False, [f"{node.path}.{name}" if node.path else name for name in node.own]
    stacked = _block_names(node)
    for name, child in node.children.items():
        if name in stacked:
            yield child.path, True, child.fqns()
        elif child.is_list or _holds_stack(child):
            yield from _split_module(child)
        else:
            innermost = child  # that still holds everything
            while not innermost.own and len(innermost.children) == 1:
                innermost = next(iter(innermost.children.values()))
            yield innermost.path, False, child.fqns()


def _block_names(node: _Node) -> set[str]:
    if not node.is_list:
        return set()
    composite = {name: child.content() for name, child in node.children.items() if child.children}
    leaves = {name: child.content() for name, child in node.children.items() if not child.children}
    similar = similar_names(composite, partly=True) | similar_names(leaves, partly=False)
    return similar | set(composite) if similar or len(node.children) == 1 else similar


def _holds_stack(node: _Node) -> bool:
    return bool(_block_names(node)) or any(_holds_stack(child) for child in node.children.values())
