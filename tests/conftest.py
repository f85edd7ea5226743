"""For all tests: in which order they come, and examples that are the same in every run, however slow the machine is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

LONGEST = (
    "test_merge_matrix.py",
    "test_memory_ranks.py",
    "test_kills.py",
    "test_demo.py",
    "test_source_hostile.py",
    "test_layout_deepspeed.py",
    "test_docs_scripts.py",
    "test_preemption.py",
    "test_ckpt_chaos.py",
    "test_memory_kills.py",
    "test_dashboards.py",
    "test_launch_slurm.py",
    "test_resume_bitwise.py",
    "test_staging_consistency.py",
    "test_corruption.py",
    "test_object_sweep.py",
    "test_simulated_crash.py",
    "test_merge_deepspeed.py",
    "test_power_loss.py",
    "test_run_recovers.py",
    "test_hf_trainer.py",
)
"""Files that take longest, in that order."""

SLOWNESS = [HealthCheck.too_slow, HealthCheck.data_too_large]

# No deadline: how long an example takes is the machine's doing. And no chance: what fails must fail again.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=SLOWNESS)
# pytest --hypothesis-profile=search: for examples that nobody has seen yet.
settings.register_profile("search", deadline=None, suppress_health_check=SLOWNESS)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no process is left alone with one at the end."""
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
