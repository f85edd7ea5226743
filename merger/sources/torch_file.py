"""Read foreign ``.pt`` files without executing anything in them, and without reading tensors.

The structure is checked first. Classes outside an explicit list are refused by name before the pickle is loaded; a few
classes of DeepSpeed are replaced by inert stand-ins under its names, so that none of its code runs and it need not be
installed. Tensors become :class:`merger.sources.base.FileTensor`; each record is one block with its CRC-32. torch keeps
its list of allowed classes per process, so only one thread may read at a time."""

import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from isal import isal_zlib

from merger.io.blocks import Block, Crc32
from merger.sources.base import FileTensor
from merger.tensors import dtype_name
from merger.writers.torch_zip import Record, Window, load_hollow, read_records, read_records_from
from store.errors import DamagedError, StorageError, UnsupportedError, system_errors
from store.storage.local import LocalFiles

STRUCTURE_LIMIT = 1 << 28  # largest record that is not a tensor's, in bytes
UNPICKLING_ERRORS = (
    pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError, AssertionError,
    OverflowError, MemoryError,
)  # fmt: skip
_PLAIN = re.compile(
    r"collections OrderedDict|torch Size|torch Tensor|torch device|_codecs encode|torch\.nn\.parameter Parameter|"
    r"(__builtin__|builtins) (set|bytearray|complex)|torch \w+Storage|torch\.storage UntypedStorage|"
    r"torch (bfloat16|float\w*|u?int\d+|complex\d+|bool|half|double|long|short)|"
    r"torch\._tensor _rebuild_from_type_v2|torch\._utils _rebuild_(tensor|tensor_v[23]|parameter|parameter_with_state)"
)
"""Module and name of the classes that tensors and plain values are pickled with."""

_NUMPY = (
    r"numpy(\._core|\.core)?\.multiarray (_reconstruct|scalar)|numpy (ndarray|dtype)|collections (Counter|defaultdict)"
)
"""Module and name of further classes that random states and schedules are pickled with."""


def resolve_link(files: LocalFiles, name: str) -> tuple[LocalFiles, str]:
    """Return the directory and name of a file; of its target if it is a link, as in deduplicated storage."""
    path = files.root / name
    if not path.is_symlink():
        return files, name
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise StorageError(f"{path} is a symbolic link to {path.readlink()}, which cannot be read: {error}") from error
    return LocalFiles(target.parent), target.name


def read_pt(
    files: LocalFiles, name: str, blob: tuple[int, int] | None = None, tensors: dict[bytes, FileTensor] | None = None
) -> tuple[Any, str]:
    """Return (what ``torch.load`` would, name of the archive: the file's own when it was saved, if any).

    Tensors are :class:`FileTensor`. A link to a file is followed. Raises DamagedError if the structure is incomplete,
    UnsupportedError, naming it, for a class that is not allowed, StorageError if reading failed.
    blob: (offset, bytes) of the archive in a larger file, as in DCP. tensors: cache of tensors by their pickle, since
    most tensors of DCP have equal ones and loading is slow."""
    files, name = resolve_link(files, name)
    size = files.size(name)  # raises for directories and missing files
    start, nbytes = blob or (0, size)
    path = files.root / name
    if start + nbytes > size:
        raise DamagedError(f"{path} has {size} bytes, but {nbytes} from byte {start} are needed: it was cut off")
    with system_errors("read", path), path.open("rb") as file:
        window = Window(file, start, nbytes)
        records = [replace(one, offset=start + one.offset) for one in read_records_from(cast("BinaryIO", window), path)]
        structure = _check_structure(files, name, records)
        blocks = {
            one.offset - start: Block(
                files, name, one.offset, one.nbytes, Crc32, f"{one.crc:08x}", f"{path}, record {one.name}"
            )
            for one in records
            if _is_data(one)
        }
        cached = None if tensors is None else tensors.get(structure)
        if cached is not None and [one.nbytes for one in blocks.values()] == [cached.block.nbytes]:
            block = next(iter(blocks.values()))
            return replace(cached, block=block, where=block.name), ""
        _refuse_classes(str(path), structure)
        window.seek(0)
        try:
            with torch.serialization.safe_globals([(kind, known) for known, kind in STAND_INS.items()]):
                loaded = load_hollow(window)
        except UNPICKLING_ERRORS as error:
            raise DamagedError(f"{path} does not hold what torch.save writes: {error}") from error
        value = _Converter(str(path), blocks).of(loaded)
    if tensors is not None and isinstance(value, FileTensor):
        tensors[structure] = value
    return value, records[0].name.partition("/")[0]


def _is_data(record: Record) -> bool:
    return record.name.split("/", 1)[-1].startswith("data/")


