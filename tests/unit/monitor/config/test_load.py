"""load_config: defaults, YAML, and errors that name the key and the nearest known one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from monitor.config.load import Config, load_config
from policies.builtin import Observe
from store.errors import ConfigError


def test_no_source_gives_the_defaults() -> None:
    assert load_config(None) == load_config({}) == Config()
    assert Config().bounded_policy().name == "full"


def test_the_default_is_exact_with_an_automatic_interval() -> None:
    config = Config()
    assert (config.every, config.policy, config.encoding, config.packing) == ("auto", "full", "raw", "none")
    assert not config.memory.enabled and not config.daemon.enabled
    load_config({"auto": {"max_loss_minutes": 5}})
    load_config({"bounds": {"max_staleness": 50}})


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text("# nothing yet\n")
    assert load_config(path) == load_config(str(path)) == Config()


def test_yaml_and_mapping_give_the_same_configuration(tmp_path: Path) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text("store: here\nevery: 7\npolicy: {name: parity, k: 3}\ntimeouts:\n  commit: 5\n")
    values = {"store": "here", "every": 7, "policy": {"name": "parity", "k": 3}, "timeouts": {"commit": 5}}
    assert load_config(path) == load_config(values)
    assert load_config(path).bounded_policy().name == "parity"


def test_a_configuration_is_returned_unchanged() -> None:
    config = Config(every=3)
    assert load_config(config) is config


@pytest.mark.parametrize(
    ("value", "mode", "most"),
    [("lazy", "lazy", None), ({"max_bytes": 2.0e9}, "auto", 2_000_000_000), ({"mode": "eager"}, "eager", None)],
)
def test_staging_is_a_mode_or_a_mapping(value: Any, mode: str, most: int | None) -> None:
    copies = load_config({"staging": value}).copies
    assert (copies.mode, copies.max_bytes) == (mode, most)


HOURLY = {"bytes_per_hour": 1e9}


@pytest.mark.parametrize(
    ("values", "policy"),
    [
        ({"budget": HOURLY, "encoding": "compact"}, "auto"),
        ({"budget": HOURLY, "encoding": {"exp_avg": "int8-block"}}, "auto"),
        ({"budget": {"stall_share": 0.01, "bytes_per_hour": None}, "encoding": "careful"}, "auto"),
        ({"budget": HOURLY, "encoding": "compact", "policy": "budget"}, "budget"),
        ({"encoding": "compact"}, "full"),
        ({"budget": {"burst_seconds": 5, "bytes_per_hour": None}, "encoding": "compact"}, "full"),
    ],
)
def test_a_budget_for_encoded_saves_is_spent_by_policy_auto(values: dict[str, Any], policy: str) -> None:
    config = load_config(values)
    assert config.policy == policy
    assert load_config(config.model_dump(exclude_unset=True)) == config


@pytest.mark.parametrize("values", [{}, {"encoding": "raw"}, {"encoding": {"exp_avg": "raw"}}])
def test_a_budget_for_raw_saves_needs_a_policy_that_spends_it(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the policy is full"):
        load_config({"budget": HOURLY, **values})


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().every = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "near"),
    [
        ({"evrey": 5}, "unknown key 'evrey': did you mean 'every'?"),
        ({"timeouts": {"comit": 5}}, "unknown key 'timeouts.comit': did you mean 'commit'?"),
        ({"retention": {"keeplast": 5}}, "unknown key 'retention.keeplast': did you mean 'keep_last'?"),
        ({"metric": {"port": 1}}, "unknown key 'metric': did you mean 'metrics'?"),
    ],
)
def test_an_unknown_key_names_the_nearest(values: dict[str, Any], near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(values)
    assert near in str(caught.value)
    assert "Known here: " in str(caught.value)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"every": 0}, "every"),
        ({"every": "often"}, "every"),
        ({"store": ""}, "store"),
        ({"store": 5}, "store"),
        ({"staging": "soon"}, "staging"),
        ({"staging": {"mode": "soon"}}, "staging"),
        ({"staging": {"max_bytes": 1000}}, "staging"),
        ({"staging": {"max_bytes": 2.0e7}, "memory": {"enabled": True}}, "staging.max_bytes: the memory tier"),
        ({"metrics": {"port": 70000}}, "metrics.port"),
        ({"drift": {"width": 3}}, "drift.width"),
        ({"drift": {"method": "exact"}}, "drift.method"),
        ({"timeouts": {"commit": 0}}, "timeouts.commit"),
        ({"timeouts": {"close": float("inf")}}, "timeouts.close"),
        ({"timeouts": {"commit": float("nan")}}, "timeouts.commit"),
        ({"timeouts": 5}, "timeouts"),
        ({"retention": {"keep_last": 0}}, "retention.keep_last"),
        ({"bounds": {"precision": "some"}}, "bounds.precision"),
        ({"bounds": {"max_staleness": 10}, "every": 100}, "max_staleness 10"),
        ({"policy": "ful"}, "ful"),
        ({"policy": {"name": "parity", "k": 1}}, "k"),
        ({"policy": {"k": 2}}, "name"),
        ({"metrics": {"basic_auth": {"user": "a"}}}, "client_ca"),
    ],
)
def test_an_invalid_value_is_refused_with_its_key(values: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        load_config(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not YAML"),
        ("a: 2026-13-01", "is not YAML"),
        ("- one\n- two\n", "must be a YAML mapping"),
        ("1: 2\n", "must be a YAML mapping"),
        ("just words\n", "must be a YAML mapping"),
        ("!!python/object/apply:os.system ['true']\n", "is not YAML"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("every: 0100", "YAML takes 0100 for 64"),
        ("retention:\n  keep_last: 010", "YAML takes 010 for 8"),
        ("timeouts: {commit: 10:00}", "YAML takes 10:00 for 600"),
        ("timeouts: {commit: 10:00.0}", "YAML takes 10:00.0 for 600.0"),
        ("policy: {name: parity, k: 002}", "YAML takes 002 for 2"),
    ],
)
def test_a_number_that_yaml_reads_differently_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message) + ".*write it") as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}:{text.count(chr(10)) + 1}: ")


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the configuration"):
            load_config(path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(tmp_path / "bytes.yaml")


def test_observe_stays_outermost() -> None:
    policy = load_config({"policy": "observe", "bounds": {"max_staleness": 100}}).bounded_policy()
    assert isinstance(policy, Observe)


def test_a_store_in_a_bucket_traces_into_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config({"store": "s3://bucket/runs/one"}).trace_path() == tmp_path / "one.trace.jsonl"
    assert load_config({"store": "s3://bucket"}).trace_path() == tmp_path / "bucket.trace.jsonl"
    named = load_config({"store": "s3://bucket/a", "trace": {"path": "t.jsonl"}})
    assert named.trace_path() == tmp_path / "t.jsonl"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"store": "gcs://bucket/x"}, "gcs:// is not supported"),
        ({"store": "s3://bucket/x", "daemon": {"enabled": True}}, "into directories only"),
        ({"store": "checkpoints", "s3": {"region": "eu-west-1"}}, "s3: the section is for"),
        ({"store": "s3://bucket/x", "s3": {"secret": "x"}}, "unknown key 's3.secret'"),
        ({"store": "s3://bucket/x", "s3": {"part_mib": 4}}, "s3.part_mib"),
    ],
)
def test_settings_that_the_kind_of_store_does_not_support_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(values)


@pytest.mark.parametrize(
    "text",
    [
        "every: on",
        "bounds: {max_staleness: yes}",
        "retention: {keep_last: true}",
        "metrics: {port: off}",
        "memory: {versions: yes}",
        "packing: on",
        "drift: {seed: no}",
        "auto: {max_loss_minutes: on}",
    ],
)
def test_a_boolean_is_refused_where_a_number_is_expected(tmp_path: Path, text: str) -> None:
    """YAML 1.1 takes on, off, yes and no for true and false, and Python these for 1 and 0."""
    path = tmp_path / "driftpoint.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"it must (be a number|not be true or false)"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("every: 5\nevery: 10\n", ":2: 'every' is written twice \\(first in line 1"),
        ("memory: {enabled: true}\nstore: a\nmemory:\n  every: 5\n", ":3: 'memory' is written twice .first in line 1"),
        ("bounds:\n  max_staleness: 5\n  max_staleness: 6\n", ":3: 'bounds.max_staleness' is written twice"),
    ],
)
def test_a_duplicate_key_is_refused(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=where):
        load_config(path)


def test_a_yaml_merge_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text("timeouts:\n  <<: {commit: 5, lock: 1}\n  lock: 2\n")
    assert load_config(path).timeouts.model_dump(include={"commit", "lock"}) == {"commit": 5, "lock": 2}
