"""Kills a training job at random moments, restarts it, and checks after every round what came back.

    python -m tests.chaos.kills --rounds 100 --seed 7 --framework zero2

After each kill: the resume is not older than the last acknowledged commit, nor than the newest version in memory that
all ranks were known to have; it comes from memory where that is newer; the state is, to the bit, that of an
uninterrupted run at the step that is resumed; and so is every loss that follows. At the end the job ends by itself, and
nothing is left in shared memory.

``--no-memory``: without a memory tier. Then it always resumes from a commit.
``--daemon``: with the node's daemon, which is killed as well, and which writes what dead jobs leave into the store.
``--supervised``: under ``driftpoint run``, which is killed first.
``--journal``: without a memory tier, and with the journal. Then it resumes from any step, and tells how many steps were
taken again that all ranks had taken. ``--policy parity``: and with commits whose layers are of several steps.
``--peers``: every rank has a node of its own, and after every other kill one of them is lost with its memory. Then the
resume is not older than the newest version that all ranks were known to have at their peers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.daemon_protocol import AskStatus, AskStop, Report, query_daemon
from store.errors import DriftpointError
from tests.chaos.diary import entries
from tests.chaos.victims import DAEMON_VICTIMS, VICTIMS, Target, end_job
from tests.support.launch import ENVIRONMENT, ROOT, WORKERS, Started, launcher

TRAINER = Path(__file__).with_name("trainer.py")

CASES: dict[str, dict[str, Any]] = {
    "plain": {"kind": "plain"},
    "ddp": {"kind": "ddp"},
    "zero1": {"kind": "zero", "stage": 1, "precision": "bf16"},
    "zero2": {"kind": "zero", "stage": 2, "precision": "bf16"},
    "zero3": {"kind": "zero", "stage": 3, "precision": "bf16"},
    "fsdp2": {"kind": "fsdp2"},
}
"""The job of each framework, for :func:`resume_jobs.build`. Plain PyTorch has one rank, the others have two: from three
on DistributedDataParallel sums gradients in another order in the first step after a start than later, since it lays its
buckets out anew after it; then no job that was restarted equals one that was not."""

ALL_TRAINED = {"frozen": False}
"""A version in memory of a model with frozen weights is never called exact (docs/memory.md)."""

EVERY = 7
"""Steps between commits."""

LIMIT = 400.0
"""Seconds after which a job counts as hanging, however busy the machine is."""

Process = Started | subprocess.Popen[bytes]

Reference = dict[tuple[int, int], dict[str, Any]]
"""Losses and the digest of the state after each step of an uninterrupted run, by rank and step."""


@dataclass
class Chaos:
    """One run of so many rounds. Raises AssertionError, with the seed, at the first round that goes wrong."""

    folder: Path
    shared: Path
    rounds: int
    seed: int
    framework: str = "plain"
    names: Sequence[str] = tuple(VICTIMS)
    memory: bool = True
    daemon: bool = False
    supervised: bool = False
    peers: bool = False
    journal: bool = False
    policy: str = "full"
    outcomes: Counter[str] = field(default_factory=Counter)
    promised: tuple[int, int] = (0, 0)
    """Newest step that was committed, and that all ranks were known to have in memory, so far."""
    replicated: int = 0
    """Newest step that all ranks were known to have at their peers, too, since the job last resumed another one."""
    taken: int = 0
    """Newest step that all ranks had taken in the round before."""
    reference: Reference = field(default_factory=dict)
    known: int = 0
    """The reference run's last step."""

    @property
    def ranks(self) -> int:
        return 1 if self.framework == "plain" else 2

    @property
    def steps(self) -> int:
        """More than a busy machine lets it train in all rounds, before the signals are there."""
        return 40 * self.rounds + 100

    def run(self) -> Counter[str]:
        """All rounds, the last one without a kill."""
        chance = random.Random(self.seed)
        self._know(18 * self.rounds)  # as far as it comes, as a rule
        for number in range(self.rounds):
            self._round(number, chance)
        self._last()
        return self.outcomes

    def _round(self, number: int, chance: random.Random) -> None:
        process, diary = self._started(number)
        try:
            resumed = self._resumed(process, diary)
            self._check(number, resumed)
            early = bool(self.promised[0]) or (number + 1 < self.rounds and chance.random() < 0.2)
            self._until(process, diary, resumed[0]["step"] + chance.randrange(1, 14), early)
            time.sleep(chance.uniform(0, 0.05))
            name = chance.choice(list(self.names))
            target = Target(process.pid, {one["rank"]: one["pid"] for one in resumed}, self._daemon_pid())
            (VICTIMS | DAEMON_VICTIMS)[name](target, chance)
            self.outcomes[name] += 1
        finally:
            end_job(process, [one["pid"] for one in entries(diary)])
        self._note(number, diary)
        if self.peers and chance.random() < 0.5:
            shutil.rmtree(self.shared / f"node{chance.randrange(self.ranks)}", ignore_errors=True)
            self.promised, self.replicated = (self.promised[0], self.replicated), 0
            self.outcomes["a node lost"] += 1

    def _last(self) -> None:
        """To its end, a few steps on: closed as it is meant to be."""
        newest = max(self.promised)
        process, diary = self._started(self.rounds, min(self.steps, newest + 20))
        try:
            resumed = self._resumed(process, diary)
            self._check(self.rounds, resumed)
            code = process.wait(LIMIT)
        finally:
            end_job(process, [one["pid"] for one in entries(diary)])
        assert code == 0, self._said(self.rounds, "the last one did not end by itself")
        self._note(self.rounds, diary)
        ends = entries(diary, "end")
        assert len(ends) == self.ranks
        for one in ends:
            wanted = self.reference[one["rank"], one["step"]]["digest"]
            assert one["digest"] == wanted, self._said(self.rounds, f"another state in the end: {one}")
        if self.daemon:
            with suppress(DriftpointError):  # it was killed, and nobody needed another one
                query_daemon(self.shared, AskStop(), 10.0)
        left = [str(path) for path in self.shared.rglob("rank-*" if self.memory else "*")]
        assert not left, self._said(self.rounds, f"left in shared memory: {left}")

    def _check(self, number: int, resumed: list[dict[str, Any]]) -> None:
        committed, newest = self.promised
        step = resumed[0]["step"]
        from_memory = bool({"memory", "peer"} & {*resumed[0]["sources"]})
        assert self.memory or not from_memory, self._said(number, f"there is no memory tier: {resumed}")
        assert {one["step"] for one in resumed} == {step}, self._said(number, f"ranks disagree: {resumed}")
        assert step >= committed, self._said(number, f"step {step} is older than the commit {committed}")
        assert step >= newest, self._said(number, f"step {step} is older than the version {newest} that all ranks had")
        assert from_memory or self.daemon or self.journal or step % EVERY == 0, self._said(
            number, f"step {step} was never committed"
        )
        for one in resumed:
            assert one["exact"], self._said(number, f"not exact: {one}")
            if step:
                wanted = self.reference[one["rank"], step]["digest"]
                assert one["digest"] == wanted, self._said(number, f"another state than at step {step}: {one}")
        self.replicated *= step == self.replicated  # what is older goes when a newer one is resumed
        self.outcomes["from memory" if from_memory else "from the store" if step else "anew"] += 1
        self.outcomes["from peers"] += "peer" in resumed[0]["sources"]
        if self.journal and committed:
            self.outcomes[f"steps taken again: {max(0, self.taken - step)}"] += 1

    def _note(self, number: int, diary: Path) -> None:
        """Compare the losses since the resume, and keep what was acknowledged. The job has ended."""
        told = entries(diary, "step")
        self._know(max((one["step"] for one in told), default=0) + 1)  # one more than it lived to write down, maybe
        for one in told:
            wanted = self.reference[one["rank"], one["step"]]["losses"]
            assert one["losses"] == wanted, self._said(number, f"other losses than {wanted}: {one}")
        self.promised = (
            max([self.promised[0], *(one["committed"] for one in told)]),
            max([self.promised[1], *(one["newest"] for one in told)]),
        )
        self.replicated = max([self.replicated, *(one["replicated"] for one in told)])
        by_rank = [[one["step"] for one in told if one["rank"] == rank] for rank in range(self.ranks)]
        self.taken = min(max(steps, default=0) for steps in by_rank)

    def _know(self, step: int) -> None:
        """Have the reference run come to a step: a longer one is the same, as far as the shorter one came."""
        if min(step, self.steps) <= self.known:
            return
        self.known = min(step + 30, self.steps)
        process, diary = self._started(-1, self.known, reference=True)
        try:
            assert process.wait(5 * LIMIT) == 0, self._said(-1, "the reference run failed")
        finally:
            end_job(process, [])
        self.reference = {(one["rank"], one["step"]): one for one in entries(diary)}

    def _started(self, number: int, steps: int | None = None, *, reference: bool = False) -> tuple[Process, Path]:
        name = f"reference-{steps}" if reference else f"round-{number}"
        diary, described = self.folder / f"{name}.jsonl", self.folder / f"{name}.json"
        store = self.folder / "store"
        settings = {
            "store": str(store),
            "every": EVERY,
            "memory": {"enabled": self.memory, "every": 1, "path": str(self.shared), "peers": self.peers},
            "staging": "lazy" if number % 2 else "eager",
            "metrics": {"enabled": False},
            "trace": {"enabled": False},
            "daemon": {"enabled": self.daemon, "port": 0, "exit_idle_seconds": 20},
            "journal": {"enabled": self.journal},
            "policy": {"name": self.policy, "k": 4} if self.policy == "parity" else self.policy,
        }
        case = {**CASES[self.framework], **ALL_TRAINED, "total_steps": self.steps}
        spec = {
            "case": case, "steps": steps or self.steps, "pause": 0.01, "settings": settings, "diary": str(diary),
            "reference": reference, "nodes": self.peers,
        }  # fmt: skip
        described.write_text(json.dumps(spec))
        words = [*(launcher(self.ranks) if self.ranks > 1 else []), str(TRAINER), str(described)]
        known, told = {"PYTHONPATH": f"{ROOT}{os.pathsep}{WORKERS}"}, self.folder / f"{name}.txt"
        if not self.supervised or reference:
            return Started(words, self.folder, told, **known), diary
        run = [sys.executable, "-m", "deploy.cli", "run", "--store", str(store), "--max-restarts", "0", "--wait", "30"]
        with told.open("w") as output:
            process = subprocess.Popen(
                [*run, "--", sys.executable, *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **known},
                cwd=self.folder,
                start_new_session=True,
            )
        return process, diary

    def _resumed(self, process: Process, diary: Path) -> list[dict[str, Any]]:
        """What every rank resumed, once it has."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            found = entries(diary, "resumed")
            if len(found) == self.ranks:
                return sorted(found, key=lambda one: int(one["rank"]))
            assert process.poll() is None, self._said(
                -1, f"it ended by itself: {diary.with_suffix('.txt').read_text()}"
            )
            time.sleep(0.005)
        raise AssertionError(self._said(-1, f"nothing was resumed in {LIMIT} s"))

    def _daemon_pid(self) -> int | None:
        if not self.daemon:
            return None
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(DriftpointError):
                found = query_daemon(self.shared, AskStatus(), 5.0)
                if isinstance(found, Report):
                    return found.pid
            time.sleep(0.02)
        raise AssertionError(self._said(-1, "there is no daemon after 60 s"))

    def _until(self, process: Process, diary: Path, step: int, early: bool) -> None:
        """Until a step, and a first commit. early: even before there is something to lose."""
        deadline = time.monotonic() + LIMIT
        while not any(one["step"] >= step and (one["committed"] or early) for one in entries(diary, "step")):
            assert process.poll() is None, self._said(-1, "it ended by itself")
            assert time.monotonic() < deadline, self._said(-1, f"step {step} was not reached in {LIMIT} s")
            time.sleep(0.002)

    def _said(self, number: int, text: str) -> str:
        return f"seed {self.seed}, {self.framework}, round {number}: {text} (in {self.folder})"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--framework", choices=[*CASES], default="plain", help="plain: one rank; others: two")
    names = sorted(VICTIMS | DAEMON_VICTIMS)
    parser.add_argument("--victim", action="append", choices=names, help="only these; may be repeated")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="the memory tier")
    parser.add_argument("--daemon", action="store_true", help="with the node's daemon")
    parser.add_argument("--supervised", action="store_true", help="under driftpoint run")
    parser.add_argument("--peers", action="store_true", help="a node for each rank; nodes are lost")
    parser.add_argument("--journal", action="store_true", help="with the journal, without the memory tier")
    parser.add_argument("--policy", choices=["full", "parity"], default="full")
    parser.add_argument("--shared", type=Path, default=Path("/dev/shm"), help="shared memory")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="driftpoint-kills-"))
    shared = Path(tempfile.mkdtemp(prefix="driftpoint-kills-", dir=given.shared))
    print(f"seed {given.seed}, {given.rounds} rounds, {given.framework}, in {folder}", flush=True)
    try:
        usual = ["everything"] if given.supervised else [*VICTIMS]  # others would make it start the job again
        victims = given.victim or usual + ([*DAEMON_VICTIMS] if given.daemon else [])
        memory = given.memory and not given.journal
        how = (memory, given.daemon, given.supervised, given.peers, given.journal, given.policy)
        chaos = Chaos(folder, shared, given.rounds, given.seed, given.framework, victims, *how)
        for name, count in sorted(chaos.run().items()):
            print(f"{name}: {count}")
        shutil.rmtree(folder)
    finally:
        shutil.rmtree(shared)
    return 0


if __name__ == "__main__":
    sys.exit(main())
