"""For all tests: in which order they come, examples that are the same in every run, however slow the machine is, and
bytecode, which is kept of the tests themselves only.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

LONGEST = (
    "test_ckpt_chaos.py",
    "test_object_sweep.py",
    "test_merge_matrix.py",
    "test_kills.py",
    "test_policy.py",
    "test_docs_scripts.py",
    "test_supervisor.py",
    "test_simulated_crash.py",
    "test_memory_ranks.py",
    "test_server_faults.py",
    "test_demo.py",
    "test_adapter_state.py",
    "test_layout_deepspeed.py",
    "test_server.py",
    "test_meshes.py",
    "test_distributed_timeout.py",
    "test_supervisor_signals.py",
    "test_corruption.py",
    "test_staging_consistency.py",
    "test_launch_slurm.py",
    "test_precision.py",
    "test_dashboards.py",
    "test_source_hostile.py",
    "test_memory_kills.py",
    "test_preemption.py",
    "test_merge_deepspeed.py",
    "test_mutants.py",
    "test_resume_bitwise.py",
    "test_sigkill_sweep.py",
    "test_memory_sweep.py",
    "test_power_loss.py",
    "test_hf_trainer.py",
    "test_hf_kills.py",
    "test_memory_peers.py",
    "test_fsdp2.py",
    "test_supervised_torchrun.py",
)
"""Files that take longest, in that order."""

for scheduler in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"):
    os.environ.pop(scheduler, None)  # where it is set, SIGTERM is heeded

SLOWNESS = [HealthCheck.too_slow, HealthCheck.data_too_large]

# No deadline: how long an example takes is the machine's doing. And no chance: what fails must fail again.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=SLOWNESS)
# pytest --hypothesis-profile=search: for examples that nobody has seen yet.
settings.register_profile("search", deadline=None, suppress_health_check=SLOWNESS)
settings.load_profile("suite")

sys.dont_write_bytecode = False  # until all tests are collected: the next run need not compile them again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no process is left alone with one at the end."""
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    # A source that a test writes twice within a second, in the same size, would be taken for the first one.
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
