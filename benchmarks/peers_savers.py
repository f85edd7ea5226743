"""Peers and Driftpoint behind one protocol: save the state of one plain PyTorch training, wait, load.

A saver imports its library in ``prepare``, so that this module can be imported in each peer's environment. Every saver
is used as its own documentation says for one process on this device, with the fastest way that it names. Where that
needs a GPU, the class says what stands in for it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


class Saver:
    """Save and load the state of ``(model, optimizer)`` below a folder. One save is under way at a time.

    requirements: what pip installs. distribution: whose version the table names.
    """

    requirements: tuple[str, ...] = ()
    distribution = "torch"

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.prepare()

    @classmethod
    def version(cls) -> str:
        return f"{cls.distribution} {version(cls.distribution)}"

    def prepare(self) -> None:
        """Import the library: its memory is not counted as that of a save."""

    def begin(self) -> None:
        """Set up what saves need, before the first one; not called where only :meth:`load` is."""

    def save(self, step: int) -> None:
        """Begin a save of the state as it is now."""
        raise NotImplementedError

    def updating(self) -> AbstractContextManager[Any]:
        """Surround the optimizer's step, where a peer asks for it."""
        return nullcontext()

    def before_update(self) -> None:
        """Wait until the state may be changed."""

    def after_update(self) -> None:
        """Tell the peer of a finished step, where it wants to know."""

    def waited(self) -> float:
        """Seconds, in all, that the optimizer's step itself has waited for copies."""
        return 0.0

    def done(self) -> bool:
        """Whether the save under way is finished. Not blocking."""
        return True

    def wait(self) -> None:
        """Wait until the save under way is finished."""

    def load(self, step: int) -> int:
        """Load a step in place. The step that was loaded; an exception where it is refused."""
        raise NotImplementedError

    def after_load(self) -> None:
        """Give back what :meth:`load` took, whether it refused or not. Not counted."""

    def path(self, step: int) -> Path:
        """File or folder of a step."""
        return self.folder / f"step-{step}"

    def drop(self, step: int) -> None:
        """Remove a step, where the peer does not do so by itself."""
        path = self.path(step)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give back what :meth:`begin` took."""

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def adopt(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state, in one order."""
        found: list[torch.Tensor] = []
        _walk(self.state(), found.append)
        return found


def _walk(value: Any, take: Callable[[torch.Tensor], None]) -> None:
    if isinstance(value, torch.Tensor):
        take(value)
    elif isinstance(value, dict):
        for one in value.values():
            _walk(one, take)
    elif isinstance(value, list | tuple):
        for one in value:
            _walk(one, take)


class Driftpoint(Saver):
    """``monitor.attach`` with default settings; ``every`` is out of reach, so that saves begin where all others' do."""

    distribution = "driftpoint"

    def prepare(self) -> None:
        import monitor
        import monitor.api

        self.attach = monitor.attach
        self.ckpt: Any = None

    def begin(self) -> None:
        self.ckpt = self.attach((self.model, self.optimizer), {"store": str(self.folder), "every": 1 << 30})
        self.ckpt.resume()

    def save(self, step: int) -> None:
        self.step = step
        report = self.ckpt.save()
        if report.skipped is not None or report.step != step:
            raise RuntimeError(f"step {step} was not saved: {report.skipped}, step {report.step}")

    def after_update(self) -> None:
        self.ckpt.step()

    def waited(self) -> float:
        return self.ckpt.metrics.registry.get_sample_value("driftpoint_copy_wait_seconds_sum") or 0.0

    def done(self) -> bool:
        return any((self.folder / "manifests").glob(f"{self.step:08d}-*.json"))

    def wait(self) -> None:
        self.ckpt._saver.wait(600)  # flush() would wait for the removal of older commits as well
        if not self.done():
            raise RuntimeError(f"step {self.step} was not committed")

    def load(self, step: int) -> int:
        del step  # it finds the newest that is whole by itself
        self.ckpt = self.attach((self.model, self.optimizer), {"store": str(self.folder), "every": 1 << 30})
        found = int(self.ckpt.resume())
        if not found:
            raise RuntimeError("nothing to resume")
        if not self.ckpt.certificate.exact:  # a layer of an older save, which the log and the certificate tell
            raise RuntimeError("what was resumed is not exact")
        return found

    def after_load(self) -> None:
        if self.ckpt is not None:
            self.ckpt.close(save=False)
        self.ckpt = None

    def path(self, step: int) -> Path:
        return next((self.folder / "segments").glob(f"{step:08d}-*"))

    def drop(self, step: int) -> None:
        """Retention removes it. Wait for that."""
        del step
        self.ckpt.flush()

    def close(self) -> None:
        self.ckpt.close(save=False)


