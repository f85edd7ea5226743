"""Records: when they are written, how large they are, and when they are removed."""

from __future__ import annotations

import copy
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from monitor.adapters.pytorch import PyTorchAdapter
from store.catalog import open_catalog
from store.errors import FencedError
from store.journal import prune_journal
from store.segment import write_segment
from store.session import claim_epoch
from store.storage.local import LocalFiles
from tests.support.journaled import Job, damage, keep, records, same


def test_records_go_once_two_commits_do_not_need_them(tmp_path: Path) -> None:
    job = Job()
    job.run(job.attach(tmp_path), 11)
    assert [int(one.name[:8]) for one in records(tmp_path)] == list(range(5, 12))
    again = Job(seed=2)
    again.run(again.attach(tmp_path), 18)
    assert [int(one.name[:8]) for one in records(tmp_path)] == list(range(9, 19))


@pytest.mark.parametrize("policy", ["full", {"name": "parity", "k": 2}], ids=str)
@pytest.mark.parametrize("counted", [None, 7], ids=["from 0", "from 7"])
def test_the_journal_begins_at_a_save_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: int | None, policy: Any
) -> None:
    """Of a new job, and of one whose engine made steps before it had this store."""
    job, made = Job(), counted or 0
    for _ in range(made):
        job.train_one_step()
    with monkeypatch.context() as patch:
        if counted is not None:
            patch.setattr(PyTorchAdapter, "completed_steps", lambda _: made)
        ckpt = job.attach(tmp_path, every=100, policy=policy)
        assert ckpt.resume() == made
        ckpt.save(wait=True)
        for _ in range(3):
            job.train_one_step()
            made += 1
            ckpt.step()
            ckpt.flush()
        kept = copy.deepcopy(job.state())
        ckpt.finish(clean=False)
    assert [int(one.name[:8]) for one in records(tmp_path)] == list(range(made - 2, made + 1))
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, every=100, policy=policy)
    assert ckpt.resume() == made
    assert ckpt.certificate is not None
    assert ckpt.certificate.exact
    assert same(again.state(), kept)
    ckpt.finish(clean=False)


def test_records_that_a_composite_needs_stay(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every": 2, "policy": {"name": "parity", "k": 4}}
    job, kept = Job(), dict[int, Any]()
    job.run(job.attach(tmp_path, **settings), 13, after=keep(job, kept))
    assert int(records(tmp_path)[0].name[:8]) == 3, "the commit of step 8 takes a layer of step 2"
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, **settings)
    assert ckpt.resume() == 13
    assert same(again.state(), kept[13])
    ckpt.finish(clean=False)


def test_records_that_lead_to_the_newest_commit_stay(tmp_path: Path) -> None:
    """It may be damaged: then they lead there from the one before."""
    job = Job()
    ckpt = job.attach(tmp_path, every=100)
    ckpt.resume()
    for step in range(1, 10):
        job.train_one_step()
        ckpt.step()
        if step in (2, 4, 8):
            ckpt.save(wait=True)
    ckpt.flush()
    kept = copy.deepcopy(job.state())
    ckpt.finish(clean=False)
    assert [int(one.name[:8]) for one in records(tmp_path)] == list(range(5, 10))
    damage(tmp_path / "segments/00000008-000001/rank-00000.safetensors")
    again = Job(seed=2)
    ckpt = again.attach(tmp_path, every=100)
    assert ckpt.resume() == 9
    assert same(again.state(), kept)
    ckpt.finish(clean=False)


def test_a_job_that_lost_the_store_removes_no_records(tmp_path: Path) -> None:
    job = Job()
    job.run(job.attach(tmp_path), 7)
    files = LocalFiles(tmp_path)
    claim_epoch(files, open_catalog(files).store_id)
    with pytest.raises(FencedError):
        prune_journal(files.below("journal"), files, 1, 7)
    assert [one.name for one in records(tmp_path)] == [f"{step:08d}-000001" for step in range(5, 8)]


def test_without_the_setting_nothing_is_written(tmp_path: Path) -> None:
    job = Job()
    job.run(job.attach(tmp_path, journal={"enabled": False}), 6)
    assert not (tmp_path / "journal").exists()


