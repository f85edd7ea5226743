"""What the commands say of a commit that jobs died of, and where ``run`` looks for its store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli.run import DEFAULT_MEMORY, DEFAULT_STORE, places
from monitor.config.load import Config
from store.catalog import mark_suspect
from store.errors import ConfigError, UsageError
from store.names import SaveId, suspect_path
from tests.support.cli import Here, environment
from tests.support.stores import StoreBuilder


@pytest.fixture
def builder(tmp_path: Path) -> StoreBuilder:
    """Two commits; jobs died of the newer one."""
    made = StoreBuilder(tmp_path / "store")
    made.save(10)
    mark_suspect(made.files, made.store_id, made.save(20), "two attempts died, the last of SIGSEGV")
    return made


def test_status_says_so_and_what_is_resumed_from(here: Here, builder: StoreBuilder) -> None:
    answer = here("status", builder.root, "--json")
    assert (answer.code, answer.json["resume"]["step"]) == (12, 10)
    assert answer.json["suspects"] == ["00000020-000001"]
    assert answer.json["problems"] == [
        "00000020-000001 is suspect (two attempts died, the last of SIGSEGV): older commits are resumed from first"
    ]
    assert "suspect: 00000020-000001" in " ".join(here("status", builder.root).out.split())


def test_status_of_a_store_that_went_on_is_well(here: Here, builder: StoreBuilder) -> None:
    builder.restart()
    builder.save(30)
    answer = here("status", builder.root, "--json")
    assert (answer.code, answer.json["problems"], answer.json["suspects"]) == (0, [], ["00000020-000001"])


def test_show_of_the_suspect_and_of_the_other(here: Here, builder: StoreBuilder) -> None:
    shown = here("show", builder.root, "20", "--json").json
    assert (shown["suspect"], shown["resumable"]) == ("two attempts died, the last of SIGSEGV", True)
    assert "jobs that resumed from it died" in here("show", builder.root, "20").out
    shown = here("show", builder.root, "10", "--json").json
    assert shown["suspect"] is None
    answer = here("show", builder.root, "--json")
    assert answer.json["save"] == "00000010-000001" and "is suspect" in answer.json["problems"][0]


def test_verify_names_it_and_finds_nothing_wrong(here: Here, builder: StoreBuilder) -> None:
    answer = here("verify", builder.root, "--json")
    assert (answer.code, answer.json["ok"], answer.json["resumable"]) == (0, True, "00000010-000001")
    assert [(commit["save"], commit["suspect"]) for commit in answer.json["commits"]] == [
        ("00000020-000001", True),
        ("00000010-000001", False),
    ]
    assert "suspect" in here("verify", builder.root).out


def test_prune_knows_the_directory_and_keeps_what_can_be_fallen_back_to(here: Here, builder: StoreBuilder) -> None:
    answer = here("prune", builder.root, "--keep-last", 1, "--no-log-spaced", "--json")
    assert answer.code == 0
    assert answer.json["keep"] == ["00000010-000001", "00000020-000001"]
    assert answer.json["unrecognised"] == []


def test_a_damaged_mark_is_told_and_holds_nothing_up(here: Here, builder: StoreBuilder) -> None:
    (builder.root / suspect_path(SaveId(20, 1))).write_bytes(b"garbage")
    for command in ("status", "verify"):
        answer = here(command, builder.root, "--json")
        assert answer.code == 12
        assert any(suspect_path(SaveId(20, 1)) in problem for problem in answer.json["problems"])
    assert here("status", builder.root, "--json").json["resume"]["step"] == 20
    assert here("prune", builder.root, "--json").json["unrecognised"] == []


def test_the_defaults_are_those_of_the_configuration() -> None:
    assert Config().store == DEFAULT_STORE
    assert str(DEFAULT_MEMORY) == Config().memory.path


def test_where_the_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert places(None, Path("given"))[0].root == Path("given")
    with pytest.raises(UsageError, match="no store given"):
        places(None, None)
    Path("driftpoint.yaml").write_text("store: ./here\nevery: 5\n")
    assert places(None, None)[0].root == Path("here")
    Path("other.yaml").write_text("every: 5\n")
    assert places(Path("other.yaml"), None)[0].root == Path(DEFAULT_STORE)
    assert places(Path("other.yaml"), Path("given"))[0].root == Path("given")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("store: 5", "store: it must be a path"), ("store: ''", "store: it must be a path"),
        ("- a", "must be a YAML mapping"),
        ("store: [", "is not YAML"), ("memory: 5", "memory: input should be"),
        ("memory: {path: 5}", "memory.path: input should be"), ("evry: 5", "unknown key 'evry'"),
    ],
)  # fmt: skip
def test_a_configuration_that_names_no_store_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        places(path, None)
    with pytest.raises(ConfigError, match="cannot read"):
        places(tmp_path / "none.yaml", None)


def test_it_runs_without_torch(tmp_path: Path) -> None:
    """A process that lives as long as the job takes no more memory than it needs."""
    code = (
        "import sys\nfrom deploy.cli.app import run\n"
        "code = run(['run', '--store', 'store', '--', 'true'])\n"
        "sys.exit(code or bool({'torch', 'monitor'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), timeout=180, check=False)
    assert done.returncode == 0


def test_a_command_that_is_not_there_is_wrong_usage(here: Here, tmp_path: Path) -> None:
    answer = here("run", "--store", tmp_path / "store", "--", "no-such-command")
    assert answer.code == 2 and "cannot start 'no-such-command'" in answer.err
    assert here("run", "--store", tmp_path / "store").code == 2
