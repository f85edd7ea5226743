from __future__ import annotations

import pytest

from deploy.format import count_text, drift_text, kind_text, plural, printable, size_text, tail


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 1024, "10.0 KiB"),
        (1023 * 1024, "1023 KiB"),
        (1024 * 1024 - 1, "1.00 MiB"),
        (3 << 30, "3.00 GiB"),
        (153 << 40, "153 TiB"),
        (5000 << 60, "5000 EiB"),
    ],
)
def test_sizes_are_binary_and_have_three_digits(count: int, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1.00 k"), (999_600, "1.00 M"), (405_000_000_000, "405 G")]
)
def test_counts_are_decimal(count: int, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("drift", "text"),
    [
        (None, "?"),
        (0.0, "0"),
        (1.0, "1.00"),
        (0.1, "0.100"),
        (0.0123456, "0.0123"),
        (0.0006, "0.000600"),
        (1.2345e-5, "1.23e-05"),
        (123.4, "123"),
        (12345.0, "1.23e+04"),
    ],
)
def test_drift_has_three_significant_digits(drift: float | None, text: str) -> None:
    assert drift_text(drift) == text


def test_control_characters_are_spelled_out() -> None:
    assert printable("layer\x1b[2J\n") == "layer\\x1b[2J\\n"
    assert printable("Schicht-ä") == "Schicht-ä"


def test_names_are_cut_at_their_start() -> None:
    assert tail("model.layers.12", 20) == "model.layers.12"
    assert tail("model.layers.12", 10) == "…layers.12"
    assert len(tail("model.layers.12", 10)) == 10


def test_plural() -> None:
    assert [plural(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_a_composite_says_how_far_it_is_from_exact() -> None:
    assert kind_text(exact=True, max_staleness=0, max_drift=0.0) == "exact"
    text = kind_text(exact=False, max_staleness=1, max_drift=None)
    assert text == "composite: layers up to 1 step old, drift up to ?"
