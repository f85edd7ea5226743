"""``driftpoint init`` and ``schema``: what is written loads, means what was asked for, and replaces nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from monitor.config.load import Config, config_schema, load_config
from tests.support.cli import Here
from tests.support.stores import StoreBuilder


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _listed() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def test_it_writes_the_defaults(here: Here) -> None:
    answer = here("init")
    assert (answer.code, answer.err) == (0, "")
    text = Path("driftpoint.yaml").read_text()
    assert load_config("driftpoint.yaml") == Config()
    assert len(text.splitlines()) <= 120
    assert text.startswith("# yaml-language-server: $schema=./driftpoint.schema.json\n")
    assert json.loads(Path("driftpoint.schema.json").read_text()) == config_schema()
    assert _listed() == ["driftpoint.schema.json", "driftpoint.yaml"]


def test_it_begins_with_the_settings_that_people_set(here: Here) -> None:
    here("init", "--encoding", "compact", "--policy", "budget", "--bytes-per-hour", "2e10")
    first, advanced = Path("driftpoint.yaml").read_text().split("\n# Advanced\n")
    keys = [re.findall(r"^#?(\w+):", text, re.M) for text in (first, advanced)]
    assert keys[0] == ["store", "every", "policy", "encoding", "staging", "memory", "metrics", "retention"]
    assert keys[1][0] == "encode" and {*keys[0], *keys[1]} == {*Config.model_fields}
    assert yaml.safe_load(first) == {
        "store": "./driftpoint-checkpoints", "every": "auto", "policy": "budget", "encoding": "compact"
    }  # fmt: skip
    assert yaml.safe_load(advanced) == {"budget": {"bytes_per_hour": 2e10}}


def test_what_is_commented_out_is_every_other_default(here: Here) -> None:
    here("init")
    text = Path("driftpoint.yaml").read_text()
    everything = re.sub(r"^#(?=(?:  )*\w)", "", text, flags=re.M)
    assert yaml.safe_load(everything) == Config().model_dump()
    Draft202012Validator(config_schema()).validate(yaml.safe_load(everything))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--every", "50", "--store", "/data/a b: c"), {"every": 50, "store": "/data/a b: c"}),
        (("--every", "auto", "--encoding", "compact"), {"every": "auto", "encoding": "compact"}),
        (("--policy", "budget", "--bytes-per-hour", "2e10"), {"policy": "budget", "budget": {"bytes_per_hour": 2e10}}),
        (("--policy", "threshold", "--set", "threshold=0.01"), {"policy": {"name": "threshold", "threshold": 0.01}}),
    ],
)
def test_it_writes_what_was_asked_for(here: Here, given: tuple[str, ...], expected: dict[str, object]) -> None:
    assert here("init", "-o", "mine.yaml", "--no-schema", *given).code == 0
    assert load_config("mine.yaml") == Config.model_validate(expected)
    assert "yaml-language-server" not in Path("mine.yaml").read_text()
    everything = yaml.safe_load(re.sub(r"^#(?=(?:  )*\w)", "", Path("mine.yaml").read_text(), flags=re.M))
    assert Config.model_validate(everything) == load_config("mine.yaml")


def test_after_the_first_start_the_store_must_exist(here: Here) -> None:
    here("init", "-o", "first.yaml", "--no-schema", "--store", "runs/a")
    assert load_config("first.yaml").creates_store
    later = "store: {path: runs/a, create: false}"
    assert later in Path("first.yaml").read_text()
    assert not load_config(yaml.safe_load(later)).creates_store
    StoreBuilder(Path("runs/a"))
    here("init", "-o", "second.yaml", "--no-schema", "--store", "runs/a")
    second = load_config("second.yaml")
    assert (second.store_path, second.creates_store) == ("runs/a", False)


def test_nothing_is_replaced(here: Here) -> None:
    Path("driftpoint.yaml").write_text("every: 7\n")
    answer = here("init")
    assert answer.code == 2
    assert answer.err == "error: driftpoint.yaml already exists and is not replaced: name another file with -o\n"
    assert _listed() == ["driftpoint.yaml"]
    assert Path("driftpoint.yaml").read_text() == "every: 7\n"


def test_a_schema_of_somebody_else_is_not_replaced_and_ours_is(here: Here) -> None:
    Path("driftpoint.schema.json").write_text("{}")
    answer = here("init")
    assert (answer.code, _listed()) == (2, ["driftpoint.schema.json"])
    assert "--no-schema" in answer.err
    Path("driftpoint.schema.json").write_text(json.dumps({"title": config_schema()["title"], "of": "an older release"}))
    assert here("init").code == 0
    assert json.loads(Path("driftpoint.schema.json").read_text()) == config_schema()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--policy", "ful"), "did you mean 'full'?"),
        (("--every", "0"), "every: it must be a number of steps >= 1, or auto"),
        (("--encoding", "tiny"), "encoding: unknown 'tiny'"),
        (("--policy", "budget"), "add --bytes-per-hour"),
        (("--policy", "threshold"), "threshold"),
        (("--set", "k=2"), "name the policy with --policy"),
        (("--bytes-per-hour", "1e9"), "set `policy: budget`"),
    ],
)
def test_what_makes_no_sense_is_not_written(here: Here, given: tuple[str, ...], told: str) -> None:
    answer = here("init", *given)
    assert (answer.code, answer.out, _listed()) == (2, "", [])
    assert told in answer.err and answer.err.count("\n") == 1


def test_a_folder_that_is_not_there(here: Here) -> None:
    answer = here("init", "-o", "no/such/folder.yaml")
    assert (answer.code, answer.err) == (1, "error: cannot write no/such/folder.yaml: No such file or directory\n")


def test_as_json(here: Here) -> None:
    assert here("init", "--json").json == {"files": ["driftpoint.yaml", "driftpoint.schema.json"]}


def test_schema_prints_it(here: Here) -> None:
    assert here("schema").json == here("schema", "--json").json == config_schema()
