"""Build policies from settings: built-in names, classes in files or modules, and entry points; apply fixed encodings.

User code runs only if settings name it; reading a store never runs code. A file is executed once per content."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from policies.auto import AutoPolicy
from policies.base import Budget, Decision, History, Policy, UnitStats
from policies.bounds import Bounded, Bounds
from policies.budget import BudgetPolicy
from policies.builtin import Filter, Full, Observe, Parity, Threshold
from policies.validation import check_parameters, described, failure_of
from store.encoding import encoding_named
from store.errors import ConfigError
from store.names import group_by_key
from store.text import suggestion

GROUP = "driftpoint.policies"  # entry-point group in which packages register policies: name -> class
_GUIDE = "docs/own-policies.md shows one"
T = TypeVar("T")


@dataclass(frozen=True)
class UserPolicy:
    """Wraps a user's policy. Its attributes are read once, at construction."""

    inner: Any
    name: str
    needs_drift: bool
    spends: bool = False

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        answer: Decision = self.inner.select(tuple(stats), budget, history)
        return answer


def load_user_policy(reference: str, parameters: Mapping[str, Any], taken: Sequence[str]) -> Policy:
    """Build the policy that ``reference`` names: ``my.py:Mine``, ``package.module:Mine``, or a registered name.

    taken: names that the policy may not have. Raises ConfigError if there is no such file, module, class or name, the
    code raises, a parameter is unknown or missing, or the object is not a policy."""
    kind = _load_class(reference, taken)
    check_parameters(reference, kind, parameters)
    policy = _run(reference, "cannot be made", lambda: kind(**parameters))
    return _run(reference, "has unreadable attributes", lambda: _wrap(reference, policy, taken))


def anchored(settings: object, folder: Path) -> object:
    """Return policy settings in which the path of a user's file, if any, is resolved against ``folder``."""
    if isinstance(settings, str):
        place, colon, name = settings.rpartition(":")
        return f"{folder.absolute() / Path(place).expanduser()}:{name}" if colon and _is_file(place) else settings
    if isinstance(settings, Mapping):
        within = {key: anchored(settings[key], folder) for key in ("name", "inner") if key in settings}
        return {**settings, **within}
    return settings


def _load_class(reference: str, taken: Sequence[str]) -> type[Any]:
    place, colon, name = reference.rpartition(":")
    if not colon:
        return _require_class(reference, _registered(reference, taken))
    if not name.isidentifier() or not place:
        raise ConfigError(f"policy {reference}: after the last colon comes the name of a class, such as my.py:Mine")
    module = _file(reference, Path(place).expanduser().absolute()) if _is_file(place) else _module(reference, place)
    if not hasattr(module, name):
        raise ConfigError(f"policy {reference}: {_missing_class_message(module, name)}")
    return _require_class(reference, getattr(module, name))


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def _registered(name: str, taken: Sequence[str]) -> object:
    registered = group_by_key((point.name, point) for point in entry_points(group=GROUP))
    if name not in registered:
        known = sorted({*taken, *registered})
        hint = f"; a class of your own is named as {name}:Mine" if _is_file(name) else ""
        raise ConfigError(f"unknown policy {name!r}: {suggestion(name, known)} Known: {', '.join(known)}{hint}")
    places = sorted({point.value for point in registered[name]})
    if len(places) > 1:
        raise ConfigError(
            f"policy {name}: several installed packages register it, as {' and '.join(places)}: name the class itself, "
            f"`policy: {places[0]}`"
        )
    return _run(name, f"({places[0]}) cannot be imported", registered[name][0].load)


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
    running = getattr(script, "__file__", None)
    if script is not None and running and Path(str(running)).resolve() == path.resolve():
        return script  # importing the running script would execute it again
    name = f"driftpoint_policy_{hashlib.sha256(str(path).encode() + source).hexdigest()[:16]}"
    return sys.modules.get(name) or _run(reference, "cannot be imported", lambda: _execute(name, path, source))


