"""L6: the real code against a real S3 server, through a proxy that kills the writer at every request, before the server
has it and after it has carried it out, and that spoils every answer in every way that object stores do.

Whatever happened, the objects are looked at as files of a directory, which is what they are; and the next job, which
has to live with what is left in the bucket, saves and prunes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checker import check_reading, check_undamaged, promised
from runs import EXIT_TYPED_ERROR, Outcome, Zygote

from store.files import LocalFiles
from tests.support.faulty import Asked, Fault, Proxy, nth
from tests.support.s3 import BUCKET, KEYS, Server, tiny_parts

pytestmark = pytest.mark.slow


@dataclass
class Place:
    """Where runs happen: a base store after several saves, and the same objects again for each run."""

    server: Server
    proxy: Proxy
    zygote: Zygote
    folder: Path
    base: Mapping[str, bytes]
    base_events: Sequence[Mapping[str, Any]]

    def run(self, scenario: str, fault: Fault | None = None, *, fresh: bool = True) -> Outcome:
        """fresh: on the base, or on nothing where the scenario begins with nothing; else on what is there."""
        if fresh:
            self.server.put("store", self.base if scenario == "save" else {})
        journal = self.folder / "journal"
        journal.unlink(missing_ok=True)
        self.proxy.set(fault)
        self.proxy.aim(self.zygote.begun(scenario, f"s3://{BUCKET}/store", journal))
        return self.zygote.ended(journal)

    def asked(self, scenario: str) -> list[Asked]:
        """What an undisturbed run asks for."""
        outcome = self.run(scenario)
        assert outcome.code == 0, outcome
        return list(self.proxy.asked)

    def check(self, scenario: str, outcome: Outcome) -> None:
        """(a) to (d)."""
        events = [*(self.base_events if scenario == "save" else ()), *outcome.events]
        first = self._read(events)
        assert first == self._read(events)
        again = self.run("save", fresh=False)
        assert again.code == 0, again
        assert self._read([*events, *again.events])

    def _read(self, events: Sequence[Mapping[str, Any]]) -> Any:
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        files = LocalFiles(self.server.copied("store", copy))
        reading = check_reading(files, promised(events))
        check_undamaged(files)
        return None if reading is None else (reading.save, reading.versions, reading.tensors)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("objects")
    with Server() as server, tiny_parts(), Proxy(server.port) as proxy:
        with Zygote({**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "TMPDIR": str(folder)}) as zygote:
            place = Place(server, proxy, zygote, folder, {}, ())
            outcome = place.run("several")
            assert outcome.code == 0, outcome
            place.base, place.base_events = server.objects("store"), outcome.events
            yield place


def test_what_a_run_asks_for(place: Place) -> None:
    """Uploads in parts, puts on a condition, and deletes are among what is swept below."""
    asked = place.asked("save")
    assert sum(one.query.startswith("uploadId") and one.method == "POST" for one in asked) == 2, "each rank's payload"
    assert sum(one.query.startswith("partNumber") or "partNumber" in one.query for one in asked) > 4
    assert sum(one.conditional for one in asked) == 5, "the claim, two parts, the manifest, and the probe"
    assert any(one.query == "delete" for one in asked)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_request(place: Place, after: bool) -> None:
    for asked in place.asked("save"):
        outcome = place.run("save", Fault("kill", nth(asked.number), after))
        assert outcome.code == -9, (asked, outcome)
        place.check("save", outcome)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_while_a_store_is_made_and_pruned(place: Place, after: bool) -> None:
    asked = place.asked("several")
    for one in [one for one in asked if one.changes][:: 3 if after else 4]:
        outcome = place.run("several", Fault("kill", nth(one.number), after))
        assert outcome.code == -9, (one, outcome)
        place.check("several", outcome)
