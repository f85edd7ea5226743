"""Another name for :mod:`monitor`, for scripts that have a module of that name beside them.

``python train.py`` puts the folder of the script first in ``sys.path``, so a ``monitor.py`` or ``store.py`` there is
imported in place of the package. This module imports the packages of Driftpoint from its own folder, and names the
files that stand in their way. It is a module, not a package: ``driftpoint.attach`` is ``monitor.attach``."""

import importlib.util
import logging
import runpy
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monitor import *  # noqa: F403

_ROOT = Path(__file__).parent
_ADVICE = "rename that file, or move it into a package"


def _import_own(name: str) -> None:
    """Import a package from the folder of this file, wherever ``sys.path`` leads first."""
    known = sys.modules.get(name)
    found = importlib.util.find_spec(name) if known is None else known.__spec__
    place = None if found is None or found.origin is None else Path(found.origin).resolve()
    own = (_ROOT / name / "__init__.py").resolve()
    if known is not None and place != own:
        raise ImportError(f"{place or known} was imported as `{name}`, which is a package of Driftpoint: {_ADVICE}")
    if known is None:
        spec = PathFinder.find_spec(name, [str(_ROOT)])
        if spec is None or spec.loader is None:
            raise ImportError(f"there is no package {name} in {_ROOT}: install Driftpoint again")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if place not in (None, own):
            text = "%s has the name of a package of Driftpoint, which `import %s` gives from now on: %s"
            logging.getLogger("driftpoint").warning(text, place, name, _ADVICE)


for _name in ("store", "policies", "monitor", "merger", "deploy"):
    _import_own(_name)

__all__ = sys.modules["monitor"].__all__


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(sys.modules["monitor"], name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if __name__ == "__main__":  # python -m driftpoint, the same as ``driftpoint``
    runpy.run_module("deploy.cli", run_name="__main__")