def _execute(name: str, path: Path, source: bytes) -> ModuleType:
    """Execute ``source``, the bytes of the file, without reading or writing a ``.pyc`` file."""
    loader = SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look up their module here
    try:
        exec(loader.source_to_code(source, str(path)), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _missing_class_message(module: ModuleType, name: str) -> str:
    there = getattr(module, "__file__", None) or module.__name__
    classes = [key for key, value in vars(module).items() if isinstance(value, type) and hasattr(value, "select")]
    if classes:
        return f"{there} has no {name}: {suggestion(name, classes)}"
    hint = ", above the call of monitor.attach" if module.__name__ == "__main__" else ""
    return f"{there} has no {name}, nor another class with select: define it there{hint}; {_GUIDE}"


def _require_class(reference: str, found: object) -> type[Any]:
    if not isinstance(found, type):
        raise ConfigError(f"policy {reference}: it is {described(found)[:80]}, not a class; {_GUIDE}")
    return found


def _wrap(reference: str, policy: Any, taken: Sequence[str]) -> UserPolicy:
    if lacking := [word for word in ("name", "needs_drift", "select") if not hasattr(policy, word)]:
        raise ConfigError(f"policy {reference} is no policy: it lacks {', '.join(lacking)}; {_GUIDE}")
    name, drift, spends = policy.name, policy.needs_drift, getattr(policy, "spends", False)
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 64:
        raise ConfigError(f"policy {reference}: its name must be a short text, not {described(name)[:80]}")
    if name in taken:
        raise ConfigError(f"policy {reference}: it calls itself {name!r}, which is another policy: rename it")
    for word, value in (("needs_drift", drift), ("spends", spends)):
        if not isinstance(value, bool):
            raise ConfigError(f"policy {reference}: its {word} must be True or False, not {described(value)[:80]}")
    if not callable(policy.select):
        raise ConfigError(f"policy {reference}: its select must be a method, not {described(policy.select)[:80]}")
    return UserPolicy(policy, str.__str__(name), drift, spends)


def _run(reference: str, trouble: str, action: Callable[[], T]) -> T:
    try:
        return action()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"policy {reference} {trouble}: it {failure_of(error).located}; fix that first") from error


def with_fixed_encoding(policy: Policy, encodings: Mapping[str, str], bounds: Bounds) -> Policy:
    """Apply encodings by slot to a policy, which is put inside ``bounds`` if it has none. Observe stays outermost.

    The error of an encoding counts as drift from the save on, so max_drift must be at least its error bound. Raises
    ConfigError if the bounds forbid one of the encodings."""
    lossy = sorted({name for name in encodings.values() if not encoding_named(name).lossless})
    if lossy and bounds.precision == "exact":
        raise ConfigError(f"encoding {', '.join(lossy)} loses bits, and bounds.precision is 'exact': drop one")
    for slot, name in encodings.items():
        most = encoding_named(name).relative_bound
        if bounds.max_drift is not None and most > bounds.max_drift:
            raise ConfigError(
                f"bounds.max_drift {bounds.max_drift!r} cannot hold: {slot} stored as {name} may be off by {most:.2g}; "
                "raise max_drift, or take a finer encoding for the slot"
            )
    if not encodings:
        return policy
    if isinstance(policy, Observe):
        return Observe(with_fixed_encoding(policy.inner, encodings, bounds))
    bounded = policy if isinstance(policy, Bounded) else Bounded(policy, bounds)
    if isinstance(bounded.policy, BudgetPolicy):
        bounded = replace(bounded, policy=replace(bounded.policy, encodings=encodings))
    return replace(bounded, encodings=encodings)


POLICIES: Mapping[str, type[Any]] = MappingProxyType(
    {kind.name: kind for kind in (AutoPolicy, BudgetPolicy, Filter, Full, Observe, Parity, Threshold)}
)
"""The built-in policies, frozen dataclasses: fields are parameters, except those with ``setting`` False in metadata."""


def policy_from(settings: Mapping[str, Any] | str) -> Policy:
    """Build the policy that settings describe: a name, or a mapping with ``name`` and the parameters.

    For example ``"full"`` or ``{"name": "threshold", "threshold": 0.01}``. A name that is not built in is loaded with
    :func:`load_user_policy`, which runs user code. Bounds are separate: see :func:`policies.bounds.bound`.
    Raises ConfigError if a name or parameter is unknown (the message suggests the nearest one), a parameter is missing,
    or a value is invalid."""
    name, parameters = _parts(settings)
    if (kind := POLICIES.get(name)) is None:
        return load_user_policy(name, parameters, taken=sorted(POLICIES))
    check_parameters(name, kind, parameters)
    if isinstance(parameters.get("inner"), str | Mapping):
        parameters["inner"] = policy_from(parameters["inner"])
    elif "inner" in parameters:
        raise ConfigError(f"policy {name}: inner must be a policy, such as full, not {described(parameters['inner'])}")
    policy: Policy = kind(**parameters)
    return policy


def _parts(settings: object) -> tuple[str, dict[str, Any]]:
    if isinstance(settings, str):
        return settings, {}
    if not isinstance(settings, Mapping):
        raise ConfigError(
            "policy must be a name, or a mapping such as {name: parity, k: 2}, "
            f"not {described(settings)}; known names: {', '.join(sorted(POLICIES))}"
        )
    name = settings.get("name")
    if not isinstance(name, str):
        found = "it has none" if name is None else f"not {described(name)}"
        raise ConfigError(f"policy needs a name ({found}); known: {', '.join(sorted(POLICIES))}")
    return name, {str(key): value for key, value in settings.items() if key != "name"}
