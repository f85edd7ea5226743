"""L6: the real code against a real S3 server, through a proxy that kills the writer at every request, before the server
has it and after it has carried it out, and that spoils every answer in every way that object stores do. A part of it
goes against our own server for Google's interface, too.

Whatever happened, the objects are looked at as files of a directory, which is what they are; and the next job, which
has to live with what is left in the bucket, saves and prunes.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from store.catalog import open_or_create
from store.errors import FencedError, StorageError
from store.location import files_at
from store.session import claim_epoch
from store.storage.atomic import write_new
from store.storage.bucket import Bucket, ObjectOptions
from store.storage.local import Files, LocalFiles
from tests.crash.checker import check_reading, check_undamaged, promised
from tests.crash.models import RANKS
from tests.crash.runs import EXIT_TYPED_ERROR, Outcome, Zygote
from tests.crash.workload import Job, Memory
from tests.support.faulty import Asked, Fault, Proxy, nth
from tests.support.gcs import GoogleServer
from tests.support.s3 import BUCKET, KEYS, Server, tiny_parts

pytestmark = pytest.mark.slow


@dataclass
class Place:
    """Where runs happen: a base store after several saves, and the same objects again for each run."""

    scheme: str
    server: Server | GoogleServer
    proxy: Proxy
    zygote: Zygote
    folder: Path
    base: Mapping[str, bytes]
    base_events: Sequence[Mapping[str, Any]]
    checked: set[str] = field(default_factory=set)

    def run(
        self, scenario: str, fault: Fault | None = None, *, fresh: bool = True, retry_seconds: float = 120.0
    ) -> Outcome:
        """fresh: on the base, or on nothing where the scenario begins with nothing; else on what is there."""
        if fresh:
            self.server.put("store", self.base if scenario.startswith("save") else {})
        journal = self.folder / "journal"
        journal.unlink(missing_ok=True)
        self.proxy.set(fault)
        hangs = fault is not None and fault.what == "hang"  # what is slow by itself must not be asked for twice
        request = 1.0 if hangs else 30.0
        self.proxy.aim(self.zygote.begun(scenario, f"{self.scheme}://{BUCKET}/store", journal, request, retry_seconds))
        return self.zygote.ended(journal)

    def killed(self, scenario: str, asked: Asked, after: bool) -> Outcome:
        """Of a run that comes as far as this request: on a busy machine one may ask for less than undisturbed."""
        for _ in range(3):
            outcome = self.run(scenario, Fault("kill", nth(asked.number), after))
            if outcome.code or len(self.proxy.asked) >= asked.number:
                break
        return outcome

    def asked(self, scenario: str) -> list[Asked]:
        """What an undisturbed run asks for."""
        outcome = self.run(scenario)
        assert outcome.code == 0, outcome
        return list(self.proxy.asked)

    def check(self, scenario: str, outcome: Outcome) -> None:
        """(a) to (d), of each state once: which objects there are, after what the job was told."""
        state = json.dumps([scenario, sorted(self.server.objects("store")), outcome.events])
        if state in self.checked:
            return
        self.checked.add(state)
        events = [*(self.base_events if scenario == "save" else ()), *outcome.events]
        first = self._read(events)
        assert first == self._read(events)
        again = self.run("save", fresh=False)
        assert again.code == 0, again
        assert self._read(again.events) is not None

    def _read(self, events: Sequence[Mapping[str, Any]]) -> Any:
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name, data in self.server.objects("store").items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(data)
        files = LocalFiles(copy)
        reading = check_reading(files, promised(events))
        check_undamaged(files)
        return None if reading is None else (reading.save, reading.versions, reading.tensors)


@contextmanager
def opened(scheme: str, server: Server | GoogleServer, folder: Path) -> Iterator[Place]:
    with Proxy(server.port) as proxy:
        base = f"http://127.0.0.1:{proxy.port}"
        environment = {**server.environment, "AWS_ENDPOINT_URL": base, "GOOGLE_BASE_URL": base, "TMPDIR": str(folder)}
        with Zygote(environment) as zygote:
            place = Place(scheme, server, proxy, zygote, folder, {}, ())
            outcome = place.run("several")
            assert outcome.code == 0, outcome
            place.base, place.base_events = server.objects("store"), outcome.events
            yield place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Server() as server, tiny_parts(), opened("s3", server, tmp_path_factory.mktemp("objects")) as place:
        yield place


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with GoogleServer(least_part=1) as server, opened("gs", server, tmp_path_factory.mktemp("google")) as place:
        yield place


@pytest.fixture(params=["place", "google"])
def each(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


def test_what_a_run_asks_for(place: Place) -> None:
    """Uploads in parts, puts on a condition, and deletes are among what is swept below."""
    asked = place.asked("save")
    assert sum(one.query.startswith("uploadId") and one.method == "POST" for one in asked) == 2, "each rank's payload"
    assert sum("partNumber" in one.query for one in asked) > 4
    assert sum(one.conditional for one in asked) == 5, "the claim, two parts, the manifest, and the probe"
    assert any(one.query == "delete" for one in asked)


@pytest.mark.parametrize(
    ("where", "after"), [("place", False), ("place", True), ("google", True)], ids=["before", "after", "google-after"]
)
def test_killed_at_every_change(request: pytest.FixtureRequest, where: str, after: bool) -> None:
    """A request that only reads leaves what the change before it left."""
    place: Place = request.getfixturevalue(where)
    changes = [asked for asked in place.asked("save") if asked.changes]
    for asked in changes:
        outcome = place.killed("save", asked, after)
        assert outcome.code == -9, (asked, outcome)
        place.check("save", outcome)
    # as it was, claimed, two payloads, two parts, the manifest, the hint, and what is deleted after it
    assert len(place.checked) >= 9, "states that a death leaves behind"


def test_killed_while_a_store_is_made(place: Place) -> None:
    changes = [asked for asked in place.asked("several") if asked.changes]
    for asked in changes[:6]:
        outcome = place.killed("several", asked, after=True)
        assert outcome.code == -9, (asked, outcome)
        place.check("several", outcome)


def once(wanted: Callable[[Asked], bool]) -> Callable[[Asked], bool]:
    """The first try of every request that is wanted."""
    tried: set[tuple[str, ...]] = set()

    def strikes(asked: Asked) -> bool:
        request = (asked.method, asked.path, asked.query)
        if request in tried or not wanted(asked):
            return False
        tried.add(request)
        return True

    return strikes


SPOILED = {
    "503": Fault(503, lambda _: True),
    "503 after success": Fault(503, lambda _: True, after=True),
    "the connection ends": Fault("drop", lambda _: True),
    "the connection ends after success": Fault("drop", lambda _: True, after=True),
    "time-out after success": Fault("hang", lambda asked: asked.changes, after=True, seconds=1.5),
    "409": Fault(409, lambda asked: asked.conditional),
    "409 after success": Fault(409, lambda asked: asked.conditional, after=True),
    "412": Fault(412, lambda asked: asked.conditional),
    "412 after success": Fault(412, lambda asked: asked.conditional, after=True),
    "slow": Fault("slow", lambda _: True, seconds=0.05),
}


# Of each kind one, and of changes only: the client is the same.
_ON_GOOGLE = ("the connection ends after success", "409", "412", "412 after success")


@pytest.mark.parametrize(
    ("where", "what"), [*(("place", what) for what in SPOILED), *(("google", what) for what in _ON_GOOGLE)]
)
def test_every_first_try_is_spoiled(request: pytest.FixtureRequest, where: str, what: str) -> None:
    """The save comes about all the same: an object that is there with our bytes is ours, whatever was answered."""
    place: Place = request.getfixturevalue(where)
    strikes = SPOILED[what].strikes
    fault = replace(SPOILED[what], strikes=once(lambda asked: strikes(asked) and (where == "place" or asked.changes)))
    outcome = place.run("save", fault)
    assert place.proxy.struck >= 5, place.proxy.struck
    assert outcome.code == 0, outcome.events[-1]
    place.check("save", outcome)


def test_a_server_that_is_gone_is_a_typed_error(place: Place) -> None:
    """From some request on: told within the time that was set, and nothing that was acknowledged is lost."""
    asked = place.asked("save")
    upload = next(one.number for one in asked if "partNumber" in one.query)
    manifest = next(one.number for one in asked if "manifests" in one.path and one.changes)
    for number, what in ((upload, "drop"), (manifest, 503)):
        fault = Fault(what, lambda one, number=number: one.number >= number)
        outcome = place.run("save", fault, retry_seconds=3.0)
        assert outcome.code == EXIT_TYPED_ERROR, outcome
        assert outcome.events[-1]["kind"] in ("StorageError", "UnreachableError"), outcome.events[-1]
        place.check("save", outcome)


def test_without_a_look_at_what_is_there_a_lost_answer_is_a_lost_race(place: Place) -> None:
    """A mutant: what is there is never our own. The sweep of time-outs finds it."""
    fault = SPOILED["time-out after success"]
    outcome = place.run("save-without-own-content", replace(fault, strikes=once(lambda one: "manifests" in one.path)))
    assert outcome.code == EXIT_TYPED_ERROR, outcome
    assert outcome.events[-1]["kind"] == "ExistsError", outcome.events[-1]


def test_a_server_without_conditions_is_refused(each: Place) -> None:
    place = each
    outcome = place.run("save", Fault("unconditional", lambda _: True))
    assert outcome.code == EXIT_TYPED_ERROR, outcome
    assert outcome.events[-1]["kind"] == "UnsupportedError", outcome.events[-1]
    assert place.server.objects("store").keys() == {*place.base, "PROBE"}


def test_without_a_condition_nobody_is_kept_from_committing_over_another(place: Place) -> None:
    """A mutant: puts replace. The probe finds it, because it then looks like a server that cannot."""
    outcome = place.run("save-without-condition")
    assert outcome.events[-1]["kind"] == "UnsupportedError", outcome


@pytest.fixture
def two(each: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Files, Files]:
    """Two views of one new store, as two jobs have them."""
    for name, value in each.server.environment.items():
        monkeypatch.setenv(name, value)
    each.proxy.set(None)
    options = ObjectOptions(f"http://127.0.0.1:{each.proxy.port}", retry_seconds=5.0)
    one, other = (files_at(f"{each.scheme}://{BUCKET}/{tmp_path.name}", options) for _ in range(2))
    return one, other


def test_of_two_jobs_the_older_is_fenced(two: tuple[Files, Files]) -> None:
    older = Job(two[0], Memory())
    older.save()
    draft = older.plan()
    for rank in range(RANKS):
        older.write(draft, rank)
    younger = Job(two[1], journal := Memory())
    assert younger.epoch > older.epoch
    with pytest.raises(FencedError):
        older.commit(draft)
    younger.save()
    younger.prune()
    check_reading(two[0], promised(journal.events))
    check_undamaged(two[0])


@pytest.mark.parametrize(("condition", "expected"), [(True, [1, 2]), (False, [1, 1])], ids=["", "mutant"])
def test_of_two_that_claim_at_once_each_gets_an_epoch_of_its_own(
    each: Place, two: tuple[Files, Files], condition: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look before either puts: the condition decides. Without it both own the same."""
    store_id = open_or_create(two[0]).store_id
    if not condition:
        monkeypatch.setattr(Bucket, "create", Bucket.replace)
    both = threading.Barrier(2, timeout=180)
    each.proxy.set(Fault(both.wait, lambda asked: asked.changes and asked.path.endswith("epochs/000001.json")))
    with ThreadPoolExecutor(2) as pool:
        epochs = sorted(pool.map(lambda files: claim_epoch(files, store_id).epoch, two))
    assert epochs == expected
    assert each.proxy.struck == 2, "both put the first"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (403, "check the credentials"),
        (501, "If-None-Match"),
        (301, "set `s3: {region"),
        (503, "fewer requests"),
        ("hang", "did not answer in time"),
        ("drop", "cannot be reached"),
    ],
)
def test_a_refusal_says_what_to_do(
    place: Place, what: int | str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    patience = 0.5 if what == "hang" else 30.0
    options = ObjectOptions(f"http://127.0.0.1:{place.proxy.port}", request_seconds=patience, retry_seconds=1.0)
    place.proxy.set(Fault(what, lambda _: True, seconds=60.0))
    with pytest.raises(StorageError, match=said):
        write_new(files_at(f"s3://{BUCKET}/{tmp_path.name}", options), "a", lambda file: file.write(b"data"))
