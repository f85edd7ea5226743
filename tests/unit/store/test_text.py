"""Messages about many things stay short."""

from __future__ import annotations

import pytest

from merger.recipe.sources import raise_all
from store.errors import ConfigError, DriftpointError, MergeError
from store.text import counted, listed


def test_a_handful_and_how_many_more() -> None:
    assert listed([]) == "" and listed("ab") == "a, b" and listed("abc") == "a, b, c"
    assert listed("abcd") == "a, b, c and 1 more"
    assert listed("abcd", 2, "; ") == "a; b; and 2 more"
    assert listed("abcd", 2, " and ") == "a and b and 2 more"


def test_a_number_and_its_noun() -> None:
    assert [counted(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted(1.0, "step") == "1 step" and counted(1e7, "step") == "1e+07 steps"
    assert counted(10_000_000, "element") == "10000000 elements"
    assert counted(1, "tensor or buffer", "tensors and buffers") == "1 tensor or buffer"


def raised(*texts: str) -> str:
    with pytest.raises(DriftpointError) as caught:
        raise_all([MergeError(texts[0]), *(ConfigError(text) for text in texts[1:])])
    assert caught.type is MergeError
    return str(caught.value)


def test_errors_together_are_told_each_once() -> None:
    raise_all([])
    assert raised("one") == "one"
    assert raised("one", "one", "one", "one", "one") == "one"
    assert raised("one", "two", "one") == "one; two"
    assert raised("one", "two", "three", "four", "two", "five") == "one; two; three; and 2 more, which --plan lists"
