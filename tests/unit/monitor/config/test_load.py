"""The configuration: defaults, YAML, and errors that say where and name the nearest known key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from monitor.config.load import Config, load_config
from policies.builtin import Observe
from store.errors import ConfigError


def test_nothing_gives_the_defaults() -> None:
    assert load_config(None) == load_config({}) == Config()
    assert Config().bounded_policy().name == "full"


def test_by_default_everything_is_exact_and_the_interval_is_found() -> None:
    config = Config()
    assert (config.every, config.policy, config.encoding, config.packing) == ("auto", "full", "raw", "none")
    assert not config.memory.enabled and not config.daemon.enabled
    load_config({"auto": {"max_loss_minutes": 5}})
    load_config({"bounds": {"max_staleness": 50}})


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text("# nothing yet\n")
    assert load_config(path) == load_config(str(path)) == Config()


def test_yaml_and_mapping_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text("store: here\nevery: 7\npolicy: {name: parity, k: 3}\ntimeouts:\n  commit: 5\n")
    values = {"store": "here", "every": 7, "policy": {"name": "parity", "k": 3}, "timeouts": {"commit": 5}}
    assert load_config(path) == load_config(values)
    assert load_config(path).bounded_policy().name == "parity"


def test_a_configuration_is_taken_as_it_is() -> None:
    config = Config(every=3)
    assert load_config(config) is config


def test_it_cannot_be_changed() -> None:
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
        ({"metrics": {"port": 70000}}, "metrics.port"),
        ({"drift": {"width": 3}}, "drift.width"),
        ({"drift": {"method": "guess"}}, "drift.method"),
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
    ],
)
def test_what_makes_no_sense_is_told_with_its_place(values: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        load_config(values)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1", "is not YAML"),
        ("a: 2026-13-01", "is not YAML"),
        ("- one\n- two\n", "must be a YAML mapping"),
        ("1: 2\n", "must be a YAML mapping"),
        ("just words\n", "must be a YAML mapping"),
        ("!!python/object/apply:os.system ['true']\n", "is not YAML"),
    ],
)
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("every: 0100", "YAML takes 0100 for 64"),
        ("retention:\n  keep_last: 010", "YAML takes 010 for 8"),
        ("timeouts: {commit: 10:00}", "YAML takes 10:00 for 600"),
        ("timeouts: {commit: 10:00.0}", "YAML takes 10:00.0 for 600.0"),
        ("policy: {name: parity, k: 002}", "YAML takes 002 for 2"),
    ],
)
def test_a_number_that_yaml_reads_as_another(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told) + ".*write it") as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}:{text.count(chr(10)) + 1}: ")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
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
    ("values", "said"),
    [
        ({"store": "gs://bucket/x"}, "gs:// is neither"),
        ({"store": "s3://bucket/x", "daemon": {"enabled": True}}, "into directories only"),
        ({"store": "checkpoints", "s3": {"region": "eu-west-1"}}, "s3: the section holds"),
        ({"store": "s3://bucket/x", "s3": {"secret": "x"}}, "unknown key 's3.secret'"),
        ({"store": "s3://bucket/x", "s3": {"part_mib": 4}}, "s3.part_mib"),
    ],
)
def test_what_does_not_go_with_a_bucket_is_told(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
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
def test_a_switch_is_no_number(tmp_path: Path, text: str) -> None:
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
def test_a_key_that_is_there_twice_is_not_half_forgotten(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=where):
        load_config(path)


def test_what_is_merged_in_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text("timeouts:\n  <<: {commit: 5, lock: 1}\n  lock: 2\n")
    assert load_config(path).timeouts.model_dump(include={"commit", "lock"}) == {"commit": 5, "lock": 2}
