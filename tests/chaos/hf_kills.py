"""Kills a Hugging Face Trainer at random moments, restarts it, and compares every loss with those of a Trainer that was
left alone.

    python -m tests.chaos.hf_kills --rounds 20 --seed 7 --ranks 2

What the job does (accumulation, how data is ordered, evaluation, the Trainer's own saving, memory tier, staging) is
drawn from the seed. After each kill: the resume is not older than the last acknowledged commit, all ranks go on from
the same step, which is not older than the newest version in memory that all were known to have, and every micro-batch's
loss is, to the bit, that of the job that was left alone. At the end nothing is left in shared memory.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.diary import entries
from tests.chaos.victims import VICTIMS, Target, end_job
from tests.support.launch import Started, launcher

TRAINER = Path(__file__).with_name("hf_trainer.py")

LIMIT = 400.0
"""Seconds after which a job counts as hanging, however busy the machine is."""

Losses = dict[tuple[int, int], list[str]]
"""By rank and step."""


def drawn(chance: random.Random, steps: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """What the job does: arguments of the Trainer, settings of ours, samples."""
    evaluating = chance.random() < 0.5
    workers = chance.choice([0, 0, 1])
    arguments: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": chance.choice([2, 3]),
        "gradient_accumulation_steps": chance.choice([1, 2, 3]),
        "learning_rate": 1e-2,
        "lr_scheduler_type": chance.choice(["cosine", "linear"]),
        "logging_steps": 1,
        "dataloader_num_workers": workers,
        # Workers of an evaluation that persist are seeded once a process: then a resume does not come to the same bits.
        "dataloader_persistent_workers": bool(workers) and not evaluating and chance.random() < 0.5,
        "train_sampling_strategy": chance.choice(["random", "random", "group_by_length", "sequential"]),
        "save_strategy": "no",
    }
    if evaluating:
        arguments |= {"eval_strategy": "steps", "eval_steps": chance.choice([2, 5])}
    if evaluating and chance.random() < 0.5:
        often = {"save_steps": arguments["eval_steps"], "save_total_limit": 1}
        arguments |= {"save_strategy": "steps", "load_best_model_at_end": True, **often}
    settings = {
        "every": chance.choice([1, 3, 7]),
        "staging": chance.choice(["eager", "lazy"]),
        "memory": {"enabled": chance.random() < 0.5, "every": 1},
    }
    return arguments, settings, chance.choice([29, 38, 47])


@dataclass
class TrainerChaos:
    """One run of so many rounds. AssertionError, with the seed, at the first round that goes wrong."""

    folder: Path
    shared: Path
    rounds: int
    seed: int
    ranks: int = 1
    memory: bool | None = None
    """Whether there is a memory tier. None: drawn."""
    outcomes: Counter[str] = field(default_factory=Counter)
    committed: int = 0
    newest: int = 0
    """In memory, that all ranks were known to have."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.steps = 12 * self.rounds + 10
        self.arguments, settings, self.samples = drawn(self.chance, self.steps)
        self.settings = {**settings, "store": str(self.folder / "store"), "trace": {"enabled": False}}
        if self.memory is not None:
            self.settings["memory"]["enabled"] = self.memory
        self.settings["memory"]["path"] = str(self.shared)
        self.settings["metrics"] = {"port": 0}

    def run(self) -> Counter[str]:
        """All rounds, and one that is left alone."""
        print(f"seed {self.seed}: {self.arguments} {self.settings} {self.samples} samples", flush=True)
        process, diary = self._started("reference", None)
        self._ended(process, diary)
        reference, (end, *_) = self._losses(diary), entries(diary, "end")
        for number in range(self.rounds):
            process, diary = self._started(f"round-{number}", self.settings)
            try:
                self._kill(process, diary)
            finally:
                end_job(process, [one["pid"] for one in entries(diary)])
            self._check(number, diary, reference)
        process, diary = self._started("last", self.settings)
        self._ended(process, diary)
        self._check(self.rounds, diary, reference)
        for one in entries(diary, "end"):
            assert one["weights"] == end["weights"], self._said(self.rounds, "other weights in the end")
            assert one["log"] == end["log"], self._said(self.rounds, "another history in the end")
        left = [str(path) for path in self.shared.rglob("rank-*")]
        assert not left, self._said(self.rounds, f"left in shared memory: {left}")
        return self.outcomes

    def _kill(self, process: Started, diary: Path) -> None:
        early = self.chance.random() < 0.2
        after, name = self.chance.randrange(1, 14), self.chance.choice(list(VICTIMS))
        deadline = time.monotonic() + LIMIT
        while process.poll() is None:
            assert time.monotonic() < deadline, self._said(-1, f"nothing came of it in {LIMIT} s")
            resumed, told = entries(diary, "resumed"), entries(diary, "step")
            if len(resumed) == self.ranks and (early or self._far_enough(told, resumed[0]["step"] + after)):
                time.sleep(self.chance.uniform(0, 0.05))
                VICTIMS[name](Target(process.pid, {one["rank"]: one["pid"] for one in resumed}), self.chance)
                self.outcomes[name] += 1
                return
            time.sleep(0.002)
        assert process.returncode == 0, self._said(-1, "it ended by itself")
        self.outcomes["it was faster"] += 1

    def _far_enough(self, told: list[dict[str, Any]], step: int) -> bool:
        """There is something to lose."""
        return any(one["step"] >= step and (one["committed"] or self.committed) for one in told)

    def _check(self, number: int, diary: Path, reference: Losses) -> None:
        resumed, losses = entries(diary, "resumed"), self._losses(diary)
        if resumed:
            step = resumed[0]["step"]
            assert {one["step"] for one in resumed} == {step}, self._said(number, f"ranks disagree: {resumed}")
            assert all(one["exact"] for one in resumed), self._said(number, "not exact")
            assert step >= self.committed, self._said(number, f"{step} is older than the commit {self.committed}")
            assert step >= self.newest, self._said(number, f"{step} is older than the version {self.newest} in memory")
            first = min((step for _, step in losses), default=step)
            assert first == step, self._said(number, f"step {step} was resumed, and {first} was trained")
            from_memory = "memory" in resumed[0]["sources"]
            assert self.settings["memory"]["enabled"] or not from_memory, self._said(number, "there is no memory tier")
            self.outcomes["resumed" if step else "anew"] += 1
            self.outcomes["from memory"] += from_memory
        for (rank, step), found in losses.items():
            wanted = reference[rank, step][: len(found)]  # the last one may have been killed in its accumulation
            assert found == wanted, self._said(number, f"rank {rank}, step {step}: {found} and not {wanted}")
        told = entries(diary, "step")
        self.committed = max([self.committed, *(one["committed"] for one in told)])
        self.newest = max([self.newest, *(one["newest"] for one in told)])

    def _losses(self, diary: Path) -> Losses:
        found: Losses = {}
        for one in entries(diary, "loss"):
            found.setdefault((one["rank"], one["step"]), []).append(one["loss"])
        return found

    def _started(self, name: str, settings: dict[str, Any] | None) -> tuple[Started, Path]:
        diary, described = self.folder / f"{name}.jsonl", self.folder / f"{name}.json"
        output = self.folder / ("alone" if settings is None else "output")
        spec = {
            "diary": str(diary), "output": str(output), "arguments": self.arguments, "settings": settings,
            "samples": self.samples,
        }  # fmt: skip
        described.write_text(json.dumps(spec))
        words = [*(launcher(self.ranks) if self.ranks > 1 else []), str(TRAINER), str(described)]
        return Started(words, self.folder, self.folder / f"{name}.txt", TMPDIR=str(self.folder)), diary

    def _ended(self, process: Started, diary: Path) -> None:
        try:
            code = process.wait(2 * LIMIT)
        finally:
            end_job(process, [one["pid"] for one in entries(diary)])
        assert code == 0, self._said(-1, diary.with_suffix(".txt").read_text()[-3000:])

    def _said(self, number: int, text: str) -> str:
        return f"seed {self.seed}, ranks {self.ranks}, round {number}: {text} (in {self.folder})"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, help="a memory tier; drawn by default")
    parser.add_argument("--shared", type=Path, default=Path("/dev/shm"), help="shared memory")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="driftpoint-hf-kills-"))
    shared = Path(tempfile.mkdtemp(prefix="driftpoint-hf-kills-", dir=given.shared))
    print(f"{given.rounds} rounds, {given.ranks} ranks, in {folder}", flush=True)
    try:
        chaos = TrainerChaos(folder, shared, given.rounds, given.seed, given.ranks, given.memory)
        for name, count in sorted(chaos.run().items()):
            print(f"{name}: {count}")
        shutil.rmtree(folder)
    finally:
        shutil.rmtree(shared)
    return 0


if __name__ == "__main__":
    sys.exit(main())
