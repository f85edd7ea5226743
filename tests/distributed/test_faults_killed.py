"""Each rank dies of SIGKILL in each phase of a save, the committer included, and torchrun restarts the job.

After every death: what is resumed is at least as new as the last commit that was acknowledged, it is the very state
that was saved in that step, and it is the same on both ranks.
"""

from __future__ import annotations

import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.core]

PHASES = {
    "rank 0 stages": (0, "before", "capture", ""),
    "rank 1 stages": (1, "before", "capture", ""),
    "rank 0 writes its payload": (0, "before", "sync", "rank-00000.safetensors"),
    "rank 1 writes its payload": (1, "before", "write", "rank-00001.safetensors"),
    "rank 1 has no part yet": (1, "before", "create", "rank-00001.json"),
    "rank 0 waits for parts": (0, "before", "list_dir", "segments/"),
    "rank 0 names the manifest": (0, "before", "link", "manifests/"),
    "rank 0 has not synced the manifest's name": (0, "after", "link", "manifests/"),
    "rank 0 has committed": (0, "before", "rename", "LATEST"),
    "rank 0 prunes": (0, "after", "unlink", "manifests/0"),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    directory = tmp_path_factory.mktemp("killed")
    spec = {"phases": list(PHASES.values())}
    done = torchrun("faults_killed.py", 2, spec, directory, restarts=len(PHASES), timeout=900)
    assert done.code == 0, done.output[-6000:]
    report = verify(open_catalog(LocalFiles(directory / "store")))
    assert [commit.problems for commit in report.commits] == [()] * len(report.commits)
    return done


@pytest.mark.parametrize("phase", PHASES)
def test_the_victim_died_there(launched: Launched, phase: str) -> None:
    dead = launched.of("dies")[list(PHASES).index(phase)]
    victim, _, operation, path = PHASES[phase]
    assert (dead["rank"], dead["at"]) == (victim, [operation, path])


@pytest.mark.parametrize("phase", PHASES)
def test_nothing_acknowledged_is_lost(launched: Launched, phase: str) -> None:
    incarnation = list(PHASES).index(phase) + 1
    at = next(i for i, one in enumerate(launched.records) if _resumes(one, incarnation))
    acknowledged = max(one["step"] for one in launched.records[:at] if one["kind"] == "acknowledged")
    for rank in (0, 1):
        resumed = launched.one("resumed", incarnation=incarnation, rank=rank)
        assert resumed["step"] >= acknowledged > 0


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_resumed_is_what_was_saved(launched: Launched, phase: str) -> None:
    incarnation = list(PHASES).index(phase) + 1
    for rank in (0, 1):
        resumed = launched.one("resumed", incarnation=incarnation, rank=rank)
        before = [one for one in launched.of("state", rank=0, step=resumed["step"]) if one["incarnation"] < incarnation]
        assert resumed["digest"] == before[-1]["digest"]


def test_a_name_that_was_given_is_a_commit(launched: Launched) -> None:
    """Killed between the manifest's name and the end of its sync: the kernel lives on, so the commit stands."""
    incarnation = list(PHASES).index("rank 0 has not synced the manifest's name")
    killed_in = launched.one("resumed", incarnation=incarnation, rank=0)["step"] + 3
    assert launched.one("resumed", incarnation=incarnation + 1, rank=0)["step"] == killed_in


def test_the_last_incarnation_ends_well(launched: Launched) -> None:
    assert [one["incarnation"] for one in launched.of("finished")] == [len(PHASES)] * 2


def _resumes(record: dict[str, object], incarnation: int) -> bool:
    return record["kind"] == "resumed" and record["incarnation"] == incarnation
