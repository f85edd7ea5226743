"""Two ranks on one model meet one trouble after the other; each scenario records what both of them saw.

Usage: faults_ranks.py SPEC.json
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from resume_jobs import Results, leave, rank, start_group

from monitor.adapters import adapter_for
from monitor.adapters.module_tensors import as_bytes
from monitor.config.schema import StagingSettings
from monitor.save.async_copy import CopyTiming
from monitor.save.staging import StagingPool
from monitor.telemetry import log
from store.catalog import Catalog, open_catalog
from store.errors import DriftpointError, StorageError
from store.names import Unit
from store.session import claim_epoch
from store.storage.local import LocalFiles
from tests.support.hooked import HookedFiles
from tests.support.internals import job_of, saver_of, session_of, shift_step
from tests.support.jobs import Job, same, skip_reason


class Scenario:
    """A store of its own, and the records of both ranks."""

    def __init__(self, name: str, directory: Path, results: Results) -> None:
        self.name, self.store, self._results = name, directory / name, results

    def tell(self, kind: str, **fields: Any) -> None:
        self._results.tell(kind, scenario=self.name, **fields)

    def within(self, name: str) -> Scenario:
        """Another store of this scenario."""
        return Scenario(name, self.store, self._results)

    def job(self, **settings: Any) -> Job:
        torch.manual_seed(3)
        return Job(self.store, **settings)

    def steps(self, job: Job, count: int, flush: bool = True, due: int = 1) -> None:
        for _ in range(count):
            report = job.step(flush)
            if report is None:
                assert due > 1
                continue
            self.tell("step", step=report.step, skipped=report.skipped)

    def end(self, job: Job) -> None:
        """Close, and record what stands."""
        job.ckpt.close(save=False)
        dist.barrier()
        failures = {
            sample.labels["reason"]: sample.value
            for metric in job.registry.collect()
            for sample in metric.samples
            if sample.name == "driftpoint_failures_total" and sample.value
        }
        self.tell("end", commits=[save.name for save in reversed(self.catalog().saves())], failures=failures)

    def catalog(self) -> Catalog:
        return open_catalog(LocalFiles(self.store))

    def refused(self, action: Callable[[], Any]) -> None:
        """Record the error that an action ends in."""
        try:
            action()
        except DriftpointError as error:
            self.tell("refused", error=type(error).__name__, text=str(error))
        else:
            self.tell("refused", error=None, text="")


def silent_rank(s: Scenario) -> None:
    """Rank 1's storage hangs for one save: rank 0 gives up after its timeout, and training goes on."""
    job = s.job()
    s.steps(job, 1)
    waits(job, 0.3)  # from now on, so that the save before had the time that it took
    go_on = threading.Event()
    if rank() == 1:
        job.hook().before = lambda operation, path: None if go_on.is_set() else _wait(go_on)
    s.steps(job, 3, flush=rank() == 0)
    go_on.set()
    job.ckpt.flush()
    dist.barrier()
    waits(job, 600.0)
    s.steps(job, 1)
    s.end(job)


def stuck_in_a_wave(s: Scenario) -> None:
    """Rank 1's storage hangs between two waves of copies: after the bound on that, both ranks train on."""
    waves = StagingSettings.model_construct(mode="lazy", max_bytes=20_000)
    job = s.job(width=64, staging=waves, timeouts={"staging": 0.5})
    s.steps(job, 1)
    waits(job, 0.3)
    go_on, left = threading.Event(), [4]

    def before(operation: str, path: str) -> None:
        left[0] -= operation == "write" and path.endswith(".safetensors")
        if left[0] < 0 and not go_on.is_set():
            _wait(go_on)

    if rank() == 1:
        job.hook().before = before
    s.steps(job, 3, flush=rank() == 0)
    go_on.set()
    job.ckpt.flush()
    dist.barrier()
    waits(job, 600.0)
    s.steps(job, 1)
    s.end(job)


def waits(job: Job, seconds: float) -> None:
    """How long later saves wait for the other rank's part."""
    saver = saver_of(job.ckpt)
    config = saver._job.config
    timeouts = config.timeouts.model_copy(update={"commit": seconds})
    saver._job = replace(saver._job, config=config.model_copy(update={"timeouts": timeouts}))


def _wait(event: threading.Event) -> None:
    assert event.wait(180)


def failing_rank(s: Scenario) -> None:
    """Rank 1 cannot write: rank 0 learns it at the next decision and need not wait out its ten minutes."""
    job = s.job()
    s.steps(job, 1)
    files = job.hook()
    if rank() == 1:
        files.before = _full
    s.steps(job, 1, flush=rank() == 1)
    s.steps(job, 1)
    files.before = lambda operation, path: None
    s.steps(job, 2)
    s.end(job)


def _full(operation: str, path: str) -> None:
    if operation == "write":
        raise StorageError(f"cannot write {path}: the filesystem is full")


