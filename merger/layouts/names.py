"""Names of a model's state dict without the wrappers that happened to be around the model in training.

``torch.compile`` puts ``_orig_mod`` into names, DistributedDataParallel puts ``module`` before them; whoever loads the
weights has neither. It does not know files or dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable

from merger.checkpoint import Checkpoint
from store.errors import MergeError

_COMPILED, _PARALLEL = "_orig_mod", "module."


def model_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Canonical fqn by every name in the model's state dict, wrappers removed, in order; tied ones under each name.

    Buffers that the state dict leaves out are left out. MergeError where two tensors would share a name.
    """
    canonical = {alias: fqn for fqn, record in checkpoint.tensors.items() for alias in record.aliases}
    names = list(checkpoint.facts.get("state_dict_names") or [*checkpoint.tensors, *canonical])
    out: dict[str, str] = {}
    for name, bare in zip(names, unwrapped(names), strict=True):
        fqn = canonical.get(name, name)
        if out.setdefault(bare, fqn) != fqn:
            raise MergeError(
                f"without the wrappers' prefixes two tensors of {checkpoint.origin} are called {bare}: {out[bare]} and "
                f"{fqn}; merge it with its own layout instead (native)"
            )
    return out


def bare_names(checkpoint: Checkpoint) -> dict[str, str]:
    """For every canonical fqn its first name without wrappers."""
    fqns = list(checkpoint.tensors)
    return dict(zip(fqns, unwrapped(fqns), strict=True))


def unwrapped(names: Iterable[str]) -> list[str]:
    """``names`` without wrappers; ``module.`` goes only where all begin with it, since a model may have one itself."""
    found = [".".join(part for part in name.split(".") if part != _COMPILED) for name in names]
    while found and all(name.startswith(_PARALLEL) for name in found):
        found = [name.removeprefix(_PARALLEL) for name in found]
    return found
