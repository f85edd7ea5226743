from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import DamagedError
from store.schema import as_json, digest, seal, unseal

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_round_trip(body: object) -> None:
    found = unseal(seal(body), "it")
    assert found == body
    assert repr(found) == repr(body)  # the order of keys, the sign of zero, int or float


@given(JSON, st.data())
def test_every_changed_byte_is_found(body: object, data: st.DataObject) -> None:
    sealed = bytearray(seal(body))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedError):
        unseal(bytes(sealed), "it")


@given(JSON, st.data())
def test_every_cut_and_every_addition_is_found(body: object, data: st.DataObject) -> None:
    sealed = seal(body)
    cut = data.draw(st.integers(0, len(sealed) - 1))
    for wrong in (sealed[:cut], sealed[cut + 1 :], sealed + b"\n", b" " + sealed, sealed + sealed, bytes(len(sealed))):
        with pytest.raises(DamagedError, match="it "):
            unseal(wrong, "it")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_json_has_not_is_refused_when_writing(number: float) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        seal({"a": [number]})


def sealed(text: bytes) -> bytes:
    return b'{"body":' + text + b',"xxh3_128":"' + digest(text).encode() + b'"}\n'


@pytest.mark.parametrize(
    "text",
    [
        b"x",
        b"{",
        b"{} {}",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b"\xff",
        b"9" * 5000,
    ],
    ids=["word", "half", "two", "deep list", "deep object", "no text", "long number"],
)
def test_a_right_checksum_over_what_is_no_json(text: bytes) -> None:
    with pytest.raises(DamagedError, match="it is not JSON"):
        unseal(sealed(text), "it")


def test_what_json_cannot_say_becomes_a_string() -> None:
    found = as_json({"inf": float("inf"), "minus": [-float("inf")], "nan": float("nan"), "path": Path("a"), "n": 1.5})
    assert found == {"inf": "inf", "minus": ["-inf"], "nan": "nan", "path": "a", "n": 1.5}
    seal(found)
