"""Read checkpoints of ``torch.distributed.checkpoint``: torchtitan's, FSDP2's state dicts, Accelerate's sharded ones.

``.metadata`` is a pickle, which torch's own reader unpickles. Here it becomes inert records: every class but DCP's own
is refused by name, and none of DCP's code runs. Its entries name the blobs in ``*.distcp`` files, each read as a file
of ``torch.save``. All name parameters by fqn. Accelerate has a directory for the model and one for the optimizer."""

import io
import pickle
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch

from merger.sources import torch_state_dict
from merger.sources.base import ChunkedTensor, FileTensor, Nest, StoredTensor, checked_name, read_values
from merger.sources.torch_file import STRUCTURE_LIMIT, UNPICKLING_ERRORS, StandIn, read_pt
from merger.sources.torch_state_dict import MODEL_KEYS, OPTIMIZER_KEYS, TrainingState
from merger.tensors import dtype_name
from store.errors import DamagedError, MergeError, UnsupportedError
from store.storage.local import LocalFiles

METADATA = ".metadata"
ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
_RECORDS = frozenset(
    {f"torch.distributed.checkpoint.metadata.{name}" for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
        "BytesStorageMetadata", "ChunkStorageMetadata",
    )} | {"torch.distributed.checkpoint.filesystem._StorageInfo"}
)  # fmt: skip

_VALUES: dict[str, Any] = {
    "torch.Size": tuple, "torch.serialization._get_layout": str, "collections.OrderedDict": dict,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": int,
    **dict.fromkeys(("pathlib.PosixPath", "pathlib._local.PosixPath"), lambda *parts: "/".join(parts)),
}  # fmt: skip
_LONGEST = 1 << 20  # longest list that a state dict may have
_Path = tuple[str | int, ...]


class _Record(StandIn):
    """A record of DCP, reduced to its attributes; those of ``TensorProperties`` are a tuple."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"values": state})


class _Unpickler(pickle.Unpickler):
    """Unpickles DCP's metadata, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _RECORDS:
            return type(name, (_Record,), {})  # new each time: a pickle may also set attributes of a class
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full in _VALUES:
            return _VALUES[full]
        raise UnsupportedError(
            f"the metadata needs {full}, which torch.distributed.checkpoint itself does not put there; nothing was "
            "executed. Save the checkpoint again without it"
        )


class DcpFiles:
    """One directory of DCP. DamagedError, UnsupportedError unless its metadata is plain."""

    def __init__(self, folder: Path) -> None:
        self.where, self._files = str(folder / METADATA), LocalFiles(folder)
        self._blobs, self._tensors = dict[tuple[str, int], Any](), dict[bytes, FileTensor]()
        data = self._files.read(METADATA, STRUCTURE_LIMIT)
        try:
            found = _Unpickler(io.BytesIO(data)).load()
            self._described = {str(key): vars(value) for key, value in found.state_dict_metadata.items()}
            places = found.storage_data.items()
            self._places = {(index.fqn, tuple(vars(index).get("offset") or ())): vars(place) for index, place in places}
            planned = {key: (key,) for key in self._described} if found.planner_data is None else found.planner_data
            # The key of each entry, by its path in the nested state dict.
            self.paths: dict[_Path, str] = {tuple(path): str(key) for key, path in planned.items()}
            if not all(isinstance(one, str) or 0 <= one < _LONGEST for path in self.paths for one in path):
                raise ValueError("a place in a list is out of range")
            placed = {".".join(map(str, path)): key for path, key in self.paths.items()}
            if placed != {key: key for key in self._described}:
                raise ValueError("names and their places in the state dict differ")
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.where}: {error}") from error
        except UNPICKLING_ERRORS as error:
            raise DamagedError(f"{self.where} is not what torch.distributed.checkpoint writes: {error!r}") from error

    def value(self, path: _Path) -> Any:
        """Return a plain value, or a tensor's place in the files."""
        key = self.paths[path]
        found = Nest(self._described.get(key), f"{self.where}, {key}").mapping()
        if "chunks" not in found:
            return self._blob(key, ())
        try:
            dtype, shape = dtype_name(vars(found["properties"])["values"][0]), tuple(found["size"])
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found["chunks"]]
            if any(not 0 <= at <= at + size <= end for box in boxes for at, size, end in zip(*box, shape, strict=True)):
                raise ValueError("a chunk lies outside its tensor")
        except UNPICKLING_ERRORS as error:
            raise DamagedError(f"{self.where}: {key} is not described as DCP does it: {error!r}") from error
        tensors = []
        for offsets, sizes in boxes:
            tensor = Nest(self._blob(key, offsets), f"{self.where}, {key}").tensor()
            if (tensor.shape, tensor.dtype) != (sizes, dtype):
                raise DamagedError(f"{tensor.where} is not the chunk of {sizes} {dtype} that {self.where} has of {key}")
            tensors.append((offsets, tensor))
        if len(tensors) == 1 and tensors[0][1].shape == shape:
            return tensors[0][1]
        return ChunkedTensor(dtype, shape, tuple(tensors))

    def _blob(self, key: str, offsets: tuple[int, ...]) -> Any:
        place = self._places.get((key, offsets))
        if place is None:
            raise MergeError(f"{self.where} does not say where {key} at {offsets} lies")
        nest = Nest(place, f"{self.where}, {key}")
        if place.get("transform_descriptors"):
            raise UnsupportedError(f"{nest.where} is stored with extensions ({place['transform_descriptors']})")
        name, at, nbytes = nest.at("relative_path").text(), nest.at("offset").natural(), nest.at("length").natural()
        if (name, at) not in self._blobs:
            file = checked_name(name, nest.where)
            self._blobs[name, at] = read_pt(self._files, file, (at, nbytes), self._tensors)[0]
        return self._blobs[name, at]


