"""Commands at a store in a bucket say what they say of the same store in a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import prune
from deploy.supervisor.store_probe import StoreProbe
from merger.sources.store import StoreSource
from store import retention
from store.catalog import open_catalog
from store.location import files_at, place_of
from store.retention import PrunePlan, Retention
from store.session import claim_epoch
from store.storage.bucket import ObjectOptions
from store.storage.local import Files
from tests.support.cli import Here
from tests.support.s3 import BUCKET, Server
from tests.support.stores import StoreBuilder

URL = f"s3://{BUCKET}/runs/one"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def builder(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> StoreBuilder:
    """A store in a directory, and the same in the bucket."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    made = StoreBuilder(tmp_path / "store", policy="parity")
    for step in (10, 20, 30, 40, 50, 60):
        save = made.save(step)
    made.prove(save)
    files = {str(path.relative_to(made.root)): path.read_bytes() for path in made.root.rglob("*") if path.is_file()}
    server.put("runs/one", files)
    return made


def alike(here: Here, builder: StoreBuilder, command: str, *options: str) -> tuple[Any, Any]:
    """What a command says of both, but for what is never alike."""
    found = [here(command, place, *options, "--json") for place in (builder.root, URL)]
    assert found[0].code == found[1].code, [one.err for one in found]
    one, other = (answer.json for answer in found)
    if "store" in other:
        assert other["store"] == URL
    for answer in (one, other):
        answer.pop("store", None)
        answer.pop("size_bytes", None)
    return one, other


@pytest.mark.parametrize("command", ["status", "show", "verify"])
def test_the_same_is_told(here: Here, builder: StoreBuilder, command: str) -> None:
    one, other = alike(here, builder, command)
    assert one == other
    assert here(command, URL).code == 0, "the text, too"


def test_the_page_is_written_where_one_stands(
    here: Here, builder: StoreBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = here("report", URL, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["out"] == str(tmp_path / "one.report.html")
    assert URL in (tmp_path / "one.report.html").read_text()


def test_prune(here: Here, builder: StoreBuilder, server: Server) -> None:
    """The same goes, in the directory and in the bucket."""
    options = ("--keep-last", "2", "--no-log-spaced")
    planned = alike(here, builder, "prune", *options, "--dry-run")
    assert planned[0] == planned[1]
    assert planned[0]["delete"]["commits"]
    alike(here, builder, "prune", *options)
    left = {str(path.relative_to(builder.root)) for path in builder.root.rglob("*") if path.is_file()}
    assert set(server.objects("runs/one")) == left - {"LOCK"}


def test_weights_are_kept_alike(here: Here, builder: StoreBuilder, server: Server) -> None:
    """The same bytes, in the directory and in the bucket; then all but the newest of them go."""
    for last in (9, 1):
        rule = Retention(keep_last=1, log_spaced=False, weights_every=20, weights_last=last)
        for place in (builder.root, URL):
            catalog = open_catalog(files_at(place_of(place)))
            assert retention.keep_named_weights(catalog, retention.plan_prune(catalog, rule)) == []
            retention.execute(catalog.files, retention.plan_prune(catalog, rule))
        left = {str(p.relative_to(builder.root)): p.read_bytes() for p in builder.root.rglob("*") if p.is_file()}
        left.pop("LOCK", None)
        assert server.objects("runs/one") == left
        assert len({name.split("/")[1] for name in left if name.startswith("weights/")}) == min(last, 3)
        for command in ("status", "verify"):
            one, other = alike(here, builder, command)
            assert one == other
    assert here("show", URL, 40, "--json").json["weights_only"]
    assert StoreSource(place_of(URL)).checkpoint(40, frozenset()).step == 40


def beside(monkeypatch: pytest.MonkeyPatch, happens: Callable[[Files], None]) -> None:
    """Let something happen in the bucket between the plan and the deletions of a prune."""

    def execute(files: Files, plan: PrunePlan) -> None:
        happens(files)
        retention.execute(files, plan)

    monkeypatch.setattr(prune, "execute", execute)


def test_the_minimum_stops_where_another_job_takes_the_bucket_over(
    here: Here, builder: StoreBuilder, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = server.objects("runs/one")
    beside(monkeypatch, lambda files: claim_epoch(files, builder.store_id) and None)
    assert here("prune", URL, "--minimum").code == 11
    assert set(server.objects("runs/one")) > set(before)


def test_the_minimum_keeps_what_a_commit_of_the_living_job_takes_from_older_ones(
    here: Here, builder: StoreBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commits(files: Files) -> None:
        builder.files = files
        builder.save(80, layers=("layers.0",))

    builder.files = files_at(place_of(URL))
    builder.save(75, layers=("layers.1",))
    beside(monkeypatch, commits)
    answer = here("prune", URL, "--minimum", "--json")
    assert answer.code == 0 and answer.json["delete"]["segments"], answer.err
    assert here("verify", URL).code == 0
    assert here("status", URL, "--json").json["resume"]["step"] == 80


def test_damage_is_found_and_passed_over(here: Here, builder: StoreBuilder, server: Server) -> None:
    objects = server.objects("runs/one")
    name = next(name for name in objects if name.startswith("segments/00000060") and name.endswith(".safetensors"))
    objects[name] = objects[name][:-1] + bytes([objects[name][-1] ^ 1])
    server.put("runs/one", objects)
    answer = here("verify", URL, "--json")
    assert not answer.json["ok"]
    assert answer.json["commits"][0]["state"] != "ok"
    assert f"{name}" in " ".join(answer.json["problems"])


def test_the_supervisor_sees_and_marks(builder: StoreBuilder, server: Server) -> None:
    seen = StoreProbe(place_of(URL), options=ObjectOptions(retry_seconds=5.0))
    sight = seen.look()
    assert (sight.step, sight.trouble, seen.holder()) == (60, "", None)
    assert sight.resumes is not None
    assert seen.mark(sight.resumes, "it died") == ""
    assert seen.look().resumes != sight.resumes
    assert seen.withdraw(sight.resumes) == ""
    assert seen.look().resumes == sight.resumes


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("status", f"s3://{BUCKET}/nothing"), 10, "no driftpoint store"),
        (("status", "s3://nobody/x"), 1, "no such bucket"),
        (("verify", "gcs://bucket/x"), 2, "gcs:// is not supported"),
        (("rescue", URL), 2, "rescue writes to directories only"),
        (("merge", URL, "--out", f"s3://{BUCKET}/out"), 2, "merge writes directories only"),
        (("memory", "clear", URL), 2, "no snapshot of"),
    ],
)
def test_refused(here: Here, builder: StoreBuilder, words: tuple[str, ...], code: int, said: str) -> None:
    answer = here(*words)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
    assert answer.err.count("\n") == 1