def other_path(s: Scenario) -> None:
    """Rank 1 names a directory that rank 0 does not know; then one that holds another store."""
    mine = s.store if rank() == 0 else s.store.with_name(f"{s.name}-elsewhere")
    s.refused(lambda: Job(mine))
    if rank() == 1:
        from store.catalog import open_or_create

        other = LocalFiles(mine)
        claim_epoch(other, open_or_create(other).store_id)
        claim_epoch(other, open_or_create(other).store_id)
    dist.barrier()
    s.refused(lambda: Job(mine))
    job = s.job()
    s.steps(job, 1)
    s.end(job)


def fenced(s: Scenario) -> None:
    """Another job takes the store over behind this one's back: this one trains on and saves nothing more."""
    job = s.job()
    s.steps(job, 1)
    dist.barrier()
    if rank() == 0:
        claim_epoch(LocalFiles(s.store), s.catalog().store_id)
    dist.barrier()
    s.steps(job, 4)
    s.end(job)


def fenced_in_the_same_step(s: Scenario) -> None:
    """A second save of one step needs a new epoch, and there is none to be had."""
    job = s.job()
    s.steps(job, 1)
    if rank() == 0:
        claim_epoch(LocalFiles(s.store), s.catalog().store_id)
    dist.barrier()
    s.tell("saved", skipped=job.ckpt.save(wait=True, strict=False).skipped)
    s.steps(job, 1)
    s.end(job)


def sick_replica(s: Scenario) -> None:
    """One rank's replica of one layer goes bad: what that rank saves of the layer must not replace the good one."""
    job = s.job()
    s.steps(job, 1)
    good = job.weights()
    job.update()
    if rank() == 1:
        with torch.no_grad():
            for parameter in job.model.blocks[1].parameters():
                parameter.fill_(float("nan"))
    job.ckpt.step()
    job.ckpt.flush()
    then = job.weights()
    s.end(job)
    other = Job(s.store)
    step, now = other.ckpt.resume(), other.weights()
    sick = "blocks.1."
    wrong = [name for name in now if not torch.equal(now[name], (good if name.startswith(sick) else then)[name])]
    s.tell("resumed", step=step, wrong=wrong, exact=other.ckpt.certificate.exact if other.ckpt.certificate else None)
    other.ckpt.close(save=False)


def flipped_byte(s: Scenario) -> None:
    """A byte of rank 1's segment: one unit falls back on both ranks, the rest stays."""
    job, states = s.job(), {}
    for step in (1, 2):
        s.steps(job, 1)
        states[step] = job.weights()
    s.end(job)
    unit = Unit("blocks.2", "exp_avg_sq")
    if rank() == 0:
        catalog = s.catalog()
        save = catalog.saves()[0]
        group = catalog.group(save, catalog.manifest(save).groups[save.name])
        part, entry = next((p, e) for p in group.parts.values() for e in p.entries if e.unit == unit)
        path = s.store / "segments" / save.name / f"rank-{part.rank:05d}.safetensors"
        data = bytearray(path.read_bytes())
        data[part.header_bytes + entry.offset] ^= 0x40
        path.write_bytes(data)
    dist.barrier()
    other = Job(s.store)
    step, now, certificate = other.ckpt.resume(), other.weights(), other.ckpt.certificate
    assert certificate is not None
    fell = [name.startswith("blocks.2.") and name.endswith("exp_avg_sq") for name in now]
    wrong = [n for n, old in zip(now, fell, strict=True) if not torch.equal(now[n], states[1 if old else 2][n])]
    fallbacks = [f"{one.layer}/{one.slot}@{one.step}" for one in certificate.units if one.fallback]
    s.tell(
        "resumed", step=step, wrong=wrong, exact=certificate.exact, fallbacks=fallbacks,
        problems=certificate.problems, metric=other.metric("driftpoint_resume_fallback_units"),
    )  # fmt: skip
    s.steps(other, 1)
    other.ckpt.close(save=False)


class Unstorable:
    """Cannot be stored on rank 1, after so many times."""

    def __init__(self, fine: int) -> None:
        self._fine = fine

    def state_dict(self) -> dict[str, Any]:
        self._fine -= 1
        return {"n": 1} if self._fine >= 0 or rank() == 0 else {"rule": _full}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state == {"n": 1}


def unstorable(s: Scenario) -> None:
    """State that one rank cannot store: refused on both at once, or, when it turns so later, a failed save."""
    s.refused(lambda: Job(s.store, state=[Unstorable(0)]))
    job = s.job(state=[Unstorable(3)])
    s.steps(job, 1)
    s.steps(job, 1, flush=rank() == 1)
    s.steps(job, 1)
    s.end(job)


def other_step(s: Scenario) -> None:
    """One rank is an interval ahead of the other, as when only one of them was given a start step."""
    job = s.job()
    s.steps(job, 1)
    shift_step(job.ckpt, rank())
    s.steps(job, 2)
    shift_step(job.ckpt, -rank())
    s.steps(job, 1)
    s.end(job)


def other_model(s: Scenario) -> None:
    """The store of another model is refused on both ranks, and stays."""
    job = s.job()
    s.steps(job, 1)
    s.end(job)
    other = Job(s.store, width=9)
    s.refused(other.ckpt.resume)
    other.ckpt.close(save=False)
    again = Job(s.store)
    s.tell("resumed", step=again.ckpt.resume())
    again.ckpt.close(save=False)


