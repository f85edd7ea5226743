"""What a failed policy is said to have done: one printable line, whatever was raised."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.validation import failure_of


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_becomes_one_line_that_can_be_stored(text: str) -> None:
    what = failure_of(ValueError(text)).what
    assert what.startswith("raised ValueError(") and what.isprintable() and len(what) < 300
    what.encode()


def test_half_a_character_is_shown_as_its_number() -> None:
    assert failure_of(ValueError("a\nb \ud800")).what == "raised ValueError('a\\nb \\ud800')"


def test_an_error_without_a_text_has_none() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert failure_of(Mute()).what == "raised Mute('?')"
