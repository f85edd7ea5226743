"""Tensors without memory: what a file is made of before its bytes are there, and what a file is read as."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.checkpoint import PlannedTensor
from merger.sources.torch_file import read_pt
from merger.writers import torch_zip
from merger.writers.torch_zip import PtFile, hollow_tensor, load_hollow
from store.storage.local import LocalFiles
from tests.support.extents import DTYPES

LARGE = 1 << 40
"""Elements; four times as many bytes are more than a machine has."""

READ_AND_MADE = """
import sys, torch
from pathlib import Path
from merger.checkpoint import PlannedTensor
from merger.sources.torch_file import read_pt
from merger.writers.torch_zip import PtFile
from store.storage.local import LocalFiles
folder = Path(sys.argv[1])
PtFile({"weight": PlannedTensor((3, 4), torch.float32, ())}).make(folder / "made.pt")
torch.save({"weight": torch.ones(3)}, folder / "saved.pt")
value, _ = read_pt(LocalFiles(folder), "saved.pt")
print(value["weight"].shape, "sympy" in sys.modules, "torch.distributed.checkpoint" in sys.modules)
"""


def value() -> dict[str, Any]:
    base = torch.randn(6, 5)
    tensors = {str(dtype): torch.zeros(3, 4).to(dtype) for dtype in DTYPES}
    views = {"base": base, "row": base[2], "turned": base.T, "none": torch.empty(0, 3), "scalar": torch.tensor(1.5)}
    return {**tensors, **views, "complex": torch.view_as_complex(torch.randn(4, 2)).conj(), "text": ["x", 1]}


@pytest.mark.parametrize("known", [True, False])
def test_places_are_those_of_the_bytes_whatever_torch_notes(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, path = value(), tmp_path / "a.pt"
    torch.save(saved, path)
    monkeypatch.setattr(torch_zip, "_knows_places", lambda: known)
    loaded, data = load_hollow(path), path.read_bytes()
    for name, tensor in saved.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        found = loaded[name]
        assert (found.shape, found.dtype, found.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert found.is_conj() == tensor.is_conj()
        begin, whole = found.untyped_storage()._checkpoint_offset, tensor.untyped_storage()
        assert data[begin : begin + whole.nbytes()] == bytes(whole.tolist())


def test_torch_of_this_environment_notes_places_without_fake_tensors() -> None:
    assert torch_zip._knows_places()


@pytest.mark.parametrize("known", [True, False])
def test_a_file_reads_the_same_either_way(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(value(), tmp_path / "a.pt")
    expected = described(tmp_path)
    monkeypatch.setattr(torch_zip, "_knows_places", lambda: known)
    assert described(tmp_path) == expected


def described(folder: Path) -> str:
    """What a file is read as, without addresses of objects."""
    return re.sub(r" at 0x\w+", "", repr(read_pt(LocalFiles(folder), "a.pt")))


@pytest.mark.parametrize("refused", [False, True])
def test_a_tensor_without_memory_is_saved_as_one_with(
    refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refused:  # a system that sets memory aside for all that is mapped

        def no_memory(*_: Any) -> None:
            raise OSError(12, "cannot allocate memory")

        monkeypatch.setattr(mmap, "mmap", no_memory)
    for dtype in DTYPES:
        for shape in ((3, 4), (), (0, 2), (1,)):
            planned = PlannedTensor(shape, dtype, ())
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save({"x": hollow_tensor(planned)}, tmp_path / "hollow.pt")
            torch.save({"x": torch.zeros(shape, dtype=dtype)}, tmp_path / "whole1.pt")
            hollow, whole = ((tmp_path / f"{name}.pt").stat().st_size for name in ("hollow", "whole1"))
            assert hollow == whole
            loaded = torch.load(tmp_path / "hollow.pt", weights_only=True)["x"]
            assert (loaded.shape, loaded.dtype, loaded.device.type) == (torch.Size(shape), dtype, "cpu")


def test_a_tensor_larger_than_memory_takes_none() -> None:
    before = resident()
    tensor = hollow_tensor(PlannedTensor((LARGE,), torch.float32, ()))
    assert tensor.numel() == LARGE and tensor.untyped_storage().nbytes() == 4 * LARGE
    assert resident() - before < 1 << 26


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def test_files_are_read_and_made_without_what_takes_seconds_to_import(tmp_path: Path) -> None:
    command = [sys.executable, "-c", READ_AND_MADE, str(tmp_path)]
    seen = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4])
    assert seen.stdout.split("\n")[0] == "(3,) False False"


def test_a_file_that_is_made_has_the_holes_of_its_tensors(tmp_path: Path) -> None:
    file = PtFile({"a": PlannedTensor((3, 4), torch.float32, ()), "b": torch.ones(2)})
    (hole,) = file.make(tmp_path / "a.pt")
    assert hole.stored.shape == (3, 4)