class TorchSave(Saver):
    """``torch.save`` to the file's final name, then fsync."""

    def save(self, step: int) -> None:
        self.folder.mkdir(exist_ok=True)
        with self.path(step).open("wb") as file:
            torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, step: int) -> int:
        self.adopt(torch.load(self.path(step), weights_only=True))
        return step


class Dcp(Saver):
    """``async_save`` with the asynchronous, cached stager and a background thread that writes."""

    in_process = False

    def prepare(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.dcp = dcp
        pinned = torch.cuda.is_available()
        self.stager = lambda: DefaultStager(StagingOptions(pinned, True, True, pinned))
        self.executor = AsyncCheckpointerType.PROCESS if self.in_process else AsyncCheckpointerType.THREAD

    def begin(self) -> None:
        self.staging = self.stager()
        self.under_way: Any = None

    def save(self, step: int) -> None:
        self.under_way = self.dcp.async_save(
            self.state(),
            checkpoint_id=str(self.path(step)),
            async_checkpointer_type=self.executor,
            async_stager=self.staging,
        )

    def before_update(self) -> None:
        if self.under_way is not None:
            self.under_way.staging_completion.result()

    def done(self) -> bool:
        return bool(self.under_way.upload_completion.done())

    def wait(self) -> None:
        self.under_way.upload_completion.result()

    def load(self, step: int) -> int:
        state = self.state()
        self.dcp.load(state, checkpoint_id=str(self.path(step)))
        return step

    def close(self) -> None:
        self.staging.close()


class DcpProcess(Dcp):
    """The same, with a process that writes."""

    in_process = True


class TorchCheckpointing(Saver):
    """``CheckpointManager``: staging in shared memory beside training, a process that writes.

    Without O_DIRECT, which is its default: on ext4 its unaligned writes fail with EINVAL.
    """

    requirements = ("torch-checkpointing==0.1.1",)
    distribution = "torch-checkpointing"

    def prepare(self) -> None:
        from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.make = lambda: CheckpointManager(CheckpointManager.Config(storage_config=storage))
        synchronous = CheckpointManager.Config(storage_config=storage, save=SyncCheckpointSaverConfig())
        self.reader = lambda: CheckpointManager(synchronous)  # starts no writer process

    def begin(self) -> None:
        self.manager: Any = self.make()
        self.manager.prewarm_staging(self.state())

    def save(self, step: int) -> None:
        self.writing = self.manager.save(str(self.path(step)), self.state())

    def updating(self) -> AbstractContextManager[Any]:
        lock: AbstractContextManager[Any] = self.manager.lock()
        return lock

    def done(self) -> bool:
        return bool(self.writing.done())

    def wait(self) -> None:
        self.writing.result()

    def load(self, step: int) -> int:
        manager = self.reader()
        try:
            manager.load(str(self.path(step)), into=self.state(), strict=True)
        finally:
            manager.close()
        return step

    def close(self) -> None:
        self.manager.close()


class TorchSnapshot(Saver):
    """``Snapshot.async_take`` and ``restore``."""

    requirements = ("torchsnapshot==0.1.0", "setuptools<81")
    distribution = "torchsnapshot"

    def prepare(self) -> None:
        from torchsnapshot import Snapshot

        self.snapshot = Snapshot
        self.pending: Any = None

    def save(self, step: int) -> None:
        self.pending = self.snapshot.async_take(
            path=str(self.path(step)), app_state={"model": self.model, "optim": self.optimizer}
        )

    def done(self) -> bool:
        return bool(self.pending.done())

    def wait(self) -> None:
        self.pending.wait()

    def load(self, step: int) -> int:
        self.snapshot(str(self.path(step))).restore({"model": self.model, "optim": self.optimizer})
        return step


class Nvrx(Saver):
    """``TorchAsyncCheckpoint`` with a process forked for each save.

    It calls ``torch.cuda.synchronize()`` whatever the device, so without CUDA that call is made empty. Its persistent
    process is not used there: it would share the live tensors' memory instead of a copy on the host.
    """

    requirements = ("nvidia-resiliency-ext==0.4.1",)
    distribution = "nvidia-resiliency-ext"

    def prepare(self) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        if not torch.cuda.is_available():
            torch.cuda.synchronize = lambda *_: None
        self.checkpoint = TorchAsyncCheckpoint(persistent_queue=torch.cuda.is_available())
        self.queue = self.checkpoint._async_calls_queue

    def save(self, step: int) -> None:
        self.folder.mkdir(exist_ok=True)
        self.checkpoint.async_save(self.state(), str(self.path(step)))

    def done(self) -> bool:
        self.checkpoint.finalize_async_save(blocking=False, no_dist=True)
        return self.queue.get_num_unfinalized_calls() == 0

    def wait(self) -> None:
        self.checkpoint.finalize_async_save(blocking=True, no_dist=True)

    def load(self, step: int) -> int:
        self.adopt(torch.load(self.path(step), weights_only=True))
        return step


class LmResiliency(Saver):
    """``InMemoryCheckpointManager``, each kept step flushed to the disk, with its CRC-32 of each tensor."""

    requirements = ("lm-resiliency==0.2.0",)
    distribution = "lm-resiliency"

    def prepare(self) -> None:
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        self.make = lambda: InMemoryCheckpointManager(
            InMemoryCkptConfig(
                interval=1,
                disk_flush_interval=0,
                disk_folder=str(self.folder),
                run_id="peers",
                verify_integrity=True,
                pin_memory=torch.cuda.is_available(),
            )
        )

    def begin(self) -> None:
        self.manager: Any = self.make()
        self.step, self.flushed = 0, 0

    def save(self, step: int) -> None:
        self.step = step
        self.manager.save_tensors(self.tensors(), step)

    def before_update(self) -> None:
        """Wait for the copy in memory, then hand it to the disk: the flush takes a copy of its own."""
        self.manager.maybe_wait()
        if self.flushed != self.step:
            self.flushed = self.step
            self.manager.flush_to_disk(self.step)

    def done(self) -> bool:
        return self.flushed == self.step and any(self.folder.rglob(f"step-{self.step}/rank-0.pt"))

    def wait(self) -> None:
        self.before_update()
        while not self.done():
            time.sleep(0.002)

    def load(self, step: int) -> int:
        manager = self.make()
        try:
            found = manager.load_tensors(step=step)
            if found is None:
                raise RuntimeError("no checkpoint that passes its checks")
            with torch.no_grad():
                for into, value in zip(self.tensors(), found[0], strict=True):
                    into.copy_(value)
            return int(found[1])
        finally:
            manager.close()

    def path(self, step: int) -> Path:
        return next(self.folder.rglob(f"step-{step}"))

    def close(self) -> None:
        self.manager.close()


class DeepSpeed(Saver):
    """``engine.save_checkpoint`` of an engine without ZeRO, which is synchronous."""

    distribution = "deepspeed"

    def prepare(self) -> None:
        import deepspeed

        self.engine: Any = deepspeed.initialize(
            model=self.model,
            optimizer=self.optimizer,
            config={"train_batch_size": 1, "zero_optimization": {"stage": 0}, "steps_per_print": 1 << 30},
        )[0]

    def save(self, step: int) -> None:
        self.engine.save_checkpoint(str(self.folder), tag=f"step-{step}")

    def load(self, step: int) -> int:
        if self.engine.load_checkpoint(str(self.folder), tag=f"step-{step}")[0] is None:
            raise RuntimeError("nothing loaded")
        return step


SAVERS: dict[str, type[Saver]] = {
    "driftpoint": Driftpoint,
    "torch.save": TorchSave,
    "dcp": Dcp,
    "dcp-process": DcpProcess,
    "torch-checkpointing": TorchCheckpointing,
    "torchsnapshot": TorchSnapshot,
    "nvrx": Nvrx,
    "lm-resiliency": LmResiliency,
    "deepspeed": DeepSpeed,
}
