"""Register the encodings of fragments, with their sizes and their decoding in numpy.

``monitor/save/torch_codecs.py`` encodes; numpy encoders that the tests compare it with are in ``tests/support``.

An encoding has a size known in advance; packing (:mod:`store.encoding.compression`) makes it smaller without loss.
Unknown names are refused at decisions and when a part is read. ``docs/encodings.md`` defines encodings and bounds."""

from store.encoding.base import BLOCK, CHUNK, Encoding, Lane, Raw, chunk_sizes, itemsize
from store.encoding.bfloat16 import BF16, BF16_INT8, BF16_SCALED, Bf16, Bf16Int8, ScaledBf16
from store.encoding.int8 import INT8_BLOCK, INT8_SQRT_BLOCK, Int8Block, Int8SqrtBlock
from store.encoding.log2 import INT8_LOG2, Int8Log2
from store.encoding.shared_exponent import (
    INT8_SHARED_EXPONENT,
    INT8_SHARED_EXPONENT_128,
    INT16_SHARED_EXPONENT,
    Int8SharedExponent,
    Int8SharedExponent128,
    Int16SharedExponent,
)
from store.errors import NewerFormatError
from store.names import RAW

__all__ = ["BF16", "BF16_INT8", "BF16_SCALED", "BLOCK", "CHUNK", "ENCODINGS", "INT8_BLOCK", "INT8_LOG2"]
__all__ += ["INT8_SHARED_EXPONENT", "INT8_SHARED_EXPONENT_128", "INT8_SQRT_BLOCK", "INT16_SHARED_EXPONENT"]
__all__ += ["RAW", "WRITABLE", "Encoding", "Lane", "chunk_sizes", "encoding_named", "itemsize"]

_ALL: tuple[Encoding, ...] = (Raw(), Bf16(), Bf16Int8(), Int8Block(), Int8Log2(), Int8SqrtBlock())
_ALL += (Int8SharedExponent(), Int8SharedExponent128(), Int16SharedExponent())
ENCODINGS: dict[str, Encoding] = {encoding.name: encoding for encoding in _ALL}

WRITABLE: tuple[str, ...] = tuple(sorted(ENCODINGS.keys() - {INT8_SQRT_BLOCK}))
"""Names of the encodings that this release stores; others are only read."""

_OF_GRADIENTS: dict[str, Encoding] = {BF16_SCALED: ScaledBf16()}  # for the journal, of values that it can hold


def encoding_named(name: str, where: str = "") -> Encoding:
    """Return a registered encoding. Raises NewerFormatError, naming ``where``, for unknown names."""
    found = ENCODINGS.get(name) or _OF_GRADIENTS.get(name)
    if found is None:
        place = f"{where}: " if where else ""
        raise NewerFormatError(
            f"{place}encoding {name!r} is unknown to this release, which knows {', '.join(sorted(ENCODINGS))}; run "
            "`pip install --upgrade driftpoint`"
        )
    return found
