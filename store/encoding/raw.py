"""``raw``: the little-endian bytes as they are. Any dtype, nothing lost, nothing refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import Bytes, Lane, Values, check_size
from store.encoding.dtypes import itemsize, known
from store.names import RAW


@dataclass(frozen=True)
class Raw:
    """One lane, as wide as the dtype."""

    name: str = RAW
    lossless: bool = True
    relative_bound: float = 0.0

    def applies(self, dtype: str) -> bool:
        """Any dtype that has a size."""
        return known(dtype)

    def stored_bytes(self, numel: int, dtype: str) -> int:
        """See :class:`store.encoding.base.Encoding`."""
        return numel * itemsize(dtype)

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        """See :class:`store.encoding.base.Encoding`."""
        return (Lane(numel, itemsize(dtype)),)

    def encode(self, values: Values) -> Bytes:
        """A view of the values' bytes; a copy only where they are not contiguous. Takes bytes too."""
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def decode(self, data: Bytes, numel: int, dtype: str) -> Values:
        """The bytes themselves, as uint8: numpy has no type for some dtypes (BF16, F8), so the caller views them."""
        check_size(self, data, numel, dtype)
        return data

    def error_bound(self, values: Values) -> NDArray[np.float64]:
        """Zero everywhere."""
        return np.zeros(values.size)
