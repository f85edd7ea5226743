"""The launch files of ``deploy/``: what they say of exit codes and options is what the code says, and each is checked
by what its platform offers for that. Slurm's script is really run in ``tests/distributed/test_launch_slurm.py``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubeflow_trainer_api.models as known
import pytest
import typer
import yaml

from deploy.cli.app import app
from deploy.supervisor.processes import KILL_AFTER
from deploy.supervisor.restart_policy import NO_PROGRESS
from monitor.config.load import Config
from store.errors import PREEMPTED, DamagedError, NothingToResumeError, UsageError

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
LASTING = [path for path in UNITS if "verify" not in path.name]
VERIFY = DEPLOY / "systemd" / "driftpoint-verify@.service", DEPLOY / "kubernetes" / "verify-cronjob.yaml"
SBATCH = DEPLOY / "slurm" / "driftpoint.sbatch"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
STARTING = [path for path in MANIFESTS if path not in VERIFY and path.name != "podmonitor.yaml"]
MODELS = {
    "CronJob": known.IoK8sApiBatchV1CronJob,
    "ClusterTrainingRuntime": known.TrainerV1alpha1ClusterTrainingRuntime,
    "JobSet": known.JobsetV1alpha2JobSet,
    "TrainJob": known.TrainerV1alpha1TrainJob,
}
"""Of whole objects; of a Job there is one for its spec."""


def objects() -> list[tuple[str, dict[str, Any]]]:
    return [(path.name, one) for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]


def of_kind(*kinds: str) -> list[Any]:
    return [pytest.param(one, id=f"{name}-{one['kind']}") for name, one in objects() if one["kind"] in kinds]


def within(value: Any, key: str) -> Iterator[Any]:
    """All values of a key, wherever it is."""
    if isinstance(value, dict):
        yield from ([value[key]] if key in value else [])
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from within(one, key)


def takes(words: list[str]) -> None:
    """The words of a ``driftpoint`` command line are taken by the real parser."""
    command: click.Command = typer.main.get_command(app)
    context = click.Context(command)
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no {words[0]}"
        command, words = found, words[1:]
    command.make_context("driftpoint", list(words))


def grace(words: list[str]) -> float:
    joined = " ".join(words)
    found = re.search(r"--grace[= ](\d+)", joined)
    assert found, joined
    return float(found[1])


def test_the_sbatch_script_is_clean() -> None:
    checked = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", SBATCH], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_the_sbatch_script_goes_by_the_codes_and_options_of_the_code() -> None:
    text = SBATCH.read_text()
    assert f"\npreempted={PREEMPTED} " in text and f"\nno_progress={NO_PROGRESS} " in text
    line = re.search(r"exec driftpoint (run .* -- )", text)
    assert line
    words = line[1].split()
    takes([*words, "torchrun"])
    notice = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    assert notice and float(notice[1]) >= grace(words) + KILL_AFTER


@pytest.mark.parametrize("unit", [*UNITS, VERIFY[0].with_suffix(".timer")], ids=lambda path: path.name)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here: the unit is NOT checked")
    for one in {unit, unit.with_suffix(".service")}:  # a timer starts the service of its name
        installed = tmp_path / one.name.replace("@", "@one")
        installed.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", one.read_text()))
    installed = tmp_path / unit.name.replace("@", "@one")
    manner = ["--user"] if "default.target" in unit.read_text() else ["--system"]
    checked = subprocess.run(
        ["systemd-analyze", *manner, "--man=no", "--recursive-errors=no", "verify", installed],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert checked.returncode == 0 and not checked.stderr, checked.stderr


@pytest.mark.parametrize("unit", LASTING, ids=lambda path: path.name)
def test_a_unit_starts_what_there_is_and_gives_it_time_to_end(unit: Path) -> None:
    said = dict(line.split("=", 1) for line in unit.read_text().splitlines() if re.match(r"[A-Z]\w+=", line))
    words = said["ExecStart"].split()[1:]
    takes(words)
    assert float(said["TimeoutStopSec"]) > grace(words) + KILL_AFTER


def test_the_unit_of_a_job_goes_by_the_codes_of_the_code() -> None:
    said = (DEPLOY / "systemd" / "driftpoint-job@.service").read_text()
    assert f"\nRestartForceExitStatus={PREEMPTED}\n" in said
    assert f"\nSuccessExitStatus={PREEMPTED}\n" in said
    assert f"\nRestartPreventExitStatus={UsageError.exit_code} {NO_PROGRESS}\n" in said


@pytest.mark.parametrize("made", of_kind(*MODELS))
def test_kubernetes_knows_every_field(made: dict[str, Any]) -> None:
    assert as_known(MODELS[made["kind"]], made) == with_protocols(made)


@pytest.mark.parametrize("made", of_kind("Job"))
def test_kubernetes_knows_every_field_of_a_job(made: dict[str, Any]) -> None:
    assert made["apiVersion"] == "batch/v1"
    assert as_known(known.IoK8sApiBatchV1JobSpec, made["spec"]) == with_protocols(made["spec"])


@pytest.mark.parametrize("made", of_kind("Job", "JobSet", "ClusterTrainingRuntime"))
def test_a_job_is_replaced_when_preempted_and_fails_without_progress(made: dict[str, Any]) -> None:
    policies = list(within(made, "podFailurePolicy"))
    assert policies
    for policy in policies:
        codes = {rule["action"]: rule["onExitCodes"] for rule in policy["rules"] if "onExitCodes" in rule}
        names = {one["name"] for spec in within(made, "containers") for one in spec}
        assert {one["containerName"] for one in codes.values()} <= names
        assert codes["Ignore"]["values"] == [PREEMPTED]
        assert codes["FailJob"]["values"] == [UsageError.exit_code, NO_PROGRESS]


@pytest.mark.parametrize("name", [path.name for path in STARTING])
def test_pods_run_what_there_is_and_have_time_to_save(name: str) -> None:
    made = [one for at, one in objects() if at == name]
    commands = [
        [*one["command"][1:], *one["args"]]
        for key in ("containers", "initContainers", "trainer")
        for found in within(made, key)
        for one in (found if isinstance(found, list) else [found])
        if "command" in one
    ]
    assert commands
    for words in commands:
        takes(words)
    seconds = list(within(made, "terminationGracePeriodSeconds"))
    assert seconds and min(seconds) >= sum(map(grace, commands)) + KILL_AFTER


@pytest.mark.parametrize("made", of_kind("ConfigMap"))
def test_the_settings_in_a_manifest_are_settings(made: dict[str, Any]) -> None:
    Config.model_validate(yaml.safe_load(made["data"]["driftpoint.yaml"]))


@pytest.mark.parametrize(
    "path", [SBATCH, DEPLOY / "systemd" / "driftpoint-job@.service", *STARTING], ids=lambda p: p.name
)
def test_a_store_that_is_not_mounted_is_refused_after_the_first_start(path: Path) -> None:
    text = path.read_text()
    assert "create: false" in text
    for setting in re.findall(r"store: (\{path: /\S+, create: false\})", text):
        stored = Config.model_validate({"store": yaml.safe_load(setting)})
        assert f"store: {stored.store_path}\n" in text and not stored.creates_store


def test_shared_memory_is_memory_and_pods_are_nobodys_root() -> None:
    for name, made in objects():
        if made["kind"] in ("Job", "JobSet", "ClusterTrainingRuntime", "CronJob"):
            assert list(within(made, "runAsNonRoot")) == [True], name
        if made["kind"] == "CronJob":  # it reads files only
            continue
        for spec in within(made, "containers"):
            assert any(one["mountPath"] == "/dev/shm" for container in spec for one in container["volumeMounts"]), name
        for volumes in within(made, "volumes"):
            assert any(one.get("emptyDir", {}).get("medium") == "Memory" for one in volumes), name


def test_a_scheduled_verification_reads_a_store_and_the_alert_knows_its_name() -> None:
    unit, manifest = (path.read_text() for path in VERIFY)
    (words,) = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)
    takes(words.split())
    job = yaml.safe_load(manifest)
    (one,) = next(within(job, "containers"))
    assert one["command"] == ["driftpoint", *words.split()[:1]]
    takes([*one["command"][1:], *one["args"]])
    assert one["volumeMounts"] == [{"name": "checkpoints", "mountPath": "/checkpoints", "readOnly": True}]
    for text in (unit, manifest):
        assert f"# {DamagedError.exit_code}: damaged" in text and f"{NothingToResumeError.exit_code}: nothing" in text
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    (expr,) = [rule["expr"] for group in rules for rule in group["rules"] if rule["alert"] == "DriftpointVerifyFailed"]
    by_job, by_unit = re.findall(r'name=~"(.*?)"', expr)
    assert re.fullmatch(by_job, f"{job['metadata']['name']}-29001600")
    assert re.fullmatch(by_unit, VERIFY[0].name.replace("@", "@llama"))


def test_what_is_scraped_has_the_names_that_the_alerts_go_by() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    monitored = [one for name, one in objects() if name == "podmonitor.yaml"]
    named = {relabelled["replacement"] for one in monitored for relabelled in next(within(one, "relabelings"))}
    assert named == {one["job_name"] for one in scraped}
    serves = {"metrics": Config().metrics.port, "daemon": Config().daemon.port}
    ports = [port for _, made in objects() for found in within(made, "ports") for port in found]
    assert {port["name"] for port in ports} == {next(within(one, "port")) for one in monitored} == set(serves)
    assert all(port["containerPort"] == serves[port["name"]] for port in ports)


def test_the_alerts_become_a_rule_of_the_operator_as_the_page_says() -> None:
    page = (DEPLOY / "README.md").read_text()
    command = re.search(r"^ +(\{ printf .*?\}) \| kubectl", page, re.MULTILINE | re.DOTALL)
    assert command
    made = subprocess.run(["sh", "-c", command[1]], cwd=DEPLOY, capture_output=True, text=True, check=True).stdout
    assert yaml.safe_load(made)["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())


def test_the_image_gets_what_the_package_is_made_of_and_the_user_of_the_manifests() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (?:--\S+ )*(.*) \S+$", text, re.MULTILINE) for word in line.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {one.rstrip("*") for one in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    modules = {f"{one}.py" for one in project["tool"]["setuptools"]["py-modules"]}
    metadata = {"pyproject.toml", "constraints.txt", project["project"]["readme"], *project["project"]["license-files"]}
    assert packages | modules | metadata <= copied
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert allowed == copied
    extras = re.search(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert extras and set(extras[1].split(",")) <= set(project["project"]["optional-dependencies"])
    users = {one for _, made in objects() for one in within(made, "runAsUser")}
    assert [f"{one}:{one}" for one in users] == re.findall(r"^USER (.*)$", text, re.MULTILINE)


def as_known(model: Any, made: Any) -> Any:
    """What the models keep of it: fields that they do not know are lost."""
    return model.from_dict(made).to_dict()


def with_protocols(made: Any) -> Any:
    """As the models have it: a port's protocol is filled in."""
    if isinstance(made, list):
        return [with_protocols(one) for one in made]
    if not isinstance(made, dict):
        return made
    filled = {"protocol": "TCP"} if "containerPort" in made else {}
    return {**filled, **{key: with_protocols(value) for key, value in made.items()}}
