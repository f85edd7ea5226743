"""What is published of settings is made from the models that validate them: nobody writes it twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from monitor.config.load import ADVANCED, COMMON, Config, config_schema, load_config
from store.errors import ConfigError
from tests.support.cli import ROOT
from tests.support.settings_page import PAGE, SCHEMA, documented, page, schema_text

EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.yaml"))


def test_the_page_has_every_setting_with_its_default_and_meaning() -> None:
    assert PAGE.read_text() == page(), "run `make settings`"
    assert yaml.safe_load(documented([*COMMON, *ADVANCED])) == Config().model_dump()


def test_the_page_begins_with_the_settings_that_people_set() -> None:
    first, advanced = PAGE.read_text().split("\n## Advanced\n")
    assert list(yaml.safe_load(first.split("```")[1].removeprefix("yaml"))) == list(COMMON)
    assert list(yaml.safe_load(advanced.split("```")[1].removeprefix("yaml"))) == list(ADVANCED)
    assert len("".join(first.split("```")[:2]).splitlines()) <= 40  # a screen


def test_the_published_schema_is_that_of_the_code() -> None:
    assert SCHEMA.read_text() == schema_text(), "run `make settings`"


def test_every_setting_is_described() -> None:
    bare = [path for path, field in _fields(Config) if not field.description]
    assert bare == []


def _fields(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            assert (type(field.default).__doc__ or "").strip(), name
            yield from _fields(type(field.default), f"{name}.")
        else:
            yield f"{above}{name}", field


def _validator() -> Draft202012Validator:
    Draft202012Validator.check_schema(config_schema())
    return Draft202012Validator(config_schema())


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_the_schema_takes_our_examples(path: Path) -> None:
    load_config(path)
    _validator().validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"every": 50, "policy": {"name": "threshold", "threshold": 0.01}},
        {"every": "auto", "policy": "my.py:Mine", "encoding": {"exp_avg": "int8-block"}},
        {"policy": "budget", "budget": {"bytes_per_hour": 2e10}, "packing": 3, "encoding": "compact"},
        {"memory": {"enabled": True, "encoding": "careful", "versions": 1}, "preemption": {"signals": []}},
    ],
)
def test_what_the_schema_takes(values: dict[str, Any]) -> None:
    _validator().validate(values)
    Config.model_validate(values)


@pytest.mark.parametrize(
    "values",
    [
        {"evry": 5},
        {"every": 0},
        {"every": "often"},
        {"encoding": "tiny"},
        {"encoding": {"exp_avg": "int4"}},
        {"metrics": {"port": 70000}},
        {"retention": {"keeplast": 5}},
        {"preemption": {"signals": ["SIGKILL"]}},
        {"packing": 20},
    ],
)
def test_what_it_refuses(values: dict[str, Any]) -> None:
    assert not _validator().is_valid(values)


ODD: list[Any] = [
    *(True, False, None, -1, 0, 1, 2, 3, 5, 19, 20, 64, 256, 257, 3600, 3601, 65535, 65536, 100_001, 10**7, 1 << 40),
    *(-0.5, 0.0, 0.5, 1.0, 1.5, 5.0, 1e6, 1e13, "", "a", "a:b", "on", "auto", "none", "raw", "compact", "full", "lazy"),
    *("skip", "exact", "sketch", "newest", "on", "SIGUSR1", [], ["SIGUSR1"], ["SIGKILL"], [1], {}, {"a": "b"}),
    *({"exp_avg": "int8-block"}, {"name": "full"}, {"name": 1}, {"name": "threshold", "threshold": 1}, {"x": 1}),
]
TOGETHER = {"budget", "s3", "metrics.host", "metrics.tls", "memory.peers", "differences", "policy"}
"""What more is asked of: settings that others are needed for, and policies by names that only the job may know."""


def test_schema_and_loader_take_the_same() -> None:
    """Each setting alone, with each odd value. For true the loader takes 1 and 'on' in quotes, too; what it makes of
    that is what the schema takes."""
    validator, differ = _validator(), []
    for path, field in _fields(Config):
        switch = bool in (field.annotation, *get_args(field.annotation))
        for value in ODD:
            values = value
            for key in reversed(path.split(".")):
                values = {key: values}
            seen = validator.is_valid(values)
            try:
                taken = load_config(values)
            except ConfigError:
                if seen and not any(path == one or path.startswith(f"{one}.") for one in TOGETHER):
                    differ.append(f"the schema alone takes {path}: {value!r}")
            else:
                if not validator.is_valid(taken.model_dump(mode="json")):
                    differ.append(f"the loader alone takes {path}: {value!r}")
                if not seen and not switch:
                    differ.append(f"the loader alone takes, as something else, {path}: {value!r}")
    assert differ == []
