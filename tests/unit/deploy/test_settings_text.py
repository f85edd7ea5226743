"""What is published of settings is made from the models that validate them: nobody writes it twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from deploy.settings_text import documented, schema
from monitor.config import Config, load_config
from tests.support.cli import ROOT
from tests.support.settings_page import PAGE, SCHEMA, page, schema_text

EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.yaml"))


def test_the_page_has_every_setting_with_its_default_and_meaning() -> None:
    assert PAGE.read_text() == page(), "run `make settings`"
    assert yaml.safe_load(documented()) == Config().model_dump()


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
    Draft202012Validator.check_schema(schema())
    return Draft202012Validator(schema())


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
