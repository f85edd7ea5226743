"""For all tests: examples that are the same in every run, however slow the machine is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SLOWNESS = [HealthCheck.too_slow, HealthCheck.data_too_large]

# No deadline: how long an example takes is the machine's doing. And no chance: what fails must fail again.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=SLOWNESS)
# pytest --hypothesis-profile=search: for examples that nobody has seen yet.
settings.register_profile("search", deadline=None, suppress_health_check=SLOWNESS)
settings.load_profile("suite")
