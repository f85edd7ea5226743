"""Endpoints of the daemon as users start it: what they serve, to whom, and what is refused."""

from __future__ import annotations

import ssl
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli.run import places
from monitor.config.load import load_config
from store.errors import ConfigError
from tests.support.cli import driftpoint
from tests.support.daemons import daemon, report
from tests.support.tls import certificate


def test_a_daemon_asks_for_client_certificates(tmp_path: Path) -> None:
    base = tmp_path / "shm"
    base.mkdir()
    crt, key = certificate(tmp_path, "daemon")
    ca, _ = certificate(tmp_path, "clients")
    own = certificate(tmp_path, "reader", ca.with_suffix(""))
    options = ["--host", "0.0.0.0", "--tls-cert", crt, "--tls-key", key, "--tls-client-ca", ca]
    with daemon(base, *options):
        found = report(base)
        assert found is not None and found.url == f"https://0.0.0.0:{found.port}/metrics"
        url, context = f"https://127.0.0.1:{found.port}/metrics", ssl.create_default_context(cafile=str(crt))
        with pytest.raises(OSError):
            urllib.request.urlopen(url, timeout=180, context=context)
        context.load_cert_chain(*own)
        with urllib.request.urlopen(url, timeout=180, context=context) as answer:
            assert b"driftpoint_daemon_up 1.0" in answer.read()


def test_a_daemon_that_others_could_read_is_refused(tmp_path: Path) -> None:
    answer = driftpoint("daemon", "run", "--memory", tmp_path, "--port", 0, "--host", "0.0.0.0")
    assert answer.code == 2
    assert "--host: '0.0.0.0' lets other machines read the metrics" in " ".join(answer.err.split())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"metrics": {"host": "0.0.0.0"}}, r"metrics\.host: '0\.0\.0\.0' lets other machines"),
    ({"metrics": {"host": "::"}}, r"metrics\.host: .*tls"),
    ({"daemon": {"enabled": True, "host": "node1"}}, r"daemon\.host: 'node1' lets other machines"),
    ({"metrics": {"tls": {"cert": "a"}}}, r"metrics\.tls: cert is set and key is not"),
    ({"metrics": {"tls": {"certificate": "a"}}}, r"metrics\.tls\.certificate"),
]


@pytest.mark.parametrize(("settings", "told"), REFUSED)
def test_the_configuration_is_refused_alike_by_trainer_and_supervisor(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(settings)
    path = tmp_path / "driftpoint.yaml"
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=told):
        places(path, None)


def test_what_the_supervisor_hands_to_the_daemon_is_what_the_trainer_would(tmp_path: Path) -> None:
    settings = {
        "metrics": {"host": "0.0.0.0", "tls": {"cert": "/tls/crt", "key": "/tls/key", "client_ca": "/tls/ca"}},
        "daemon": {"enabled": True, "host": "0.0.0.0"},
    }
    path = tmp_path / "driftpoint.yaml"
    path.write_text(yaml.safe_dump(settings))
    _, wanted, _ = places(path, None)
    security = load_config(settings).metrics.security()
    command = load_config(settings).daemon.command(Path("/dev/shm"), security)
    assert wanted == (Path("/dev/shm"), command)
    assert command[-8:] == ["--host", "0.0.0.0", *security.cli_options()]
    assert security.cli_options() == [
        *("--tls-cert", "/tls/crt", "--tls-key", "/tls/key", "--tls-client-ca", "/tls/ca")
    ]


def test_insecure_endpoints_and_endpoints_that_are_off_are_accepted() -> None:
    load_config({"metrics": {"host": "0.0.0.0", "insecure": True}, "daemon": {"enabled": True, "host": "0.0.0.0"}})
    load_config({"metrics": {"enabled": False, "host": "0.0.0.0"}, "daemon": {"host": "0.0.0.0"}})


def test_driftpoint_run_refuses_the_login_of_earlier_versions(tmp_path: Path) -> None:
    config = tmp_path / "d.yaml"
    config.write_text("store: s\nmetrics: {host: 0.0.0.0, insecure: true, basic_auth: {user: a, password_file: b}}\n")
    with pytest.raises(ConfigError, match="client_ca"):
        places(config, None)
