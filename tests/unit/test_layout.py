"""Hold the layout of the product: how many files, how long, no import cycle, names that a reader can guess."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("monitor", "policies", "store", "merger", "deploy")
MOST_FILES = 240
MOST_LINES = 500
MOST_AT_THE_ROOT_OF_MONITOR = 12
MOST_PRODUCT_LINES = 50_000

BANNED = frozenset(
    word
    for words in (
        "agree ahead alike announced answer asked attaching banner chosen claimed coded common correction",
        "course decided deciding door fit foresight going_on guard hear heading held helpers introduce",
        "keeping keepers ladder last_save lending levels lent line listed made_up maps measuring misc moments",
        "neighbours objects observing onward opened orders own pace pacing pinning pulse purse reading",
        "rehearsal rehearsing remembered remembering room saying seen settled shown sight spending spikes",
        "stager standing still stored strangers survey tail telling tell thing things tree urgent utils",
        "whereabouts wire word words writeback",
    )
    for word in words.split()
)
"""Names of modules that say nothing to a reader of the field: metaphors, bare participles, and places for anything."""

PARTICIPLES_OF_THE_FIELD = frozenset({"accounting", "encoding", "lightning", "staging"})


def modules() -> Mapping[str, Path]:
    found = {"driftpoint": ROOT / "driftpoint.py"}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Every product module that a file imports anywhere: also for types, and inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner
                elif node.module in known:
                    yield node.module


def cycle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """One cycle of the graph, or nothing."""
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        trail = [iter([start])]
        while trail:
            name = next(trail[-1], None)
            if name is None:
                trail.pop()
                if path:
                    done.add(path.pop())
            elif name in path:
                return [*path[path.index(name) :], name]
            elif name not in done:
                path.append(name)
                trail.append(iter(sorted(graph[name])))
    return []


def test_there_are_at_most_240_files() -> None:
    assert len(modules()) <= MOST_FILES


def test_no_file_is_longer_than_500_lines() -> None:
    assert {name: n for name, path in modules().items() if (n := lines_of(path)) > MOST_LINES} == {}


def test_the_product_stays_small() -> None:
    assert sum(map(lines_of, modules().values())) <= MOST_PRODUCT_LINES


def test_the_root_of_monitor_has_at_most_12_files() -> None:
    assert len(list((ROOT / "monitor").glob("*.py"))) <= MOST_AT_THE_ROOT_OF_MONITOR


def test_no_imports_go_in_a_circle() -> None:
    known = modules()
    graph = {name: set(imported(path, known)) - {name} for name, path in known.items()}
    assert cycle_in(graph) == []


def test_a_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_library_module_imports_the_command_line() -> None:
    known = modules()
    inside = [name for name in known if not name.startswith("deploy.cli")]
    assert {
        (name, one) for name in inside for one in imported(known[name], known) if one.startswith("deploy.cli")
    } == set()


def test_modules_have_names_of_the_field() -> None:
    parts = {part for name in modules() for part in name.split(".")}
    assert parts & BANNED == set()
    assert {part for part in parts if part.endswith("ing")} <= PARTICIPLES_OF_THE_FIELD
