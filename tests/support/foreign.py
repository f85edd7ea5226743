"""Reading what a source says, by hand; and comparing DeepSpeed's directories file by file, to the last bit."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from merger.checkpoint import Checkpoint
from merger.io.blocks import Extent
from merger.io.output_dir import CERTIFICATE
from tests.support.launch import WORKERS, launcher, python
from tests.support.pt_trees import differences


def train_stock(directory: Path, ranks: int, cases: Sequence[str]) -> None:
    """Train and save cases of ``source_cases`` with stock DeepSpeed, each into its own folder."""
    run([*launcher(ranks), WORKERS / "source_train.py", directory, *cases], directory)


def convert(directory: Path, cases: Sequence[str]) -> None:
    """Make universal checkpoints of the cases' last tags with DeepSpeed's own converter, in ``universal``."""
    pairs = []
    for case in cases:
        (directory / case / "universal").mkdir()
        tag = directory / case / "saved" / "global_step3"
        pairs += [str(tag), str(directory / case / "universal" / f"{tag.name}_universal")]
    run([WORKERS / "source_convert.py", *pairs], directory)


def run(words: Sequence[object], cwd: Path) -> None:
    """Run a script that uses DeepSpeed, or torchrun with one, to its end, which must be good."""
    done = python(words, cwd)
    assert done.returncode == 0, done.stderr[-6000:]


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


def read_tensors(checkpoint: Checkpoint) -> dict[tuple[str, str], torch.Tensor]:
    """Every (fqn, slot) that a checkpoint names, read through its extents with nothing of the merger's own."""
    out = {}
    for (fqn, slot), extents in checkpoint.index.names().items():
        position, parts = 0, []
        for extent in extents:
            assert extent.start == position
            parts.append(_read(extent))
            position = extent.stop
        out[fqn, slot] = torch.cat(parts).view(tuple(checkpoint.tensors[fqn].shape))
    return out


def _read(extent: Extent) -> torch.Tensor:
    block = extent.block
    with (Path(block.files.root) / block.path).open("rb") as file:  # type: ignore[attr-defined]
        file.seek(block.offset)
        data = file.read(block.nbytes)
    assert f"{zlib.crc32(data):08x}" == block.digest
    dtype = _DTYPES[extent.dtype]
    count = extent.stop - extent.start
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype, count=count, offset=extent.offset)


def directory_differences(one: Path, other: Path) -> list[str]:
    """Where two save directories of DeepSpeed's differ; the certificate and our own key are left out."""
    names = _names(one)
    if names != _names(other):
        return [f"files {sorted(names ^ _names(other))}"]
    out = []
    for name in sorted(names):
        if name.endswith(".pt"):
            out += differences(_comparable(one, name), _comparable(other, name), name)
        elif (one / name).read_bytes() != (other / name).read_bytes():
            out.append(name)
    return out


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {CERTIFICATE}


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def _comparable(folder: Path, name: str) -> Any:
    """A file's content, with zeros where ZeRO-3 pads: DeepSpeed never initialises its paddings."""
    content = _load(folder / name)
    content.pop("driftpoint", None)
    found = re.search(r"zero_pp_rank_(\d+)_mp_rank_00_(model|optim)", name)
    if found is None:
        return content
    rank, tag = int(found[1]), (folder / name).parent
    if found[2] == "model":
        for fqn, shape in (content["frozen_param_shapes"] or {}).items():
            fragment = content["frozen_param_fragments"][fqn]
            _clear(fragment, [shape.numel()], rank, content["dp_world_size"])
    elif "fp32_flat_groups" in content["optimizer_state_dict"]:
        model = _load(tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        groups = content["optimizer_state_dict"]["fp32_flat_groups"]
        for flat, group in zip(groups, model["param_shapes"], strict=True):
            _clear(flat.detach(), [shape.numel() for shape in group.values()], rank, model["dp_world_size"])
    return content


def _clear(flat: torch.Tensor, numels: list[int], rank: int, world_size: int) -> None:
    offset = 0
    for numel in numels:
        part = -(-numel // world_size)
        held = min(part, max(0, numel - rank * part))
        flat[offset + held : offset + part] = 0
        offset += part
    assert offset == flat.numel()
