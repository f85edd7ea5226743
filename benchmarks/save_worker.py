"""One rank of ``save.py``: an engine of the given stage, and every way of saving it in turns."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions

import monitor
from benchmarks.llama import forward_backward, llama_engine, train_step
from monitor.adapters import adapter_for


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    deepspeed.init_distributed(dist_backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    bench = Bench(options)
    bench.warm_up()
    for _ in range(options.rounds):
        bench.round()
    bench.finish()
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(bench.seen))
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.engine = llama_engine(options.stage, options.layers)
        self.folder: Path = options.folder
        self.shared: Path = options.shared
        self.rows: int = options.rows
        self.seen: dict[str, list[float]] = {}
        self.turn = 0

    def warm_up(self) -> None:
        self.step()
        self.step()
        settings = {
            "every": 1 << 20,
            "staging": "eager",
            "metrics": {"enabled": False},
            "retention": {"keep_last": 1, "log_spaced": False},
        }
        self.ckpt = monitor.attach(self.engine, {**settings, "store": str(self.folder / "store")})
        threshold = {"name": "threshold", "threshold": 0.0}
        self.aware = monitor.attach(self.engine, {**settings, "store": str(self.folder / "aware"), "policy": threshold})
        lazy = {**settings, "store": str(self.folder / "lazy"), "staging": "lazy"}
        self.lazy = monitor.attach(self.engine, lazy)
        usual = {**settings, "staging": "auto"}
        each = {**usual, "store": str(self.folder / "each"), "every": 1}
        self.each = monitor.attach(self.engine, each)  # ckpt.step() is called only where a save is wanted
        memory = {"enabled": True, "every": 1, "path": str(self.shared)}
        self.kept = monitor.attach(self.engine, {**usual, "store": str(self.folder / "kept"), "memory": memory})
        for ckpt in (self.ckpt, self.aware, self.lazy, self.each, self.kept):
            ckpt.resume()
        self.note("first_stall", self.ckpt.save(wait=True).stall_seconds)
        self.aware.save(wait=True)
        self.lazy.save(wait=True)
        self.each.save(wait=True)
        self.kept.save(wait=True)
        self.step()
        self.kept.step()  # the first version is written to memory that was never touched
        self.step()
        pieces = adapter_for(self.engine).owned()
        self.tensors = {
            f"{dist.get_rank()}/{p.fragment.fqn}/{p.fragment.slot}/{p.fragment.start}": p.tensor for p in pieces
        }
        self.local_bytes = sum(t.numel() * t.element_size() for t in self.tensors.values())
        self.copies = {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            for name, tensor in self.tensors.items()
        }
        self.stagers = _stagers(torch.cuda.is_available())
        self.deepspeed_save(self.folder / "warm-deepspeed")
        for name, stager in self.stagers.items():
            self.dcp_save(name, stager)
        for name in self.stagers:
            self.seen.pop(f"{name}_stall")
            self.seen.pop(f"{name}_durable")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / "warm-deepspeed")
        self.note(
            "parameters",
            sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in self.engine.module.parameters()),
        )

    def round(self) -> None:
        self.turn += 1
        self.note("step", self.slowest(self.step))
        self.note("copy", self.slowest(self.copy))
        self.note("write_floor", self.slowest(self.write))
        self.ours()
        self.note("aware_stall", self.worst(self.aware.save(wait=True).stall_seconds))
        folder = self.folder / f"deepspeed-{self.turn}"
        self.note("deepspeed_stall", self.slowest(lambda: self.deepspeed_save(folder)))
        self.note("deepspeed_bytes", float(_size(folder)))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        for name, stager in self.stagers.items():
            self.dcp_save(name, stager)
        self.beside()
        self.overlapped()
        self.hidden()

    def ours(self) -> None:
        self.step()
        os.sync()
        dist.barrier()
        began = time.perf_counter()
        report = self.ckpt.save()
        self.note("stall", self.worst(report.stall_seconds))
        self.ckpt._saver.wait(600.0)  # on rank 0 until it is committed, and not for the prune as flush() does
        self.note("durable", self.worst(time.perf_counter() - began))
        self.ckpt.flush()
        dist.barrier()
        self.note("bytes", float(max(_size(path) for path in (self.folder / "store" / "segments").iterdir())))

    def beside(self) -> None:
        self.ckpt.save()
        self.note("step_beside", self.slowest(self.step))
        self.ckpt.flush()
        self.step()

    def overlapped(self) -> None:
        """Lazy staging: the stall is what save() takes and what the next optimizer step waits for copies."""
        dist.barrier()
        waited = _sum(self.lazy)
        stall = self.lazy.save().stall_seconds
        self.note("lazy_step", self.slowest(self.step))
        self.note("lazy_stall", self.worst(stall + _sum(self.lazy) - waited))
        self.lazy.flush()
        self.step()

    def hidden(self) -> None:
        """The same with a forward and backward beside the copies that take far longer than these; a save begun by
        ckpt.step(), then a version kept in memory."""
        self.note("long_step", self.slowest(lambda: self.long_step("")))
        self.note("hidden_stall", self.begun(self.each, "hidden_beside"))
        self.each.flush()
        self.long_step("")
        self.note("kept_stall", self.begun(self.kept, "kept_beside"))
        self.long_step("")

    def begun(self, ckpt: monitor.Checkpointer, beside: str) -> float:
        """Seconds that the slowest rank waits: in ckpt.step(), and for copies before its next optimizer step."""
        os.sync()
        dist.barrier()
        waited, began = _sum(ckpt), time.perf_counter()
        report = ckpt.step()
        stall = time.perf_counter() - began
        if ckpt is self.each and (report is None or report.skipped is not None):
            raise RuntimeError(f"no save was begun: {report}")
        self.long_step(beside)
        return self.worst(stall + _sum(ckpt) - waited)

    def long_step(self, beside: str) -> None:
        """beside: a name to note the time of forward and backward under."""
        began = time.perf_counter()
        forward_backward(self.engine, 128, self.rows)
        spent = time.perf_counter() - began
        self.engine.step()
        if beside:
            self.note(beside, self.worst(spent))

    def deepspeed_save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder))

    def dcp_save(self, name: str, stager: AsyncStager | None) -> None:
        """The stall is the call, and where staging is asynchronous also the wait for it: state must stand still."""
        folder = self.folder / f"dcp-{name}-{self.turn}"
        os.sync()
        dist.barrier()
        began = time.perf_counter()
        answer = dcp.async_save(self.tensors, checkpoint_id=str(folder), async_stager=stager)
        if isinstance(answer, Future):
            upload = answer
        else:
            answer.staging_completion.result()
            upload = answer.upload_completion
        stall = time.perf_counter() - began
        upload.result()
        durable = time.perf_counter() - began
        self.note(f"{name}_stall", self.worst(stall))
        self.note(f"{name}_durable", self.worst(durable))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)

    def step(self) -> None:
        train_step(self.engine, 128)

    def copy(self) -> None:
        for name, tensor in self.tensors.items():
            self.copies[name].copy_(tensor)

    def write(self) -> None:
        """The floor of durability: the same bytes, one write per tensor, one fsync."""
        path = self.folder / f"floor-{dist.get_rank()}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for tensor in self.copies.values():
            data = memoryview(tensor.cpu().view(torch.uint8).numpy())
            while data:
                data = data[os.write(descriptor, data[: 1 << 24]) :]
        os.fsync(descriptor)
        os.close(descriptor)
        path.unlink()

    def finish(self) -> None:
        self.step()
        self.kept.step()  # the version before is counted once all ranks are known to have it
        self.require_kept()
        for ckpt in (self.ckpt, self.aware, self.lazy, self.each, self.kept):
            ckpt.close(save=False)
        for stager in self.stagers.values():
            if isinstance(stager, DefaultStager):
                stager.close()

    def require_kept(self) -> None:
        """What was not kept costs nothing to keep."""
        versions = self.kept.metrics.registry.get_sample_value("driftpoint_memory_versions_total")
        if dist.get_rank() == 0 and (versions or 0) < self.turn + 1:
            raise RuntimeError(f"{versions} versions were kept in memory, fewer than {self.turn + 1}")

    def note(self, name: str, value: float) -> None:
        self.seen.setdefault(name, []).append(float(value))

    def slowest(self, action: Callable[[], object]) -> float:
        """Seconds of the slowest rank, begun together with no write-back pending."""
        os.sync()
        dist.barrier()
        began = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.worst(time.perf_counter() - began)

    def worst(self, value: float) -> float:
        box = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return float(box)


def _stagers(pinned: bool) -> dict[str, AsyncStager | None]:
    """Return DCP's ways of staging: one that allocates anew, one that keeps its buffers, one in the background."""
    if "close()" in inspect.getsource(DefaultStager._stage):  # in torch 2.11, that one serves for one save only
        return {"dcp_default": None} | ({"dcp_cached": BlockingAsyncStager(True)} if pinned else {})
    return {
        "dcp_default": None,
        "dcp_cached": DefaultStager(StagingOptions(pinned, True, False, pinned)),
        "dcp_async": DefaultStager(StagingOptions(pinned, True, True, pinned)),
    }


def _sum(ckpt: monitor.Checkpointer) -> float:
    return ckpt.metrics.registry.get_sample_value("driftpoint_copy_wait_seconds_sum") or 0.0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
