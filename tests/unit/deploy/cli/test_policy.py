"""``driftpoint policy check``: what it finds of sound and broken policies, however they are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import Answer, Here, driftpoint, environment
from tests.support.policies import SOUND, policy_file, selecting
from tests.support.slow import others_slow
from tests.unit.deploy.cli.test_app import BLOCKED

PROMISES = 12


def outcomes(answer: Answer) -> dict[str, str]:
    return {one["promise"]: one["outcome"] for one in answer.json["checks"]}


def test_a_sound_policy(tmp_path: Path) -> None:
    answer = driftpoint("policy", "check", policy_file(tmp_path), "--set", "every=3", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert (answer.json["policy"], answer.json["holds"], len(answer.json["checks"])) == ("mine", True, PROMISES)
    assert {*outcomes(answer).values()} == {"holds", "not checked"}
    assert "within 3 decisions" in answer.out


def test_a_broken_one_is_told_in_a_table(tmp_path: Path) -> None:
    answer = driftpoint("policy", "check", policy_file(tmp_path, selecting("raise ValueError('no')")), columns=120)
    assert answer.code == 1
    assert "it raised ValueError('no') at my.py:" in " ".join(answer.out.split())
    assert answer.out.splitlines()[-1].startswith("policy mine fails ")


def test_order_of_hashes_is_found_by_another_process(here: Here, tmp_path: Path) -> None:
    body = selecting(
        "first = next(iter({one.unit.layer for one in stats}), None)\n"
        "return Decision({one.unit: Choice('raw', f'{first} is first') for one in stats})"
    )
    answer = here("policy", "check", policy_file(tmp_path, body), "--json")
    assert answer.code == 1
    assert outcomes(answer)["same answer in another process"] == "broken"


def test_what_the_user_s_code_prints_is_kept_from_stdout(tmp_path: Path) -> None:
    body = "print('loaded')\n" + SOUND.replace("turn = ", "print('asked'); turn = ")
    answer = driftpoint("policy", "check", policy_file(tmp_path, body), "--json")
    assert answer.code == 0 and answer.json["holds"]
    assert "loaded" in answer.err and "asked" in answer.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    others_slow(
        [
            (["budget"], "holds"),
            (["threshold", "--set", "threshold=1e-2", "--set", "slots={exp_avg: 0.5}"], "not checked"),
            (["filter", "--set", "auxiliary=interval", "--set", "n=1"], "not checked"),
            (["observe", "--set", 'inner={"name": "parity"}'], "not checked"),
        ]
    ),
)
def test_named_ones_without_torch(arguments: list[str], expected: str) -> None:
    command = [sys.executable, "-c", BLOCKED, "policy", "check", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = {one["promise"]: one["outcome"] for one in json.loads(done.stdout)["checks"]}
    assert found["keeps to the bytes at hand"] == expected
    assert found["same answer in another process"] == "holds"


@pytest.mark.slow
def test_a_configuration_with_its_bounds(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "settings"
    folder.mkdir()
    policy_file(folder, selecting("return Decision({one.unit: Choice(None, 'never') for one in stats})"))
    path = folder / "driftpoint.yaml"
    path.write_text("policy: my.py:Mine\nevery: 10\n")
    monkeypatch.chdir(tmp_path)
    answer = here("policy", "check", path, "--json")
    assert (answer.code, outcomes(answer)["no layer starves"]) == (0, "take note")
    path.write_text("policy: my.py:Mine\nevery: 10\nbounds: {max_staleness: 50}\n")
    answer = here("policy", "check", path, "--json")
    assert (answer.code, outcomes(answer)["no layer starves"]) == (0, "holds")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["nonsense"], "unknown policy 'nonsense': did you mean"),
        (["my.py:Mine"], "cannot read"),
        (["parity", "--set", "k=1"], "policy parity: k must be an integer >= 2, not 1"),
        (["parity", "--set", "k"], "--set takes key=value, such as --set k=4, not 'k'"),
        (["parity", "--set", "k=0100"], "--set k=0100: write numbers as 12, 0.5 or 1e-3"),
        (["parity", "--set", "k=2", "--set", "k=3"], "--set k=3: 'k' was given twice"),
        (["parity", "--set", "name=full"], "'name' names the policy itself"),
        (["threshold", "--set", "threshold={a"], "neither JSON nor YAML"),
        (["some.yaml", "--set", "k=2"], "edit the parameters in some.yaml itself"),
        (["some.yaml"], "cannot read the configuration some.yaml"),
        ([], "see `driftpoint policy check --help`"),
    ],
)
def test_what_cannot_be_tried(here: Here, arguments: list[str], value: str) -> None:
    answer = here("policy", "check", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert value in answer.err and answer.err.count("\n") == 1
    assert here("policy", "check", *arguments, "--json").json["error"]["message"] in answer.err


def test_the_group_alone_shows_what_there_is(here: Here) -> None:
    answer = here("policy")
    assert answer.code == 2 and "check" in answer.out + answer.err
