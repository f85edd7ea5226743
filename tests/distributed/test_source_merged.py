"""What a merge wrote is a source again, in all that became of it since: converted, trained on, taken apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from merger.merge import merge
from store.errors import MergeError
from tests.support.foreign import convert, train_stock

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASE = "zero2-fp32-round-robin"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 3 of two ranks, and step 3 merged into ``merged/saved``."""
    directory = tmp_path_factory.mktemp("merged")
    train_stock(directory, 2, [CASE])
    merge(directory / CASE / "saved", directory / "merged" / "saved")
    return directory


def test_what_the_converter_scrambled_is_refused_whoever_wrote_what_it_read(trained: Path, tmp_path: Path) -> None:
    convert(trained, ["merged"])
    with pytest.raises(MergeError, match=r"round_robin_gradients.*Merge the checkpoint that it was made from"):
        merge(trained / "merged" / "universal", tmp_path / "out")
