from __future__ import annotations

from typing import Any

import pytest

from merger.checkpoint import DEFAULT_CLIPPING, gradient_clipping


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ({"gradient_clipping": 0.05}, 0.05),
        ({"gradient_clipping": 0}, 0.0),
        ({}, DEFAULT_CLIPPING),
        ({"gradient_clipping": "auto"}, DEFAULT_CLIPPING),
        ("elsewhere.json", DEFAULT_CLIPPING),
    ],
)
def test_the_bound_that_a_configuration_means(config: Any, bound: float) -> None:
    assert gradient_clipping(config) == bound


def test_the_default_is_deepspeeds() -> None:
    constants = pytest.importorskip("deepspeed.runtime.constants")
    assert constants.GRADIENT_CLIPPING_DEFAULT == DEFAULT_CLIPPING
