"""Scenarios of ``self_check_ranks.py`` whose state is kept in memory or in the journal between saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from faults_ranks import Scenario
from replicated_jobs import Replicated, Sharded, average, digest_of, kept, tell_back
from resume_jobs import rank

from monitor.save.self_check import SelfChecker
from store.names import SaveId
from tests.support.internals import abandon, saver_of, wait_for_snapshot


def averaged_in_memory(s: Scenario) -> None:
    """Versions between two averages are not resumed: each holds a rank's own weights. Nor are records."""
    for in_memory in (True, False):
        inner = s.within(f"{in_memory}")
        job, weights = Replicated(inner, frozen=False, every=4, **kept(inner, in_memory)), {}
        for step in range(1, 8):
            job.update(local=True)
            if step % 2 == 0:
                average(job)
            weights[step] = job.weights()
            job.save()
            if in_memory:
                wait_for_snapshot(job.ckpt)
        there = weights[6 if in_memory else 4]
        tell_back(s, job, there, other=inner, in_memory=in_memory, name=f"{in_memory}")


def evaluated_before_each_step(s: Scenario) -> None:
    """A forward without gradients costs no version in memory, and no record."""
    for in_memory in (True, False):
        inner = s.within(f"{in_memory}")
        job = Replicated(inner, frozen=False, every=4, **kept(inner, in_memory))
        for _ in range(7):
            job.update(evaluate=True)
            job.save()
            if in_memory:
                wait_for_snapshot(job.ckpt)
        tell_back(s, job, job.weights(), other=inner, in_memory=in_memory, name=f"{in_memory}")


def in_memory(s: Scenario) -> None:
    """Of versions in memory, none is resumed from ranks that had come apart."""
    _until_they_came_apart(s, in_memory=True)


def in_the_journal(s: Scenario) -> None:
    """Nor does the journal lead there."""
    _until_they_came_apart(s, in_memory=False)


def _until_they_came_apart(s: Scenario, *, in_memory: bool) -> None:
    others = {
        "lr": 0.01 / (1 + rank()),
        "weight_decay": 0.01 + 0.3 * rank(),
        "betas": (np.float64(0.9 - 0.3 * rank()), 0.999),
    }
    for name, value in others.items():
        inner = s.within(name)
        job = Replicated(inner, frozen=False, every=3, **kept(inner, in_memory))
        for step in range(1, 6):
            if step == 5:
                weights = job.weights()
                job.own(value, name)
            job.steps(1)
            if in_memory:
                wait_for_snapshot(job.ckpt)
        tell_back(s, job, weights, other=inner, in_memory=in_memory, name=name)


def alike_at_every_step(s: Scenario) -> None:
    """One rank's schedule runs a line earlier: a decision sees it, and no step is taken with it."""
    for name, settings in {"checked": {}, "not checked": {"self_check": False}}.items():
        for in_memory in (True, False):
            inner = s.within(f"{name} {in_memory}")
            job = Replicated(inner, frozen=False, every=4, **settings, **kept(inner, in_memory))
            for step in range(1, 11):
                job.update()
                if step == 4:
                    job.own(0.01 / (1 + rank()))
                job.save()
                job.own(0.01)
                if in_memory:
                    wait_for_snapshot(job.ckpt)
            tell_back(s, job, job.weights(), other=inner, in_memory=in_memory, name=f"{name}, {in_memory}")


def gone_back_in_memory(s: Scenario) -> None:
    """A resume in the same processes makes the ranks alike: versions in memory are used again."""
    job = Replicated(s, frozen=False, every=3, **kept(s, in_memory=True))
    job.steps(3)
    job.own(0.01 / (1 + rank()))
    job.steps(1)
    job.own(0.01)
    assert job.ckpt.resume() == 3
    for _ in range(2):
        job.steps(1)
        wait_for_snapshot(job.ckpt)
    tell_back(s, job, job.weights(), other=s, in_memory=True, name="lr")


def apart_in_memory(s: Scenario) -> None:
    """Versions in memory of ranks that a save found to differ are resumed, and are not exact."""
    job = Replicated(s, frozen=False, every=4, **kept(s, in_memory=True))
    job.model[0].bias.data += rank()
    for step in range(1, 8):
        job.own(0.01 / (1 + rank()) if step == 5 else 0.01)
        job.steps(1)
        wait_for_snapshot(job.ckpt)
    tell_back(s, job, job.weights(), other=s, in_memory=True, name="lr")