def _check_structure(files: LocalFiles, name: str, found: list[Record]) -> bytes:
    """Read and check every record that is not a tensor's. Returns the pickle."""
    path, names = files.root / name, [record.name for record in found]
    if len(set(names)) != len(names) or len({one.partition("/")[0] for one in names}) != 1:
        raise DamagedError(f"{path} has duplicate records, or of several archives, which torch.save never writes")
    small = {}
    for record in found:
        if _is_data(record):
            continue
        if record.nbytes > STRUCTURE_LIMIT:
            raise DamagedError(f"{path}: {record.name} has {record.nbytes} bytes, over the limit of {STRUCTURE_LIMIT}")
        data = bytearray(record.nbytes)
        files.read_into(name, record.offset, memoryview(data))
        if isal_zlib.crc32(data) != record.crc:
            raise DamagedError(f"{path}: {record.name} does not match its checksum")
        small[record.name.partition("/")[2]] = bytes(data)
    if "data.pkl" not in small:
        raise DamagedError(f"{path} has no record data.pkl: torch.save did not write it, or was interrupted")
    if small.get("byteorder", b"little") != b"little":
        raise UnsupportedError(f"{path} was written on a big-endian machine, which is not supported")
    return small["data.pkl"]


def _refuse_classes(path: str, structure: bytes, others: str = "") -> None:
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(structure)):
            if opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"):
                raise UnsupportedError(f"{path} names a class as torch.save never does; nothing was executed")
            if opcode.name != "GLOBAL":
                continue
            text, name = str(argument), str(argument).replace(" ", ".")
            if not (_PLAIN.fullmatch(text) or name in STAND_INS or re.fullmatch(others, text)):
                raise UnsupportedError(
                    f"{path} needs the class {name}, which is not allowed in a checkpoint; nothing was executed. If it "
                    "is yours, save again without it (it is often in the client state)"
                )
    except (ValueError, UnicodeDecodeError, IndexError, MemoryError, OverflowError) as error:
        raise DamagedError(f"{path}: data.pkl is not a pickle: {error}") from error


class _Converter:
    """Converts the nest of one file; tensors become places in it. Shared parts stay shared.

    ``blocks``: the records of tensors, by the offset of their bytes."""

    def __init__(self, path: str, blocks: Mapping[int, Block]) -> None:
        self._path, self._blocks = path, blocks
        self._seen: dict[int, tuple[Any, Any]] = {}  # id -> (value, result); a value that is kept keeps its id

    def of(self, value: Any) -> Any:
        try:
            return self._of(value)
        except RecursionError as error:
            raise DamagedError(f"{self._path} holds a value that contains itself") from error

    def _of(self, value: Any) -> Any:
        if id(value) not in self._seen:
            self._seen[id(value)] = value, self._convert(value)
        return self._seen[id(value)][1]

    def _convert(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, OrderedDict) or type(value) is dict:
            return type(value)((key, self._of(item)) for key, item in value.items())
        if type(value) in (list, tuple, set):
            return type(value)(self._of(item) for item in value)
        plain = value is None or isinstance(value, bool | int | float | complex | str | bytes | bytearray)
        if plain or isinstance(value, (StandIn, Stage, torch.dtype, torch.device)):
            return value
        raise DamagedError(f"{self._path} holds a {type(value).__name__}, but may hold only plain values")

    def _tensor(self, tensor: torch.Tensor) -> FileTensor:
        # Attributes pickled with a tensor may hide its methods, so those of the class are called.
        storage = torch.Tensor.untyped_storage(tensor)
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        offset = getattr(storage, "_checkpoint_offset", None)
        block = self._blocks.get(-1 if offset is None else int(offset))
        contiguous = torch.Tensor.is_contiguous(tensor)
        if block is None:
            raise DamagedError(f"{self._path}: a tensor of shape {shape} has no record in the file")
        first = int(torch.Tensor.storage_offset(tensor)) * tensor.dtype.itemsize
        if storage.nbytes() > block.nbytes or (
            contiguous and first + torch.Tensor.numel(tensor) * tensor.dtype.itemsize > block.nbytes
        ):
            raise DamagedError(f"{block.name} has {block.nbytes} bytes, fewer than the tensor in it, of shape {shape}")
        lazy = "conj" if torch.Tensor.is_conj(tensor) else "neg" if torch.Tensor.is_neg(tensor) else ""
        return FileTensor(block, first, dtype, shape, contiguous, block.name, lazy)


def require_safe(path: Path, others: str = "") -> None:
    """Check that loading a ``.pt`` file could run no code, also where loaders unpickle it. Loads nothing.

    ``others``: pattern of classes (``module name``) that may be in it besides plain values, tensors and numpy arrays.
    Raises UnsupportedError, naming it, for another class or function; DamagedError or StorageError if it is no complete
    file of torch.save, or cannot be read."""
    files, name = resolve_link(LocalFiles(path.parent), path.name)
    with system_errors("read", path):
        found = read_records(files.root / name)
    if any(record.name.rpartition("/")[2] == "constants.pkl" for record in found):
        raise UnsupportedError(f"{path} is a TorchScript archive, which is a program; nothing was executed")
    _refuse_classes(str(path), _check_structure(files, name, found), f"{_NUMPY}|{others}" if others else _NUMPY)


class StandIn:
    """A DeepSpeed object reduced to its attributes."""


class Stage(int):
    """Stand-in for DeepSpeed's ``ZeroStageEnum``."""


FragmentAddress = type("fragment_address", (StandIn,), {})  # with `numel` and `start`
_SCALERS = ("LossScaler", "DynamicLossScaler")
STAND_INS: dict[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": Stage,
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
    **{f"deepspeed.runtime.fp16.loss_scaler.{name}": type(name, (StandIn,), {}) for name in _SCALERS},
}
