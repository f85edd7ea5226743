"""Checkpoints of ``torch.distributed.checkpoint``: every form of them is read alike, and no pickle runs anything."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import monitor
from merger.checkpoint import Checkpoint
from merger.import_checkpoint import import_checkpoint, plan_import
from merger.io.blocks import Block, Crc32, Extent, fragment_streams
from merger.sources import open_source
from merger.sources.base import ChunkedTensor, FileTensor
from store.errors import DamagedError, DriftpointError, MergeError, UnsupportedError
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
    dcp.save(job.model.state_dict(), checkpoint_id=tmp_path / f"step-{STEPS + 9}", no_dist=True)  # as its last save
    found = open_source(tmp_path).checkpoint(None, frozenset())
    assert found.step == STEPS and "a model without an optimizer's state" in found.problems[0]


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


def _elsewhere(metadata: Metadata) -> None:
    """One moment of a parameter at the place of another's."""
    moments = [f"optim.state.layers.{number}.weight.exp_avg" for number in (0, 1)]
    metadata.planner_data[moments[0]] = metadata.planner_data[moments[1]]


def _nowhere(metadata: Metadata) -> None:
    del metadata.planner_data["optim.state.layers.0.weight.exp_avg"]


def _no_chunks(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.head.weight"].chunks = []


@pytest.mark.parametrize(
    "change",
    [_outside, _beyond, _extended, _hole, _other_shape, _list_in_the_sky, _nothing, _elsewhere, _nowhere, _no_chunks],
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
        found, expected = read(saved.parent / "flipped"), read(saved)
        assert {name: contents(extents) for name, extents in found.index.names().items()} == {
            name: contents(extents) for name, extents in expected.index.names().items()
        }


def contents(extents: Sequence[Extent]) -> list[object]:
    return [(one.start, one.stop, one.dtype, one.offset, one.block.path, one.block.offset) for one in extents]


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


def as_halves(path: Path, job: Job, names: dict[str, int]) -> None:
    """Save with tensors in two chunks of rows, the first of which is listed so: 0 or 1."""
    state = _state(job)
    halves = {name: state["model"][name].tensor_split(2) for name in names}
    parts = {f"{name}/{number}": half.clone() for name, own in halves.items() for number, half in enumerate(own)}
    dcp.save({**state, **parts}, checkpoint_id=path, no_dist=True)

    def change(metadata: Metadata) -> None:
        for name, first in names.items():
            rows = len(halves[name][0])
            for number, half in enumerate(halves[name]):
                at, own = torch.Size((number * rows, 0)), MetadataIndex(f"{name}/{number}", torch.Size((0, 0)))
                metadata.storage_data[MetadataIndex(f"model.{name}", at)] = metadata.storage_data[own]
                del metadata.state_dict_metadata[own.fqn], metadata.planner_data[own.fqn]
                metadata.state_dict_metadata[f"model.{name}"].chunks[number:] = [ChunkStorageMetadata(at, half.shape)]
            metadata.state_dict_metadata[f"model.{name}"].chunks.sort(key=lambda one: one.offsets[0], reverse=first)

    rewrite(path, change)


def test_tied_weights_whose_chunks_are_in_another_order(tmp_path: Path) -> None:
    """As ranks of replicated shards write them: DCP lets each replica write a part of the chunks."""
    as_halves(tmp_path / "saved", trained(), {"embed.weight": 0, "head.weight": 1})
    found = read(tmp_path / "saved")
    assert found.tensors["embed.weight"].aliases == ("head.weight",)
    assert found.notes == ("head.weight: tied, since it equals a trained parameter to the last bit",)


def test_a_state_dict_that_was_not_nested(tmp_path: Path) -> None:
    job, planner = trained(), DefaultSavePlanner(flatten_state_dict=False)
    state = {**job.model.state_dict(), "step": 4}
    dcp.save(state, checkpoint_id=tmp_path / "saved", planner=planner, no_dist=True)
    assert read(tmp_path / "saved").tensors.keys() == job.model.state_dict().keys()


def test_learning_rates_that_are_tensors(tmp_path: Path) -> None:
    job = Job(1, lr=torch.tensor(1e-2), foreach=False)
    job.train(0, STEPS)
    flattened(job, tmp_path / "saved")
    groups = read(tmp_path / "saved").framework_state["param_groups"]
    assert [sorted(group["params"]) for group in groups] == [sorted(names) for names in job.names]
    assert [group["hyper"]["lr"] for group in groups] == [group["lr"] for group in job.optimizer.param_groups]


def _of_two_models(folder: Path, job: Job) -> None:
    of_accelerate(job, folder)
    dcp.save({"model": job.model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_1", no_dist=True)


def _with_extra_state(folder: Path, job: Job) -> None:
    flattened(job, folder)
    state = {**job.model.state_dict(), "layers.0._extra_state": b"scales", "train_state": {"step": 3}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def _as_safetensors(folder: Path, job: Job) -> None:
    writer = dcp.FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)
    model = {name: value for name, value in job.model.state_dict().items() if name != "head.weight"}
    dcp.save({**_state(job), "model": model}, storage_writer=writer, no_dist=True)


def _state_without_a_group(folder: Path, job: Job) -> None:
    optim = get_state_dict(job.model, job.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))[1]
    kept = {key: value for key, value in optim.items() if not key.startswith("param_groups.layers.0.weight")}
    dcp.save({"model": job.model.state_dict(), "optim": kept}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize(
    ("save", "why"),
    [
        (_of_two_models, r"several models or optimizers \(pytorch_model_fsdp_1\)"),
        (_with_extra_state, "layers.0._extra_state is not a tensor"),
        (_as_safetensors, "in another format than torch.save's"),
        (_state_without_a_group, "layers.0.weight, unlike the model"),
    ],
)
def test_what_is_refused_by_name(tmp_path: Path, save: Callable[[Path, Job], None], why: str) -> None:
    save(tmp_path / "saved", trained())
    with pytest.raises((UnsupportedError, DamagedError, MergeError), match=why):
        read(tmp_path / "saved")


class InMemory:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_into(self, _: str, offset: int, target: memoryview) -> None:
        target[:] = self.data[offset : offset + len(target)]


@given(st.data())
@settings(deadline=None)
def test_a_tensor_cut_along_any_dimensions_is_put_together(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    cuts = [sorted({0, size, *data.draw(st.sets(st.integers(1, size), max_size=2))}) for size in shape]
    whole, chunks, stored = torch.arange(float(torch.Size(shape).numel())).reshape(shape), [], b""
    for box in data.draw(st.permutations([*product(*map(pairwise, cuts))])):
        chunk = whole[tuple(slice(*ends) for ends in box)].contiguous()
        own = chunk.numpy().tobytes()
        block = Block(InMemory(b"-" + stored + own), "", 1 + len(stored), len(own), Crc32, f"{zlib.crc32(own):08x}", "")
        stored += own
        chunks.append((tuple(begin for begin, _ in box), FileTensor(block, 0, "F32", tuple(chunk.shape), True, "")))
    extents = ChunkedTensor("F32", tuple(shape), tuple(chunks)).extents("w", "fp32")
    found, count = torch.full((whole.numel(),), -1.0), 0
    for stream in fragment_streams(extents, lambda _: None):
        values = torch.frombuffer(bytearray(b"".join(map(bytes, stream.pieces()))), dtype=torch.float32)
        found[stream.extent.start : stream.extent.stop] = values
        count += len(values)
    assert torch.equal(found.reshape(shape), whole) and count == whole.numel()