def not_compared(s: Scenario) -> None:
    """Without the self-check nothing tells whether ranks are alike once a step was taken apart."""
    job = Replicated(s, frozen=False, every=4, self_check=False, **kept(s, in_memory=True))
    for step in range(1, 12):
        job.own(0.01 / (1 + rank()) if step == 6 else 0.01)
        job.steps(1)
        wait_for_snapshot(job.ckpt)
    tell_back(s, job, job.weights(), other=s, in_memory=True, name="lr", self_check=False)


def skipped_beside_shards(s: Scenario) -> None:
    """One rank leaves an update out: the counts of its optimizer are its own, in commits and in memory.

    The second life has resumed such counts, and keeps them before its first save. Batches are as of the last step."""
    for life in range(3):
        job = Sharded(s, frozen=False, every=5, **kept(s, in_memory=True))
        for step in range(job.resumed + 1, (7, 9, 14)[life]):
            job.batches.manual_seed(2 * step + rank())
            job.update(skip=step == 2 and rank() == 1)
            job.save()
            wait_for_snapshot(job.ckpt)
        counts = [int(state["step"]) for state in job.optimizer.state.values()]
        certificate = job.ckpt.certificate
        exact = certificate is None or certificate.exact
        s.tell("life", life=life, resumed=job.resumed, exact=exact, counts=counts, weights=digest_of(job.weights()))
        abandon(job.ckpt)
        dist.barrier()
    job = Sharded(s.within("undisturbed"), frozen=False, every=100)
    for step in range(1, 14):
        job.batches.manual_seed(2 * step + rank())
        job.update(skip=step == 2 and rank() == 1)
        job.ckpt.step()
    s.tell("undisturbed", weights=digest_of(job.weights()))
    job.ckpt.close(save=False)
    dist.barrier()


class Refuses:
    """An object of the script whose state cannot be had once."""

    refuse = False

    def state_dict(self) -> dict[str, Any]:
        if self.refuse:
            raise RuntimeError("not now")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def state_of_one_rank(s: Scenario) -> None:
    """One rank leaves out the step in which a layer gets its optimizer state."""
    job = Sharded(s, frozen=False, every=4, **kept(s, in_memory=True))
    for step in range(1, 5):
        before = job.weights()
        job.update(skip=step == 4 and rank() == 1, last_layer=step == 4)
        job.save()
        wait_for_snapshot(job.ckpt)
    abandon(job.ckpt)
    dist.barrier()
    back = Sharded(s, frozen=False, every=4, **kept(s, in_memory=True))
    assert back.ckpt.certificate is not None
    alike = digest_of(back.weights()) == digest_of(before)
    s.tell("back", step=back.resumed, exact=back.ckpt.certificate.exact, alike=alike)
    back.ckpt.close(save=False)
    dist.barrier()


def apart_and_not_checked(s: Scenario) -> None:
    """The save that finds the ranks apart fails on rank 0, or has no memory to look at its state."""
    for name in ("the run state", "the samples"):
        inner, other = s.within(name), Refuses()
        job = Replicated(inner, frozen=False, every=4, state={"other": other}, **kept(inner, in_memory=True))
        checker = saver_of(job.ckpt).checker
        for step in range(1, 12):
            job.own(0.01 / (1 + rank()) if step == 6 else 0.01)
            other.refuse = step == 8 and rank() == 0 and name == "the run state"
            short = step == 8 and rank() == 0 and name == "the samples"
            checker.begin = partial(_without_memory if short else SelfChecker.begin, checker)  # type: ignore[method-assign]
            job.steps(1)
            other.refuse = False
            wait_for_snapshot(job.ckpt)
        tell_back(s, job, job.weights(), other=inner, in_memory=True, name=name, state={"other": other})


def _without_memory(checker: SelfChecker, save: SaveId, _: Any) -> Any:
    return SelfChecker.begin(checker, save, _out_of_memory())


def _out_of_memory() -> Iterator[Any]:
    raise MemoryError
    yield


KEPT = (
    averaged_in_memory,
    evaluated_before_each_step,
    in_memory,
    in_the_journal,
    alike_at_every_step,
    gone_back_in_memory,
    apart_in_memory,
    not_compared,
    skipped_beside_shards,
    state_of_one_rank,
    apart_and_not_checked,
)
