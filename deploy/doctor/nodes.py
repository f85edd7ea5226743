"""Check that all nodes see one directory: each rank creates a file there and waits for those of the others.

Every rank runs it, under torchrun or srun, which set its rank. Ranks communicate through the directory only, so a
directory that is not shared shows as missing ranks. Each rank removes its own files."""

import hashlib
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.doctor.base import Finding
from deploy.doctor.disk import nearest_directory
from deploy.format import plural
from store.text import listed

_STALE = 300.0  # seconds after which a file counts as left by a killed doctor
_ASK = 0.05


@dataclass(frozen=True)
class Ranks:
    """Rank and world size of this process; ``run`` identifies the launch."""

    rank: int
    count: int
    run: str

    @property
    def first(self) -> bool:
        """Return whether this is rank 0, which prints the answer."""
        return self.rank == 0


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks:
    """Read rank and world size from the variables of torchrun or srun; a single process without them.

    A Slurm batch script has a rank too, but no step, and counts as a single process."""
    for rank, count, names in (
        ("RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")),
        ("SLURM_PROCID", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    ):
        if rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in environment:
            continue
        with suppress(KeyError, ValueError):
            run = "/".join(environment.get(name, "") for name in names)
            return Ranks(int(environment[rank]), int(environment[count]), run)
    return Ranks(0, 1, "")


def check_nodes(root: Path, ranks: Ranks, seconds: float) -> Finding | None:
    """Wait up to ``seconds`` for the files of all ranks; None with a single rank."""
    if ranks.count == 1:
        return None
    place = nearest_directory(root)
    try:
        return _meet(place, ranks, seconds)
    except OSError as error:
        return Finding("nodes", "fail", f"cannot create a file in {place}: {error.strerror}", "see writing")


def _meet(place: Path, ranks: Ranks, seconds: float) -> Finding:
    own, done = _note(place, ranks, ranks.rank, "here"), _note(place, ranks, ranks.rank, "seen")
    try:
        own.write_text(socket.gethostname(), encoding="utf-8")
        now = own.stat().st_mtime  # by the clock of the filesystem, as those of the others
        there: dict[int, str] = {}

        def all_there() -> bool:
            there.update(_hosts(place, ranks, now))
            return len(there) == ranks.count

        _wait(all_there, seconds)
        done.write_text("", encoding="utf-8")
        # Wait until all ranks have seen this file before removing it.
        _wait(lambda: all(_has_seen(place, ranks, rank) for rank in there), seconds)
        return _finding(place, ranks, there, seconds)
    finally:
        for note in (own, done):
            note.unlink(missing_ok=True)


def _hosts(place: Path, ranks: Ranks, now: float) -> dict[int, str]:
    found = {}
    for rank in range(ranks.count):
        note = _note(place, ranks, rank, "here")
        with suppress(OSError):
            if abs(note.stat().st_mtime - now) < _STALE:
                found[rank] = note.read_text(encoding="utf-8")
    return found


def _has_seen(place: Path, ranks: Ranks, rank: int) -> bool:
    return _note(place, ranks, rank, "seen").exists() or not _note(place, ranks, rank, "here").exists()


def _note(place: Path, ranks: Ranks, rank: int, what: str) -> Path:
    token = hashlib.sha256(f"{ranks.run}/{ranks.count}/{rank}".encode()).hexdigest()[:12]
    return place / f".tmp-{token}-doctor-{what}"


def _wait(until: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(_ASK)


def _finding(place: Path, ranks: Ranks, there: Mapping[int, str], seconds: float) -> Finding:
    hosts = sorted({host for host in there.values() if host})
    missing = [rank for rank in range(ranks.count) if rank not in there]
    if not missing:
        seen = f"all {ranks.count} ranks, on {plural(len(hosts), 'machine')}, see the same {place}"
        return Finding("nodes", "ok", seen)
    return Finding(
        "nodes",
        "fail",
        f"{place} of rank {ranks.rank} on {socket.gethostname()} has no file of ranks "
        f"{listed(missing, 8)} after {seconds:.0f} s",
        "the directory is not shared, or its path differs: use one on a shared filesystem with the same path "
        "on all ranks. If ranks start late, raise --patience",
    )
