"""The records of uncompressed zip files: where they lie, their checksums, and files that are damaged anywhere."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merger.writers.torch_zip import patch_checksum, read_records
from store.errors import DamagedError

CONTENT = {"one": b"first record", "folder/two": b"", "folder/three": bytes(range(256))}


class Unseekable(io.RawIOBase):
    """A stream: what is written to it gets data descriptors behind the records, as torch writes them."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.data += data
        return len(data)


def zipped(*, streamed: bool, zip64: bool = False) -> bytes:
    stream = Unseekable() if streamed else io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, data in CONTENT.items():
            with file.open(zipfile.ZipInfo(name), "w", force_zip64=zip64) as record:
                record.write(data)
    return bytes(stream.data) if isinstance(stream, Unseekable) else stream.getvalue()


def saved(path: Path) -> Path:
    torch.save({"a": torch.arange(7), "b": [torch.ones(3, 5, dtype=torch.bfloat16), "text"]}, path)
    return path


@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_where_records_lie(tmp_path: Path, streamed: bool, zip64: bool) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(zipped(streamed=streamed, zip64=zip64))
    data = path.read_bytes()
    found = read_records(path)
    assert {record.name: data[record.offset : record.offset + record.nbytes] for record in found} == CONTENT
    assert [record.crc for record in found] == [zlib.crc32(content) for content in CONTENT.values()]


def test_what_torch_writes(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt")
    data = path.read_bytes()
    found = {record.name: record for record in read_records(path)}
    assert {"x/data.pkl", "x/data/0", "x/data/1"} <= found.keys()
    assert data[found["x/data/0"].offset :][:56] == torch.arange(7).numpy().tobytes()
    assert all(zlib.crc32(data[one.offset : one.offset + one.nbytes]) == one.crc for one in found.values())


@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_checksums_are_put_wherever_the_file_has_them(tmp_path: Path, streamed: bool, zip64: bool) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(zipped(streamed=streamed, zip64=zip64))
    before = path.read_bytes()
    changed = {name: bytes(255 - byte for byte in content) for name, content in CONTENT.items()}
    with path.open("r+b") as file:
        for record in read_records(path):
            file.seek(record.offset)
            file.write(changed[record.name])
    with zipfile.ZipFile(path) as bad:
        assert bad.testzip() is not None
    with path.open("r+b") as file:
        for record in read_records(path):
            patch_checksum(file, record, zlib.crc32(changed[record.name]))
    with zipfile.ZipFile(path) as good:
        assert good.testzip() is None
        assert {name: good.read(name) for name in changed} == changed
    # The same as if it had been written so, local headers and descriptors included.
    with path.open("r+b") as file:
        for record in read_records(path):
            file.seek(record.offset)
            file.write(CONTENT[record.name])
            patch_checksum(file, record, zlib.crc32(CONTENT[record.name]))
    assert path.read_bytes() == before


def test_a_record_without_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(zipped(streamed=True))
    record = read_records(path)[0]
    with path.open("r+b") as file:
        file.seek(record.offset + record.nbytes)
        file.write(b"....")
        with pytest.raises(DamagedError, match="record one has no data descriptor"):
            patch_checksum(file, record, 0)


def test_a_compressed_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("name", b"0" * 1000)
    with pytest.raises(DamagedError, match=r"x\.zip: record name is compressed"):
        read_records(path)


@pytest.mark.parametrize("data", [b"", b"PK", b"not a zip" * 100], ids=["empty", "short", "other"])
def test_something_else_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=r"x\.zip is damaged"):
        read_records(path)


def found_in(path: Path, data: bytes) -> list[str] | None:
    """Names of the records, None where the file is refused; any other error passes."""
    path.write_bytes(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = read_records(path)
    except DamagedError:
        return None
    assert all(one.offset >= 0 and one.nbytes >= 0 and one.offset + one.nbytes <= len(data) for one in found)
    return [one.name for one in found]


@pytest.mark.parametrize("kind", ["torch", "streamed", "zip64"])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, kind: str) -> None:
    data = example(tmp_path, kind)
    for length in range(len(data)):
        assert found_in(tmp_path / "cut", data[:length]) is None


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
@pytest.mark.parametrize("kind", ["torch", "streamed", "zip64"])
def test_a_flipped_byte_is_refused_or_harms_nothing(tmp_path: Path, kind: str, mask: int) -> None:
    data = example(tmp_path, kind)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= mask
        found_in(tmp_path / "flipped", bytes(flipped))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes_written_over_are_refused_or_harm_nothing(
    tmp_path_factory: pytest.TempPathFactory, given_: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("over")
    data = bytearray(example(folder, given_.draw(st.sampled_from(["torch", "streamed", "zip64"]))))
    end = len(data)
    for _ in range(given_.draw(st.integers(1, 4))):
        # Mostly in the directory, where sizes and offsets are.
        start = given_.draw(st.integers(0, end) | st.integers(max(0, end - 200), end))
        piece = given_.draw(
            st.binary(max_size=9) | st.integers(-(2**63), 2**63 - 1).map(lambda n: struct.pack("<q", n))
        )
        data[start : start + len(piece)] = piece
    found_in(folder / "over", bytes(data))


def example(folder: Path, kind: str) -> bytes:
    if kind == "torch":
        return saved(folder / "x.pt").read_bytes()
    return zipped(streamed=kind == "streamed", zip64=kind == "zip64")
