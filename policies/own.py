"""Policies of the user's: a class in a file, in an installed module, or registered under an entry point.

Their code runs only where settings name it; reading a store never does. A file is run once for each content it has.
It does not know what makes a policy good: :mod:`policies.contract` does.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from policies.base import Budget, Decision, History, Policy, UnitStats
from policies.failure import failure_of
from policies.parameters import check_parameters
from policies.setting import described
from store.errors import ConfigError
from store.text import suggestion

GROUP = "driftpoint.policies"
"""Entry points by which a package registers policies: name -> class."""

_GUIDE = "docs/own-policies.md shows one"
T = TypeVar("T")


@dataclass(frozen=True)
class Own:
    """A policy of the user's. What it says of itself is asked once, when it is made."""

    inner: Any
    name: str
    needs_drift: bool
    spends: bool = False

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """The user's answer, not yet checked."""
        answer: Decision = self.inner.select(tuple(stats), budget, history)
        return answer


def own_policy(reference: str, parameters: Mapping[str, Any], taken: Sequence[str]) -> Policy:
    """The policy that ``reference`` names: ``my.py:Mine``, ``package.module:Mine``, or a registered name.

    It is made with the parameters. taken: names that it may not call itself.

    Raises ConfigError: no such file, module, class or name, code that raises, unknown or missing parameters, or an
    object that is no policy."""
    kind = _class(reference, taken)
    check_parameters(reference, kind, parameters)
    made = _run(reference, "cannot be made", lambda: kind(**parameters))
    return _run(reference, "does not say what it is", lambda: _described(reference, made, taken))


def anchored(settings: object, folder: Path) -> object:
    """The settings of a policy with the path of its file, where they name one, taken from ``folder``."""
    if isinstance(settings, str):
        place, colon, name = settings.rpartition(":")
        return f"{folder.absolute() / Path(place).expanduser()}:{name}" if colon and _is_file(place) else settings
    if isinstance(settings, Mapping):
        within = {key: anchored(settings[key], folder) for key in ("name", "inner") if key in settings}
        return {**settings, **within}
    return settings


def _class(reference: str, taken: Sequence[str]) -> type[Any]:
    place, colon, name = reference.rpartition(":")
    if not colon:
        return _require_class(reference, _registered(reference, taken))
    if not name.isidentifier() or not place:
        raise ConfigError(f"policy {reference}: after the last colon comes the name of a class, such as my.py:Mine")
    module = _file(reference, Path(place).expanduser().absolute()) if _is_file(place) else _module(reference, place)
    if not hasattr(module, name):
        raise ConfigError(f"policy {reference}: {_what_there_is(module, name)}")
    return _require_class(reference, getattr(module, name))


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def _registered(name: str, taken: Sequence[str]) -> object:
    found: dict[str, list[EntryPoint]] = {}
    for one in entry_points(group=GROUP):
        found.setdefault(one.name, []).append(one)
    if name not in found:
        known = sorted({*taken, *found})
        own = f"; a class of your own is named as {name}:Mine" if _is_file(name) else ""
        raise ConfigError(f"unknown policy {name!r}: {suggestion(name, known)} Known: {', '.join(known)}{own}")
    places = sorted({one.value for one in found[name]})
    if len(places) > 1:
        raise ConfigError(
            f"policy {name}: several installed packages register it, as {' and '.join(places)}: name the class itself, "
            f"`policy: {places[0]}`"
        )
    return _run(name, f"({places[0]}) cannot be imported", found[name][0].load)


def _module(reference: str, place: str) -> ModuleType:
    try:
        return _run(reference, "cannot be imported", lambda: importlib.import_module(place))
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{place}.".startswith(f"{cause.name}."):
            raise ConfigError(
                f"policy {reference}: there is no module {cause.name}: is it installed, or on PYTHONPATH? A file is "
                f"named by its path, such as {place}.py:{reference.rpartition(':')[2]}"
            ) from cause
        raise


def _file(reference: str, path: Path) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"policy {reference}: cannot read {path} ({error.strerror}): a path is taken from the folder of the "
            "configuration's file, or where there is none from the working directory"
        ) from error
    script = sys.modules.get("__main__")
    if (
        script is not None
        and getattr(script, "__file__", None)
        and Path(str(script.__file__)).resolve() == path.resolve()
    ):
        return script  # the script that is running: importing it would begin it anew
    name = f"driftpoint_policy_{hashlib.sha256(str(path).encode() + source).hexdigest()[:16]}"
    return sys.modules.get(name) or _run(reference, "cannot be imported", lambda: _executed(name, path, source))


def _executed(name: str, path: Path, source: bytes) -> ModuleType:
    """Run the bytes that were read: no compiled file of an older content, and none left beside it."""
    loader = SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        exec(loader.source_to_code(source, str(path)), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _what_there_is(module: ModuleType, name: str) -> str:
    there = getattr(module, "__file__", None) or module.__name__
    classes = [key for key, value in vars(module).items() if isinstance(value, type) and hasattr(value, "select")]
    if classes:
        return f"{there} has no {name}: {suggestion(name, classes)}"
    own = ", above the call of monitor.attach" if module.__name__ == "__main__" else ""
    return f"{there} has no {name}, nor another class with select: define it there{own}; {_GUIDE}"


def _require_class(reference: str, found: object) -> type[Any]:
    if not isinstance(found, type):
        raise ConfigError(f"policy {reference}: it is {described(found)[:80]}, not a class; {_GUIDE}")
    return found


def _described(reference: str, made: Any, taken: Sequence[str]) -> Own:
    lacking = [word for word in ("name", "needs_drift", "select") if not hasattr(made, word)]
    if lacking:
        raise ConfigError(f"policy {reference} is no policy: it lacks {', '.join(lacking)}; {_GUIDE}")
    name, drift, spends = made.name, made.needs_drift, getattr(made, "spends", False)
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 64:
        raise ConfigError(f"policy {reference}: its name must be a short text, not {described(name)[:80]}")
    if name in taken:
        raise ConfigError(
            f"policy {reference}: it calls itself {name!r}, which is another policy: give it its own name"
        )
    for word, value in (("needs_drift", drift), ("spends", spends)):
        if not isinstance(value, bool):
            raise ConfigError(f"policy {reference}: its {word} must be True or False, not {described(value)[:80]}")
    if not callable(made.select):
        raise ConfigError(f"policy {reference}: its select must be a method, not {described(made.select)[:80]}")
    return Own(made, str.__str__(name), drift, spends)


def _run(reference: str, trouble: str, action: Callable[[], T]) -> T:
    """Run something of the user's. What it raises becomes a ConfigError."""
    try:
        return action()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        failure = failure_of(error)
        at = f" at {failure.place}" if failure.place else ""
        raise ConfigError(f"policy {reference} {trouble}: it {failure.what}{at}; mend that first") from error
