"""The notebook that looks at drift: what it draws is what the trace says, and what it claims holds in its run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch

from tests.support.notebooks import executed

pytestmark = pytest.mark.slow

Names = dict[str, Any]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Names]:
    """What the notebook leaves behind; ``figures`` are its pictures."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    state = torch.random.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("notebook")))
        patch.setattr(sys, "path", list(sys.path))
        plt.close("all")
        found = executed("drift_of_a_run")
        found["figures"] = [plt.figure(number) for number in plt.get_fignums()]
        yield found
        plt.close("all")
        torch.random.set_rng_state(state)


def test_the_map_is_the_trace(names: Names) -> None:
    lines = [json.loads(line) for line in names["TRACE"].read_text().splitlines() if line]
    units = next(line["units"] for line in lines if line["kind"] == "job" and line["units"])
    layers = [unit["layer"] for unit in units if unit["slot"] == "fp32"]
    assert layers == names["layers"] and len(layers) >= 6
    moved = {line["step"]: line["since"] for line in lines if line["kind"] == "moved"}
    assert names["decisions"] == sorted(moved) and len(moved) > 50
    for row, layer in enumerate(layers):
        at = next(i for i, unit in enumerate(units) if (unit["layer"], unit["slot"]) == (layer, "fp32"))
        drawn = names["heat"][row]
        expected = [since[str(max(map(int, since)))][at] / names["every"] for since in moved.values()]
        assert list(drawn) == pytest.approx(expected)
    (image,) = names["figures"][0].axes[0].get_images()
    assert np.asarray(image.get_array()) == pytest.approx(np.log10(names["heat"]))


def test_nothing_was_saved(names: Names) -> None:
    assert not (names["FOLDER"] / "store").exists()


def test_first_moments_drift_most(names: Names) -> None:
    found = {slot: median(values) for slot, values in names["by_slot"].items()}
    assert set(found) == {"fp32", "exp_avg", "exp_avg_sq"}
    assert max(found, key=found.__getitem__) == "exp_avg"
    assert found["exp_avg"] > 10 * found["fp32"]


def test_staleness_adds_up_between_a_walk_and_a_line(names: Names) -> None:
    assert set(names["powers"]) == set(names["layers"])
    assert all(0.2 < power < 1.2 for power in names["powers"].values())
    ages, values = names["growth"](names["layers"][0])
    assert len(ages) >= 4 and values == sorted(values)
