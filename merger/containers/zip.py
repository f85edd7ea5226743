"""The records of an uncompressed zip file, as ``torch.save`` writes it: where they lie, and their checksums.

Reads the directory at the end of the file and each record's own header. Layout of the structures: PKWARE's
APPNOTE 6.3, sections 4.3.7 (local header), 4.3.9 (data descriptor) and 4.3.12 (directory entry).
"""

from __future__ import annotations

import errno
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from store.errors import DamagedError

_LOCAL, _DESCRIPTOR, _ENTRY = b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02"


@dataclass(frozen=True)
class Record:
    """A record of a zip file: ``nbytes`` bytes from ``offset``.

    crc: CRC-32 as the directory has it. header, entry: offsets of its local header and of its directory entry.
    """

    name: str
    offset: int
    nbytes: int
    crc: int
    header: int
    entry: int


def records(path: Path) -> list[Record]:
    """All records, in the order of the directory.

    DamagedError for a file that is no whole, uncompressed zip. Other errors of the system, as OSError, pass through.
    """
    with path.open("rb") as file:
        return records_in(file, path)


def records_in(file: BinaryIO, path: Path) -> list[Record]:
    """:func:`records` of a zip that is open for reading. path: what to call it in an error."""
    try:
        with zipfile.ZipFile(file) as directory:
            found = []
            entry = directory.start_dir
            for info in directory.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    raise DamagedError(f"{path}: {info.filename} is compressed, which torch never writes")
                offset = info.header_offset + _header_bytes(file, info.header_offset, path)
                if offset + info.file_size > directory.start_dir:
                    raise DamagedError(f"{path}: {info.filename} lies beyond the end of the file's data")
                found.append(Record(info.filename, offset, info.file_size, info.CRC, info.header_offset, entry))
                entry += _entry_bytes(file, entry, path)
            return found
    except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError, OverflowError) as error:
        raise DamagedError(f"{path} is truncated or damaged: {error}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DamagedError(f"{path} is damaged: it names a place before its own beginning") from error


def patch_checksum(file: BinaryIO, record: Record, crc: int) -> None:
    """Set a record's CRC-32 wherever the file has it. file: open for reading and writing."""
    value = struct.pack("<I", crc)
    _write(file, record.entry + 16, value)
    file.seek(record.header)
    flags = struct.unpack("<4sHH", file.read(8))[2]
    if not flags & 8:
        _write(file, record.header + 14, value)
        return
    file.seek(record.offset + record.nbytes)
    if file.read(4) != _DESCRIPTOR:
        raise DamagedError(f"{record.name}: there is no data descriptor behind it")
    file.write(value)


def _write(file: BinaryIO, offset: int, data: bytes) -> None:
    file.seek(offset)
    file.write(data)


def _header_bytes(file: BinaryIO, offset: int, path: Path) -> int:
    file.seek(offset)
    head = file.read(30)
    if head[:4] != _LOCAL:
        raise DamagedError(f"{path}: there is no record at byte {offset}")
    name, extra = struct.unpack("<HH", head[26:30])
    return 30 + int(name) + int(extra)


def _entry_bytes(file: BinaryIO, offset: int, path: Path) -> int:
    file.seek(offset)
    head = file.read(46)
    if head[:4] != _ENTRY:
        raise DamagedError(f"{path}: there is no directory entry at byte {offset}")
    name, extra, comment = struct.unpack("<HHH", head[28:34])
    return 46 + int(name) + int(extra) + int(comment)
