"""``.pt`` files of strangers: whatever is in them, nothing runs, and damage is found before anything is believed."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.sources.base import FileTensor, read_block, read_values
from merger.sources.torch_file import read_pt
from store.errors import DamagedError, DriftpointError, MissingError, StorageError, UnsupportedError
from store.storage.local import LocalFiles


class Evil:
    """Unpickled, it would make a file."""

    def __init__(self, canary: Path) -> None:
        self.command = f"touch {canary}"

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def saved(tmp_path: Path, value: Any, name: str = "file.pt") -> Path:
    path = tmp_path / name
    torch.save(value, path)
    return path


def read(path: Path) -> Any:
    return read_pt(LocalFiles(path.parent), path.name)[0]


def flipped(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def record(path: Path, name: str) -> zipfile.ZipInfo:
    with zipfile.ZipFile(path) as found:
        return next(info for info in found.infolist() if info.filename.endswith(name))


def data_offset(path: Path, name: str) -> int:
    offset = record(path, name).header_offset
    head = path.read_bytes()[offset : offset + 30]
    lengths = struct.unpack("<HH", head[26:30])
    return offset + 30 + sum(lengths)


def sample() -> dict[str, Any]:
    base = torch.arange(60, dtype=torch.float32)
    return {
        "plain": [1, 2.5, None, True, "text", (3, {"deep": b"bytes"}), {4, 5}],
        "ordered": OrderedDict(a=torch.Size([2, 3])),
        "views": [base[5:17].view(3, 4), base[20:], base[:0]],
        "parameter": torch.nn.Parameter(torch.full((2,), 7.0)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "crossed": base.view(6, 10).t(),
        "step": torch.tensor(9.0),
    }


def test_plain_values_and_tensors_come_back(tmp_path: Path) -> None:
    found = read(saved(tmp_path, sample()))
    assert found["plain"] == sample()["plain"]
    assert found["ordered"] == OrderedDict(a=(2, 3))
    assert [view.offset for view in found["views"][:2]] == [20, 80]
    assert torch.equal(read_values(found["views"][0]), torch.arange(5.0, 17.0).view(3, 4))
    assert read_values(found["views"][2]).shape == (0,)
    assert read_values(found["parameter"]).tolist() == [7, 7]
    assert (found["half"].dtype, read_values(found["half"]).dtype) == ("BF16", torch.bfloat16)
    assert read_values(found["step"]).item() == 9
    assert found["views"][0].block is found["views"][1].block  # read once, whoever needs it


def test_an_extent_is_elements_of_the_tensor(tmp_path: Path) -> None:
    found = read(saved(tmp_path, sample()))["views"][1]
    extent = found.extent("w", "fp32", 100, 110, at=4)
    data = read_block(extent.block)
    wanted = torch.frombuffer(data, dtype=torch.float32, count=10, offset=extent.offset)
    assert (extent.start, extent.stop, extent.dtype) == (100, 110, "F32")
    assert wanted.tolist() == list(range(24, 34))
    with pytest.raises(DamagedError, match=r"has 40 elements, but w/fp32 needs elements 35 to 45 of it"):
        found.extent("w", "fp32", 0, 10, at=35)


def test_a_tensor_that_is_not_contiguous_is_refused_when_it_is_needed(tmp_path: Path) -> None:
    found = read(saved(tmp_path, sample()))["crossed"]
    with pytest.raises(UnsupportedError, match="not contiguous in memory"):
        found.extent("w", "fp32", 0, 60)
    with pytest.raises(UnsupportedError, match="not contiguous"):
        found.read()


@pytest.mark.parametrize("place", ["alone", "deep", "key"])
def test_a_pickle_that_runs_a_command_is_refused_by_name(tmp_path: Path, place: str) -> None:
    canary = tmp_path / "canary"
    evil = Evil(canary)
    path = saved(tmp_path, {"alone": evil, "deep": {"x": [torch.ones(3), (evil,)]}, "key": {evil: 1}}[place])
    with pytest.raises(UnsupportedError, match=r"file\.pt needs the class posix\.system, .*nothing was executed"):
        read(path)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (b"c__builtin__\neval\n(X\x04\x00\x00\x001/0;tR.", "__builtin__.eval"),
        (b"cbuiltins\ngetattr\n.", "builtins.getattr"),
        (b"ctorch\nload\n.", "torch.load"),
        (b"ctorch.hub\nload\n.", "torch.hub.load"),
        (b"ctorch._utils\n_rebuild_device_tensor_from_numpy\n.", "torch._utils._rebuild_device_tensor_from_numpy"),
        (b"cdeepspeed.runtime.engine\nDeepSpeedEngine\n.", "deepspeed.runtime.engine.DeepSpeedEngine"),
        (b"cargparse\nNamespace\n)\x81.", "argparse.Namespace"),
    ],
)
def test_every_other_class_is_refused_by_name(tmp_path: Path, call: bytes, named: str) -> None:
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("file/data.pkl", b"\x80\x02" + call)
        file.writestr("file/byteorder", "little")
    with pytest.raises(UnsupportedError, match=named.replace(".", r"\.")):
        read(path)


def test_a_class_named_in_a_newer_way_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("file/data.pkl", pickle.dumps(os.system, protocol=4))
    with pytest.raises(UnsupportedError, match="names a class"):
        read(path)


def test_what_others_allowed_in_this_process_is_not_allowed_here(tmp_path: Path) -> None:
    path = saved(tmp_path, {"evil": Evil(tmp_path / "canary")})
    torch.serialization.add_safe_globals([(os.system, "posix.system")])
    try:
        with pytest.raises(UnsupportedError, match=r"posix\.system"):
            read(path)
    finally:
        torch.serialization.clear_safe_globals()
    assert not (tmp_path / "canary").exists()


def test_reading_leaves_no_class_allowed(tmp_path: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    read(saved(tmp_path, sample()))
    assert set(torch.serialization.get_safe_globals()) == before


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, sample())
    whole = path.read_bytes()
    for size in (*range(0, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedError, match=r"file\.pt"):
            read(path)


@pytest.mark.slow
def test_every_flipped_byte_is_found_or_harmless(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.arange(3.0), "y": [1, "two"]})
    whole, expected = path.read_bytes(), flattened(read(path))
    with zipfile.ZipFile(path) as archive:
        names = [(info.filename, info.file_size) for info in archive.infolist()]
    inside = {data_offset(path, name) + i for name, size in names for i in range(size)}
    for offset in range(len(whole)):
        flipped(path, offset)
        try:
            found = flattened(read(path))
        except DriftpointError as error:
            assert "file.pt" in str(error)
        else:
            assert found == expected and offset not in inside, offset
        path.write_bytes(whole)


def flattened(value: Any) -> Any:
    """With the bytes of every tensor, checked."""
    if isinstance(value, FileTensor):
        start = value.offset
        data = read_block(value.block)
        return value.dtype, value.shape, value.contiguous, bytes(data[start:])
    if isinstance(value, dict):
        return {key: flattened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [flattened(item) for item in value]
    return value


def test_a_flipped_bit_in_the_structure_is_found_before_it_is_unpickled(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.ones(3)})
    flipped(path, data_offset(path, "data.pkl") + 10)
    with pytest.raises(DamagedError, match=r"file/data\.pkl does not match its checksum"):
        read(path)


def test_a_flipped_bit_in_a_tensor_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.ones(3)})
    flipped(path, data_offset(path, "data/0") + 1)
    found = read(path)["x"]
    with pytest.raises(DamagedError, match=r"file\.pt, record file/data/0: .*checksum"):
        found.read()


def rewritten(path: Path, structure: bytes) -> None:
    """The same archive with another pickle, its checksum right."""
    with zipfile.ZipFile(path) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in records.items():
            new.writestr(name, structure if name.endswith("data.pkl") else data)


def test_a_tensor_larger_than_its_record(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.ones(3)})
    with zipfile.ZipFile(path) as file:
        structure = file.read("file/data.pkl")
    assert structure.count(b"K\x03") == 2  # elements of the storage, and its shape
    rewritten(path, structure.replace(b"K\x03", b"J\xff\xff\xff\x7f"))
    with pytest.raises(DamagedError, match=r"fewer than the tensor|does not hold"):
        read(path)


def test_a_value_that_contains_itself(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(DamagedError, match="contains itself"):
        read(saved(tmp_path, loop))


def test_a_value_that_doubles_forty_times_costs_nothing(tmp_path: Path) -> None:
    value: list[Any] = []
    for _ in range(40):
        value = [value, value]
    assert len(read(saved(tmp_path, value))) == 2


def test_other_archives(tmp_path: Path) -> None:
    legacy = tmp_path / "legacy.pt"
    torch.save({"x": torch.ones(3)}, legacy, _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedError, match=r"legacy\.pt"):
        read(legacy)
    squeezed, twice, mixed, empty = (tmp_path / f"{name}.pt" for name in ("squeezed", "twice", "mixed", "empty"))
    with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", b"\x80\x02}." * 1000)
    with pytest.raises(DamagedError, match="compressed"):
        read(squeezed)
    with pytest.warns(UserWarning), zipfile.ZipFile(twice, "w") as file:
        file.writestr("x/data.pkl", b"\x80\x02}.")
        file.writestr("x/data.pkl", b"\x80\x02}.")
    with pytest.raises(DamagedError, match="duplicate records"):
        read(twice)
    with zipfile.ZipFile(mixed, "w") as file:
        file.writestr("x/data.pkl", b"\x80\x02}.")
        file.writestr("y/data.pkl", b"\x80\x02}.")
    with pytest.raises(DamagedError, match="several archives"):
        read(mixed)
    with zipfile.ZipFile(empty, "w") as file:
        file.writestr("x/version", "3")
    with pytest.raises(DamagedError, match=r"no record data\.pkl"):
        read(empty)


def test_links_and_things_that_are_no_files(tmp_path: Path) -> None:
    target = saved(tmp_path, {"x": 1}, "target.pt")
    link = tmp_path / "link.pt"
    link.symlink_to(target)
    assert read(link) == {"x": 1}  # as in deduplicated storage
    link.unlink()
    link.symlink_to(tmp_path)
    with pytest.raises(DamagedError, match="not a regular file"):
        read(link)
    link.unlink()
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(StorageError, match=r"a symbolic link to .*nothing, which cannot be read"):
        read(link)
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(DamagedError, match="not a regular file"):
        read(tmp_path / "pipe.pt")
    with pytest.raises(MissingError):
        read(tmp_path / "nothing.pt")


def test_a_big_endian_file(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": 1})
    with zipfile.ZipFile(path) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in records.items():
            new.writestr(name, b"big" if name.endswith("byteorder") else data)
    with pytest.raises(UnsupportedError, match="big-endian"):
        read(path)