def test_gradients_of_bfloat16_take_two_bytes(tmp_path: Path) -> None:
    """As those that DeepSpeed hands to its optimizer in float32; with others beside, each as it needs."""
    kept: dict[str, torch.Tensor] = {}
    for name, rounded in (("short", True), ("long", False)):
        job = Job()
        for parameter in job.model.parameters() if rounded else ():
            parameter.register_hook(lambda grad: grad.bfloat16().float())  # type: ignore[no-untyped-call]
        ckpt = job.attach(tmp_path / name)
        job.run(ckpt, 7)
        kept[name] = torch.cat([one.flatten() for one in job.model.state_dict().values()])
    sizes = {name: (records(tmp_path / name)[-1] / "rank-00000.safetensors").stat().st_size for name in kept}
    count = sum(one.numel() for one in Job().model.parameters())
    assert 0 < sizes["long"] - sizes["short"] <= 2 * count + 64
    for name, state in kept.items():
        again = Job(seed=2)
        ckpt = again.attach(tmp_path / name)
        assert ckpt.resume() == 7
        assert torch.equal(torch.cat([one.flatten() for one in again.model.state_dict().values()]), state)
        ckpt.finish(clean=False)


def test_a_buffer_that_changed_its_dtype_comes_back_to_the_bit(tmp_path: Path) -> None:
    """The copies of the records before are of the other dtype."""
    job = Job()
    job.model.register_buffer("mean", torch.zeros(3))

    def change(step: int) -> None:
        if step == 6:
            job.model.mean = job.model.mean.double()
        job.model.mean.add_(1 / 3)

    job.run(job.attach(tmp_path), 7, before=change)
    again = Job(seed=2)
    again.model.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
    ckpt = again.attach(tmp_path)
    assert ckpt.resume() == 7
    assert again.model.mean.dtype == torch.float64
    assert torch.equal(again.model.mean, job.model.mean)
    ckpt.finish(clean=False)


@pytest.mark.parametrize("under_way", [False, True], ids=["", "a save under way"])
def test_the_save_of_a_preempted_job_does_not_wait_for_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under_way: bool
) -> None:
    """Nor is it held up by a save that waits for them: storage may take longer for them than there is time."""
    job, release = Job(), threading.Event()

    def recorded(*given: Any) -> Any:
        assert release.wait(180)
        return write_segment(*given)

    preemption = {"signals": ["SIGTERM"], "exit": False, "grace_seconds": 120}
    ckpt = job.attach(tmp_path, every=4 if under_way else 100, preemption=preemption)
    ckpt.resume()
    job.train_one_step()
    ckpt.step()
    ckpt.save(wait=True)
    monkeypatch.setattr("monitor.save.journaled_saver.write_segment", recorded)
    for _ in range(2, 5):
        job.train_one_step()
        ckpt.step()
    signal.raise_signal(signal.SIGTERM)
    job.train_one_step()
    report = ckpt.step()
    assert report is not None
    assert report.preempted
    assert not release.is_set()
    assert report.skipped is None
    assert (tmp_path / "manifests/00000005-000001.json").exists()
    assert (tmp_path / "manifests/00000004-000001.json").exists() == under_way
    release.set()
    kept = copy.deepcopy(job.state())
    ckpt.finish(clean=False)
    again = Job(seed=2)
    ckpt = again.attach(tmp_path)
    assert ckpt.resume() == 5
    assert same(again.state(), kept)
    ckpt.finish(clean=False)


def test_a_save_is_written_after_the_records_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a composite may be the newest commit, and lack the steps that bring its layers together."""
    job, slow, written = Job(), threading.Event(), list[str]()
    ckpt = job.attach(tmp_path, every=2, policy={"name": "parity", "k": 2})
    ckpt.resume()
    for _ in range(3):
        job.train_one_step()
        ckpt.step()
        ckpt.flush()

    def recorded(files: Any, draft: Any, *more: Any) -> Any:
        assert slow.wait(60)
        part = write_segment(files, draft, *more)
        written.append(f"record {draft.save.step}")
        return part

    def saved(files: Any, draft: Any, *more: Any) -> Any:
        written.append(f"save {draft.save.step}")
        return write_segment(files, draft, *more)

    monkeypatch.setattr("monitor.save.journaled_saver.write_segment", recorded)
    monkeypatch.setattr("monitor.save.save_task.write_segment", saved)
    job.train_one_step()
    ckpt.step()
    threading.Timer(0.5, slow.set).start()
    ckpt.flush()
    assert written == ["record 4", "save 4"]
    ckpt.finish(clean=False)