def moving_while_written(s: Scenario) -> None:
    """Training goes on while the copies are being written: what is stored is what stood when it was staged."""
    job = s.job()
    go_on = threading.Event()
    files = job.hook()
    files.before = lambda operation, path: _wait(go_on) if operation == "write" else None
    job.update()
    digests = {
        f"{piece.fragment.fqn}/{piece.fragment.slot}/{piece.fragment.start}": xxhash.xxh3_128(
            as_bytes(piece.tensor.detach())
        ).hexdigest()
        for piece in adapter_for((job.trained, job.optimizer)).owned()
    }
    job.ckpt.step()
    for _ in range(3):
        job.update()
    go_on.set()
    s.end(job)
    catalog = s.catalog()
    save = catalog.saves()[0]
    part = catalog.group(save, catalog.manifest(save).groups[save.name]).parts[rank()]
    stored = {f"{e.fqn}/{e.slot}/{e.start}": e.xxh3_128 for e in part.entries}
    s.tell("stored", equal=stored == digests, count=len(stored))


def other_view(s: Scenario) -> None:
    """Rank 1's disk refuses a part that rank 0 can read: its versions would be others than rank 0's."""
    settings: dict[str, Any] = {"policy": {"name": "parity", "k": 2}, "resume": {"at": "newest"}}
    job = s.job(**settings)
    s.steps(job, 3)
    s.end(job)
    other = Job(s.store, **settings)
    before, catalog = other.weights(), session_of(other.ckpt).catalog
    fine = catalog.files
    if rank() == 1:
        catalog.files = HookedFiles(fine, before=_refuse_step_2)
    s.refused(other.ckpt.resume)
    s.tell("unchanged", same=same(before, other.weights()))
    catalog.files = fine
    s.tell("resumed", step=other.ckpt.resume())
    other.ckpt.close(save=False)


def _refuse_step_2(operation: str, path: str) -> None:
    if operation == "read" and path.startswith("segments/00000002-"):
        raise StorageError(f"{path}: no")


def last_step(s: Scenario) -> None:
    """Both ranks end well between two decisions; then one of them closes alone."""
    job = s.job(every=2)
    s.steps(job, 3, due=2)
    job.ckpt.close()
    dist.barrier()
    s.tell("end", commits=[save.name for save in reversed(s.catalog().saves())], failures={})
    lonely = s.job(every=2, timeouts={"close": 2.0})
    lonely.ckpt.resume()
    s.steps(lonely, 1, due=2)
    lonely.step()
    if rank() == 0:
        lonely.ckpt.close()
    dist.barrier()
    if rank() == 1:
        lonely.ckpt.close(save=False)
    dist.barrier()
    s.tell("alone", commits=[save.name for save in reversed(s.catalog().saves())])


def no_memory_at_the_start(s: Scenario) -> None:
    """Rank 1 cannot reserve its staging buffers: both are told, and can begin once there is memory."""
    reserve = StagingPool.reserve
    if rank() == 1:
        StagingPool.reserve = _out_of_memory  # type: ignore[assignment,method-assign]
    s.refused(s.job)
    StagingPool.reserve = reserve  # type: ignore[method-assign]
    job = s.job()
    s.steps(job, 1)
    s.end(job)


def no_memory_for_a_copy(s: Scenario) -> None:
    """Rank 1 cannot copy its part of one save, which fails on both; the next one is made."""
    job = s.job()
    s.steps(job, 1)
    start = CopyTiming.start
    if rank() == 1:
        CopyTiming.start = _out_of_memory  # type: ignore[assignment,method-assign]
    s.steps(job, 1, flush=rank() == 1)
    CopyTiming.start = start  # type: ignore[method-assign]
    s.steps(job, 1)
    s.steps(job, 2)
    s.end(job)


def called_on_rank_0(s: Scenario) -> None:
    """Rank 1 trains without ``ckpt.step()`` while rank 0 waits in it."""
    log.PATIENCE = 0.5
    job = s.job()
    job.update()
    if rank() == 1:
        job.optimizer.step()
        time.sleep(1.5)
        job_of(job.ckpt).group.leave()  # as the end of its process does
    else:
        s.tell("step", skipped=skip_reason(job.ckpt.step()))
    s.end(job)


def _out_of_memory(*_: Any) -> None:
    raise MemoryError("none left")


SCENARIOS: list[Callable[[Scenario], None]] = [
    silent_rank, stuck_in_a_wave, failing_rank, other_path, fenced, fenced_in_the_same_step, sick_replica, flipped_byte,
    unstorable, other_step, other_model, moving_while_written, other_view,
    no_memory_at_the_start, no_memory_for_a_copy, last_step, called_on_rank_0,
]  # fmt: skip


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=False)
    results = Results(spec["results"])
    for scenario in SCENARIOS:
        if scenario.__name__ in spec.get("only", scenario.__name__):
            scenario(Scenario(scenario.__name__, Path(spec["directory"]), results))
            dist.barrier()
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
