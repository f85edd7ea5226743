"""``driftpoint estimate``: assumptions printed with their sources, and replayed as a recorded run is."""

from __future__ import annotations

import pytest

from tests.support.cli import Here

MODEL = ("estimate", "llama-8b", "--gpus", 64, "--hours", 2)


def test_it_prints_what_is_assumed_above_its_table(here: Here) -> None:
    answer = here(*MODEL, "-p", "{name: parity, k: 4}")
    assert answer.code == 0
    before, _, after = answer.out.partition("Assumed, not measured.")
    for word in ("8.0 G parameters", "64 GPUs", "guessed", "50,000 GPU-hours", "arXiv:2407.21783"):
        assert word in " ".join(before.split())
    assert "parity k=4" in after


def test_a_model_has_the_published_number_of_parameters(here: Here) -> None:
    for name, parameters in (("llama-8b", "8.0 G"), ("llama-70b", "70.6 G"), ("llama-405b", "405.9 G")):
        shown = here("estimate", name, "--gpus", 16384, "--hours", 1, "--json").json
        assert shown["assumed"]["Model"].startswith(f"{name}, {parameters} parameters")
        full = shown["configurations"][0]
        assert full["bytes"] / full["saves"] == pytest.approx(12e9 * float(parameters.split()[0]), rel=0.01)


def test_assumptions_can_be_set(here: Here) -> None:
    slow = here(*MODEL, "--step-seconds", 10, "--drift", 0.1, "--every", 10, "--json").json
    assert (slow["step_seconds"], slow["decisions"]) == (pytest.approx(10), 72)
    assert "(given)" in slow["assumed"]["Step"] and "drift 0.1" in slow["assumed"]["Weights"]
    assert "unknown model" in here("estimate", "gpt").err
    assert "fewer than two decisions" in here("estimate", "llama-8b", "--hours", 0.01).err


@pytest.mark.parametrize("value", ["nan", "inf", "0", "1e300"])
@pytest.mark.parametrize("option", ["--mtbf", "--step-seconds", "--learning-rate", "--hours", "--drift"])
def test_numbers_that_are_none_are_refused(here: Here, option: str, value: str) -> None:
    answer = here(*MODEL, option, value)
    assert (answer.code, answer.out) == (2, "")
    assert option in answer.err and len(answer.err.splitlines()) == 1


def test_more_decisions_than_can_be_replayed_are_refused(here: Here) -> None:
    answer = here("estimate", "llama-8b", "--hours", 1e9, "--step-seconds", 1e-9)
    assert (answer.code, answer.out) == (2, "")
    assert "100,000 decisions" in answer.err and len(answer.err.splitlines()) == 1


def test_what_cannot_be_estimated_is_one_line(here: Here) -> None:
    for options, told in (
        ((*MODEL, "--recommend"), "No such option: --recommend"),
        (("estimate",), "Missing argument 'MODEL'"),
        (("estimate", "gpt"), "unknown model 'gpt'"),
    ):
        answer = here(*options)
        assert (answer.code, answer.out) == (2, "")
        assert told in answer.err and len(answer.err.splitlines()) == 1


@pytest.mark.slow
def test_failures_are_as_often_as_on_so_many_gpus(here: Here) -> None:
    row = here(*MODEL, "--json").json["configurations"][0]
    assert [one["mtbf_hours"] for one in row["goodput"]] == [50_000 / 64, 4 * 50_000 / 64, 16 * 50_000 / 64]
    (one,) = here(*MODEL, "--mtbf", 5, "--json").json["configurations"][0]["goodput"]
    assert one["mtbf_hours"] == 5
