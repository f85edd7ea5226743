"""What happens to a rescue when something happens to the daemon, to the store, or when a new job comes."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from store.names import SaveId, payload_path
from store.retention import Retention, plan_prune
from store.verify import verify
from tests.support.control_groups import group
from tests.support.daemons import catalog_of, daemon, known, report, resumed, same, steps, trainer, until
from tests.support.jobs import Job

pytestmark = pytest.mark.slow

SLOW = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync", "-e", "inject=fsync:delay_enter=1000000")
"""Each fsync of the daemon takes a second more."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def slow() -> tuple[str, ...]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: what happens in the middle of a rescue is NOT tested")
    return SLOW


def groups(store: Path) -> set[str]:
    return {place.name for place in (store / "segments").iterdir()}


def rescuing(base: Path) -> int:
    """Until a rescue is under way; the daemon's process."""
    found = until(
        lambda: (found := report(base)) and any(job.state == "rescuing" for job in found.jobs) and found, "a rescue"
    )
    return int(found.pid)


def test_a_daemon_killed_in_the_middle_of_a_rescue(
    store: Path, base: Path, tmp_path: Path, slow: tuple[str, ...]
) -> None:
    with trainer(store, base, 7) as job:
        with daemon(base, prefix=slow):
            known(base)
            job.kill()
            pid = rescuing(base)
            until(lambda: SaveId(7, 1).name in groups(store), "its first bytes")
            os.kill(pid, signal.SIGKILL)
            until(lambda: not Path(f"/proc/{pid}").exists(), "its end")
        assert steps(store) == [4]
        assert verify(catalog_of(store)).ok
        with daemon(base):
            until(lambda: steps(store)[0] == 7, "the rescue by the next one")
        assert verify(catalog_of(store)).ok
        assert same(resumed(store, tmp_path), job.state())


def test_ended_in_the_middle_of_a_rescue_it_finishes_it(store: Path, base: Path, slow: tuple[str, ...]) -> None:
    with daemon(base, "--grace", 120, prefix=slow) as beside, trainer(store, base, 7) as job:
        known(base)
        job.kill()
        os.kill(rescuing(base), signal.SIGTERM)
        assert beside.process.wait(120) == 0
        assert steps(store) == [7, 4]


@pytest.mark.parametrize("linked", [False, True])
def test_a_new_job_in_the_middle_of_a_rescue(store: Path, base: Path, slow: tuple[str, ...], linked: bool) -> None:
    """Whether the daemon hears of it, finds that it begins or that it claimed the store: it gives up and tidies up."""
    with daemon(base, prefix=slow) as beside, trainer(store, base, 7) as job:
        known(base)
        job.kill()
        rescuing(base)
        memory = {"enabled": True, "every": 1, "path": str(base)}
        second = Job(store, every=4, memory=memory, daemon={"enabled": linked, "start": False})
        assert second.ckpt.resume() == 7
        assert second.ckpt.certificate is not None
        assert "memory" in {unit.source for unit in second.ckpt.certificate.units}
        assert beside.rescued() in ("fenced", "given up", "in use")
        assert SaveId(7, 1).name not in groups(store)
        second.ckpt.save(wait=True)
        second.ckpt.close()
    assert [save.epoch for save in catalog_of(store).saves()] == [2, 1]
    assert verify(catalog_of(store)).ok
    plan = plan_prune(catalog_of(store), Retention())
    assert not plan.unrecognised and not plan.temporaries and plan.blocked is None


def memory_of(pid: int, what: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) * 1024


def test_a_rescue_takes_little_memory(store: Path, base: Path) -> None:
    with daemon(base) as beside, trainer(store, base, 3, width=2400, every=100) as job:
        known(base)
        before = memory_of(beside.process.pid, "VmRSS")
        Path(f"/proc/{beside.process.pid}/clear_refs").write_text("5")  # the peak begins anew
        job.kill()
        assert beside.rescued() == "written"
        assert memory_of(beside.process.pid, "VmHWM") - before < 48 << 20
    written = (store / payload_path(SaveId(3, 1), 0)).stat().st_size
    assert written > 200e6
    assert verify(catalog_of(store)).ok


def test_a_daemon_that_is_killed_for_its_memory(store: Path, base: Path) -> None:
    with group(1 << 20) as limited, trainer(store, base, 7, width=1200) as job:
        with daemon(base) as first:
            known(base)
            (limited / "cgroup.procs").write_text(str(first.process.pid))
            job.kill()
            assert first.process.wait(90) == -signal.SIGKILL
        assert verify(catalog_of(store)).ok
        with daemon(base):
            until(lambda: steps(store)[0] == 7, "the rescue by the next one")
    assert verify(catalog_of(store)).ok


def test_storage_that_refuses_is_asked_again(store: Path, base: Path) -> None:
    with daemon(base) as beside, trainer(store, base, 7, width=600) as job:
        known(base)
        resource.prlimit(beside.process.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        job.kill()
        assert beside.rescued() == "failed"
        resource.prlimit(beside.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert steps(store) == [4] and groups(store) == {SaveId(4, 1).name}
        assert beside.rescued(2) == "written"
    assert steps(store) == [7, 4]
    assert verify(catalog_of(store)).ok


def test_a_store_that_is_away_is_asked_again(store: Path, base: Path) -> None:
    with daemon(base) as beside, trainer(store, base, 7) as job:
        known(base)
        away = store.rename(store.parent / "away")
        job.kill()
        assert beside.rescued() == "no store"
        away.rename(store)
        assert beside.rescued(2) == "written"
