"""Policies of the user's own: found where settings name them, and told plainly where they cannot be had."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from policies.base import Budget, History, UnitStats
from policies.budget import spends
from policies.builtin import Observe
from policies.registry import POLICIES, UserPolicy, anchored, policy_from
from store.errors import ConfigError
from store.names import Unit
from tests.support.policies import HEAD, SOUND, policy_file, selecting

STATS = tuple(UnitStats(Unit(f"layer.{at}", "fp32"), at, True, 8, 0.1, 5) for at in range(4))
ROOT = Path(__file__).parents[3]


def saved(settings: Any, commits: int) -> list[int]:
    decision = policy_from(settings).select(STATS, Budget(), History(10, commits))
    return [one.position for one in STATS if decision.choices[one.unit].saved]


def test_a_class_in_a_file(tmp_path: Path) -> None:
    reference = policy_file(tmp_path)
    policy = policy_from(reference)
    assert isinstance(policy, UserPolicy)
    assert (policy.name, policy.needs_drift, spends(policy)) == ("mine", False, False)
    assert saved(reference, 1) == [1, 3]
    assert saved({"name": reference, "every": 4}, 1) == [1]


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert saved("my.py:Mine", 0) == saved("./my.py:Mine", 0) == [0, 2]


def test_a_file_that_changed_is_taken_anew(tmp_path: Path) -> None:
    first = policy_from(policy_file(tmp_path))
    again = policy_from(policy_file(tmp_path))
    changed = policy_from(policy_file(tmp_path, SOUND.replace("every: int = 2", "every: int = 4")))
    assert type(first.inner) is type(again.inner) is not type(changed.inner)  # type: ignore[attr-defined]
    assert changed.inner.every == 4  # type: ignore[attr-defined]
    assert [path.name for path in tmp_path.iterdir()] == ["my.py"]


def test_a_class_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kept_policies"
    package.mkdir()
    (package / "__init__.py").touch()
    policy_file(package, name="turns.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert saved({"name": "kept_policies.turns:Mine", "every": 4}, 2) == [2]


def registered(folder: Path, name: str, entry: str, package: str) -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[driftpoint.policies]\n{name} = {entry}\n")


def test_a_registered_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy_file(tmp_path, name="registered_turns.py")
    registered(tmp_path, "in-turns", "registered_turns:Mine", "turns")
    registered(tmp_path, "full", "registered_turns:Mine", "impostor")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert saved({"name": "in-turns", "every": 4}, 3) == [3]
    assert policy_from("full").name == "full"
    with pytest.raises(
        ConfigError, match=r"unknown policy 'in-turn': did you mean 'in-turns'\? Known: auto, budget, .*in-tur"
    ):
        policy_from("in-turn")
    registered(tmp_path, "in-turns", "another_module:Mine", "other")
    with pytest.raises(ConfigError, match="several installed packages register it, as another_module:Mine and regist"):
        policy_from("in-turns")


def test_the_running_script_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        HEAD + "print('begun')\n" + SOUND + "\nfrom policies.registry import policy_from\n"
        f"assert type(policy_from({str(script) + ':Mine'!r}).inner) is Mine\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    assert done.stdout == "begun\n"


def test_observe_goes_around_it(tmp_path: Path) -> None:
    policy = policy_from({"name": "observe", "inner": {"name": policy_file(tmp_path), "every": 3}})
    assert isinstance(policy, Observe) and policy.inner.name == "mine"


def test_a_configuration_s_folder_is_where_its_files_are(tmp_path: Path) -> None:
    home = Path.home()
    for given, there in [
        ("my.py:Mine", f"{tmp_path}/my.py:Mine"),
        ({"name": "sub/my.py:Mine", "a": 1}, {"name": f"{tmp_path}/sub/my.py:Mine", "a": 1}),
        ({"name": "observe", "inner": "my.py:Mine"}, {"name": "observe", "inner": f"{tmp_path}/my.py:Mine"}),
        ("~/my.py:Mine", f"{home}/my.py:Mine"),
        ("/else/my.py:Mine", "/else/my.py:Mine"),
        ("package.module:Mine", "package.module:Mine"),
        ("full", "full"),
        (5, 5),
    ]:
        assert anchored(given, tmp_path) == there


def test_it_is_shown_what_it_cannot_change(tmp_path: Path) -> None:
    policy = policy_from(policy_file(tmp_path, selecting("assert type(stats) is tuple")))
    policy.select(list(STATS), Budget(), History(1, 1))


@pytest.mark.parametrize(
    ("body", "settings", "message"),
    [
        (SOUND, {"evrey": 3}, "unknown parameter 'evrey': did you mean 'every'? Known: every, tag"),
        (SOUND.replace(" = 2", ""), {}, "missing a required argument: 'every'"),
        (selecting("pass"), {"a": 1}, "takes no parameters, and 'a' was given; remove it"),
        (selecting("", more="def __init__(self, *, alpha, beta=2): pass"), {}, "missing a required argument: 'alpha'"),
        (
            selecting("", more="def __init__(self, *, alpha=1, beta=2): pass"),
            {"betta": 3},
            "unknown parameter 'betta': did you mean 'beta'? Known: alpha, beta",
        ),
        (
            selecting("", more="def __init__(self, name): pass"),
            {},
            "missing a required argument: 'name'; `name:` in the settings is the policy's own name: rename",
        ),
        (
            selecting("", more="def __init__(self, a): raise ValueError('a is too small')"),
            {"a": 1},
            "cannot be made: it raised ValueError('a is too small') at my.py:11; fix that first",
        ),
        (
            "import no_such_thing",
            {},
            "it raised ModuleNotFoundError(\"No module named 'no_such_thing'\") at my.py:7; fix",
        ),
        ("def (:", {}, "my.py:Mine cannot be imported: it raised SyntaxError("),
        ("raise SystemExit(3)", {}, "cannot be imported: it raised SystemExit('3') at my.py:7; fix that first"),
        ("class Mind:\n    def select(self): pass", {}, "my.py has no Mine: did you mean 'Mind'?"),
        ("", {}, "my.py has no Mine, nor another class with select: define it there; docs/own-policies.md shows one"),
        ("def Mine(): pass", {}, "not a class; docs/own-policies.md shows one"),
        ("class Mine: pass", {}, "is no policy: it lacks name, needs_drift, select; docs/own-policies.md shows one"),
        (selecting("").replace('name = "mine"', ""), {}, "is no policy: it lacks name;"),
        (selecting("").replace('"mine"', "5"), {}, "its name must be a short text, not 5"),
        (selecting("").replace('"mine"', "'a\\nb'"), {}, "its name must be a short text, not 'a\\nb'"),
        (selecting("").replace('"mine"', '"full"'), {}, "it calls itself 'full', which is another policy"),
        (selecting("").replace("= False", "= None"), {}, "its needs_drift must be True or False, not None"),
        (selecting("", more="spends = 1"), {}, "its spends must be True or False, not 1"),
        (
            selecting("", more="def __getattr__(self, word): 1 / 0").replace('name = "mine"', ""),
            {},
            "ZeroDivisionError(",
        ),
        ('class Mine:\n    name = "mine"\n    needs_drift = False\n    select = 5', {}, "its select must be a method"),
    ],
)
def test_what_is_no_policy_is_told(tmp_path: Path, body: str, settings: dict[str, Any], message: str) -> None:
    reference = policy_file(tmp_path, body)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        policy_from({"name": reference, **settings})
    assert "my.py" in str(caught.value)


def test_a_file_that_fails_can_be_mended(tmp_path: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError, match="cannot be imported"):
        policy_from(policy_file(tmp_path, SOUND + "raise RuntimeError"))
    assert set(sys.modules) == before
    assert policy_from(policy_file(tmp_path)).name == "mine"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "my.py:Mine",
            "policy my.py:Mine: cannot read {there}/my.py (No such file or directory): a path is taken from the",
        ),
        ("./:Mine", "cannot read {there} (Is a directory)"),
        (
            "my.py",
            "unknown policy 'my.py': did you mean 'parity'? Known: {known}; a class of your own is named as my.py:Mine",
        ),
        ("my.py:", "after the last colon comes the name of a class, such as my.py:Mine"),
        ("my.py:Mine()", "after the last colon comes the name of a class"),
        (":Mine", "after the last colon comes the name of a class"),
        (
            "no_such_module:Mine",
            "there is no module no_such_module: is it installed, or on PYTHONPATH? A file is named by",
        ),
        ("no_such.module:Mine", "there is no module no_such: is it installed"),
        ("json.no_such:Mine", "there is no module json.no_such"),
        ("json:Mine", "has no Mine, nor another class with select"),
    ],
)
def test_what_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    known = ", ".join(sorted(POLICIES))
    with pytest.raises(ConfigError, match=re.escape(message.format(there=tmp_path, known=known))):
        policy_from(settings)


def test_a_module_that_fails_inside_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_a_policy.py").write_text("import no_such_thing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be imported: it raised ModuleNotFoundError.* at half_a_policy.py:1"):
        policy_from("half_a_policy:Mine")
