"""Versions of a state as a store holds them, read back and put into a learner slot by slot, each from its own step.

For states that no resume would give: weights of one step with moments of another. What is read has been checked
against its hashes; which layer a parameter belongs to is what the manifest says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.learner import Learner
from store.catalog import open_catalog
from store.fragments import FragmentReader
from store.names import WEIGHTS, Unit
from store.resolve import resolve
from store.storage.local import LocalFiles

Values = dict[str, torch.Tensor]
"""By parameter, flat, float32."""


def stored_at(root: Path, step: int) -> Mapping[Unit, Values]:
    """What a resume from the save of ``step`` would give, of all units that move."""
    files = LocalFiles(root)
    catalog = open_catalog(files)
    save = next(one for one in catalog.saves() if one.step == step)
    found: dict[Unit, Values] = {}
    for unit, version in resolve(catalog, save).versions.items():
        if not version.record.moving:
            continue
        for source in version.sources:
            chunks = [np.asarray(chunk).view(np.float32) for chunk in FragmentReader(files, source).chunks()]
            found.setdefault(unit, {})[source.entry.fqn] = torch.from_numpy(np.concatenate(chunks).copy())
    return found


@torch.no_grad()
def put(learner: Learner, values: Mapping[Unit, Values]) -> None:
    """Into the model and its optimizer, which must have taken a step."""
    parameters = dict(learner.model.named_parameters())
    for unit, held in values.items():
        for name, flat in held.items():
            live = parameters[name]
            target = live if unit.slot == WEIGHTS else learner.optimizer.state[live][unit.slot]
            target.copy_(flat.view_as(target))


def drift(new: Mapping[Unit, Values], old: Mapping[Unit, Values]) -> dict[Unit, float]:
    """Of each unit of ``old``: distance of ``new`` to it, relative to it."""
    return {
        unit: _norm({name: new[unit][name] - flat for name, flat in held.items()}) / max(_norm(held), 1e-38)
        for unit, held in old.items()
    }


def _norm(values: Values) -> float:
    return float(torch.stack([one.double().square().sum() for one in values.values()]).sum().sqrt())