def is_dcp(folder: Path) -> bool:
    """Return whether a directory is a checkpoint of DCP, or one of Accelerate that holds two."""
    return (folder / METADATA).is_file() or all((folder / name / METADATA).is_file() for name in ACCELERATE)


def read_dcp(folder: Path) -> TrainingState:
    """Read a directory with ``.metadata``, or Accelerate's with a directory for the model and one for the optimizer."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict  # takes a second; only needed here

    parts = [DcpFiles(folder / name) for name in (("",) if (folder / METADATA).is_file() else ACCELERATE)]
    # torchtitan's data loaders keep a pickle per rank, which is of no use to another job.
    values = {path: one.value(path) for one in parts for path in one.paths if path[0] != "dataloader"}
    try:
        held: dict[str, Any] = unflatten_state_dict(values, {path: path for path in values})  # type: ignore[arg-type, misc]
    except UNPICKLING_ERRORS as error:
        raise DamagedError(f"{folder} holds one value inside of another: {error!r}") from error
    if len(held) == 1 and not held.keys() & {*MODEL_KEYS, *OPTIMIZER_KEYS}:  # in one object, as in PyTorch's tutorial
        held = dict(Nest(next(iter(held.values())), str(folder)).mapping())
    keys = [next((key for key in keys if key in held), "") for keys in (MODEL_KEYS, OPTIMIZER_KEYS)]
    # torchtitan keeps the model's tensors beside the rest.
    beside = {key: one for key, one in held.items() if isinstance(one, StoredTensor) or key.endswith("_extra_state")}
    flat = {} if keys[0] else beside
    model = torch_state_dict.model_tensors(Nest(held.get(keys[0], flat), str(folder)))
    optimizer = Nest(held.get(keys[1], {"state": {}, "param_groups": []}), f"{folder}, {keys[1]}")
    flattened = "param_groups" not in optimizer.mapping()
    groups, states = _flattened(optimizer, model) if flattened else torch_state_dict.named_groups(optimizer, model)
    others = {key: value for key, value in held.items() if key not in (*keys, *flat)}
    if (folder / "extra.pt").is_file():  # a merge wrote it: the rest is the same once more, for torchtitan
        others = {}
    state = TrainingState(folder, "fsdp2", model, groups, states, others)
    train = others.get("train_state")
    if isinstance(train, Mapping) and "step" in train:
        state.step = int(read_values(train["step"]))
    if any(path[0] == "dataloader" for one in parts for path in one.paths):
        state.notes.append("the places of torchtitan's data loaders are left out")
    torch_state_dict.add_folder_values(state)
    return state


def _flattened(found: Nest, model: Container[str]) -> tuple[list[dict[str, Any]], dict[str, Mapping[str, Any]]]:
    """Return (param groups, state by fqn) of a flattened state dict: every parameter has all hyperparameters."""
    by_kind: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for name, value in found.items():
        kind, _, rest = name.partition(".")
        parts = rest.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        fqn = next((one for one in prefixes if one in model), None)
        if kind not in by_kind or fqn is None:
            raise UnsupportedError(f"{value.where} is of no parameter of the model, or in no known form")
        by_kind[kind].setdefault(fqn, {})[rest[len(fqn) + 1 :]] = value.value
    groups: list[dict[str, Any]] = []
    for fqn, hyper in read_values(by_kind["param_groups"]).items():
        group = next((group for group in groups if group["hyper"] == hyper), None)
        if group is None:
            groups.append(group := {"params": [], "hyper": hyper})
        group["params"].append(fqn)
    return groups, dict(by_kind["state"])
