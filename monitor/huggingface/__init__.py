"""Integrate with the Hugging Face Trainer and Accelerate. transformers is imported only in this package."""

from collections.abc import Callable
from typing import Any


def patch_method(owner: type[Any], replacement: Callable[..., Any]) -> Callable[[], None]:
    """Replace the method with the name of ``replacement``.

    Return a function that restores the original method, unless it was patched again since."""
    name = replacement.__name__
    original = getattr(owner, name)
    setattr(owner, name, replacement)

    def restore() -> None:
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)

    return restore
