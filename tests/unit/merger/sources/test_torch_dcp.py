"""Checkpoints of ``torch.distributed.checkpoint``: every form of them is read alike, and no pickle runs anything."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import monitor
from merger.checkpoint import Checkpoint
from merger.import_checkpoint import import_checkpoint, plan_import
from merger.io.blocks import Block, Crc32
from merger.sources import open_source
from merger.sources.base import ChunkedTensor, FileTensor
from store.errors import DamagedError, DriftpointError, MergeError, UnsupportedError
from store.storage.local import LocalFiles
from tests.support.torch_jobs import STEPS, Job, equal


def read(path: Path) -> Checkpoint:
    return open_source(path).checkpoint(None, frozenset())


def nested(job: Job, path: Path) -> None:
    dcp.save(_state(job), checkpoint_id=path, no_dist=True)


def in_one_object(job: Job, path: Path) -> None:
    """As the application state of PyTorch's tutorial."""
    dcp.save({"app": _state(job)}, checkpoint_id=path, no_dist=True)


def flattened(job: Job, path: Path) -> None:
    """As torchtitan's: tensors of the model beside the rest, hyperparameters for every parameter."""
    model, optimizer = get_state_dict(
        job.model, job.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    rest = {
        "optimizer": optimizer,
        "train_state": {"step": STEPS, "ntokens_seen": 7},
        "lr_scheduler": job.scheduler.state_dict(),
        "dataloader": {"dp_rank_0": pickle.dumps({"place": 3}), "world_size": 1},
    }
    dcp.save({**model, **rest}, checkpoint_id=path, no_dist=True)


def of_accelerate(job: Job, path: Path) -> None:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    dcp.save({"model": model}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": optimizer}, checkpoint_id=path / "optimizer_0", no_dist=True)


def _state(job: Job) -> dict[str, Any]:
    return dict(zip(("model", "optim"), get_state_dict(job.model, job.optimizer), strict=True))


def trained() -> Job:
    job = Job(1)
    job.train(0, STEPS)
    return job


@pytest.mark.parametrize("save", [nested, in_one_object, flattened, of_accelerate])
def test_a_job_resumes_bitwise(tmp_path: Path, save: Callable[[Job, Path], None]) -> None:
    job, again = trained(), Job(2)
    save(job, tmp_path / "saved")
    plan = plan_import(tmp_path / "saved")
    assert plan.kind == "dcp" and plan.checkpoint.tensors["embed.weight"].aliases == ("head.weight",)
    found = import_checkpoint(plan, tmp_path / "store")
    assert found.save.step == STEPS and found.certificate.as_found
    state = {"lr_scheduler": again.scheduler} if save is flattened else {}
    config = {"store": str(tmp_path / "store"), "metrics": {"enabled": False}}
    with monitor.attach((again.model, again.optimizer), config, state=state) as ckpt:
        assert ckpt.resume() == STEPS
        assert equal(again.state(), job.state())
        assert again.scheduler.last_epoch == (STEPS if save is flattened else 0)


def test_steps_of_a_directory_of_torchtitans(tmp_path: Path) -> None:
    job = trained()
    for number in (STEPS, STEPS + 7):
        flattened(job, tmp_path / f"step-{number}")
    source = open_source(tmp_path)
    assert source.steps() == (STEPS + 7, STEPS)
    assert source.checkpoint(STEPS, frozenset()).step == STEPS
    with pytest.raises(MergeError, match="another than in its name"):
        source.checkpoint(STEPS + 7, frozenset())


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def metadata_of(folder: Path) -> Metadata:
    return dcp.FileSystemReader(folder).read_metadata()


def rewrite(folder: Path, change: Callable[[Metadata], None]) -> None:
    metadata = metadata_of(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_metadata_that_would_run_code_is_refused_by_name(tmp_path: Path) -> None:
    nested(trained(), tmp_path / "saved")
    ran = tmp_path / "ran"
    rewrite(tmp_path / "saved", lambda metadata: setattr(metadata, "planner_data", Evil(ran)))
    with pytest.raises(UnsupportedError, match=r"pathlib.*nothing was executed"):
        read(tmp_path / "saved")
    assert not ran.exists()
    for code in (b"cos\nsystem\n(S'touch %s'\ntR." % bytes(ran), b"cbuiltins\neval\n(S'1'\ntR."):
        (tmp_path / "saved" / ".metadata").write_bytes(code)
        with pytest.raises(UnsupportedError):
            read(tmp_path / "saved")
    assert not ran.exists()


def test_reading_changes_no_class_of_torch(tmp_path: Path) -> None:
    """BUILD on a class sets its attributes: on torch's own, that would last as long as the process."""
    nested(trained(), tmp_path / "saved")
    code = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'version'\nS'changed'\nstb."
    (tmp_path / "saved" / ".metadata").write_bytes(code)
    with pytest.raises(DriftpointError):
        read(tmp_path / "saved")
    assert Metadata.version is None


def _outside(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../saved/__0_0.distcp"


def _beyond(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.length += 1 << 40


def _extended(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]


def _hole(metadata: Metadata) -> None:
    size = metadata.state_dict_metadata["model.embed.weight"].size
    metadata.state_dict_metadata["model.embed.weight"].size = torch.Size((size[0] + 1, *size[1:]))


def _other_shape(metadata: Metadata) -> None:
    chunk = metadata.state_dict_metadata["model.embed.weight"].chunks
    chunk[:] = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((66, 1)))]


def _list_in_the_sky(metadata: Metadata) -> None:
    key = next(iter(metadata.planner_data))
    metadata.planner_data[key] = ("model", 1 << 40)


def _nothing(metadata: Metadata) -> None:
    metadata.storage_data = {}


@pytest.mark.parametrize(
    "change",
    [_outside, _beyond, _extended, _hole, _other_shape, _list_in_the_sky, _nothing],
    ids=lambda one: one.__name__,
)
def test_metadata_that_lies(tmp_path: Path, change: Callable[[Metadata], None]) -> None:
    nested(trained(), tmp_path / "saved")
    rewrite(tmp_path / "saved", change)
    with pytest.raises((MergeError, DamagedError, UnsupportedError)):
        read(tmp_path / "saved")


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_metadata_is_a_typed_error_or_harmless(at: int, bit: int, saved: Path) -> None:
    data = bytearray((saved / ".metadata").read_bytes())
    data[at % len(data)] ^= 1 << bit
    (saved.parent / "flipped").mkdir(exist_ok=True)
    for path in saved.glob("*.distcp"):
        if not (saved.parent / "flipped" / path.name).exists():
            (saved.parent / "flipped" / path.name).hardlink_to(path)
    (saved.parent / "flipped" / ".metadata").write_bytes(data)
    with suppress(DriftpointError):
        read(saved.parent / "flipped")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "saved"
    job = Job(1)
    job.model = torch.nn.Linear(2, 1)  # type: ignore[assignment]
    job.optimizer = torch.optim.AdamW(job.model.named_parameters())
    job.model(torch.ones(1, 2)).sum().backward()
    job.optimizer.step()
    nested(job, path)
    return path


def test_a_changed_byte_of_a_blob_is_found_by_the_import(tmp_path: Path) -> None:
    job = trained()
    nested(job, tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(job.model.layers[0].weight.detach().numpy().tobytes()) + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError):
        import_checkpoint(plan_import(tmp_path / "saved"), tmp_path / "store")


@given(st.data())
def test_the_runs_of_a_box_are_its_elements_in_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)]
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    box = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
    block = Block(LocalFiles(Path()), "", 0, 4 * box.numel(), Crc32, "", "")
    chunk = FileTensor(block, 0, "F32", tuple(sizes), True, "")
    extents = ChunkedTensor("F32", tuple(shape), ((tuple(offsets), chunk),)).extents("w", "fp32")
    found = [element for extent in extents for element in range(extent.start, extent.stop)]
    assert [extent.offset for extent in extents] == [4 * found.index(extent.start) for extent in extents]
    assert found == box.flatten().tolist()
