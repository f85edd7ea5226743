"""Checkpoints of DeepSpeed that are damaged, mixed up or made to do harm: refused by name, nothing run or left behind.

One launch saves them; every test has copies of its own.
"""

from __future__ import annotations

import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from copy import deepcopy as copy_of
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from merger.merge import merge
from merger.sources import open_source
from store.errors import DamagedError, DriftpointError, MergeError, NoStoreError, StorageError, UnsupportedError
from tests.support.foreign import train_stock

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROUND_ROBIN, ZERO1, ZERO3 = "zero2-fp32-round-robin", "zero1-bf16", "zero3-bf16-sub-groups"
ELASTIC, STAGE0 = "zero1-bf16-elastic", "zero0-fp32"
OPTIM = {
    ROUND_ROBIN: "zero_pp_rank_{}_mp_rank_00_optim_states.pt",
    ZERO1: "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt",
    ZERO3: "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt",
}
MODEL = {ROUND_ROBIN: "mp_rank_00_model_states.pt", ZERO1: "mp_rank_00_model_states.pt"}
MODEL[ZERO3] = "zero_pp_rank_1_mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile")
    train_stock(directory, 2, [*OPTIM, ELASTIC, STAGE0])
    return directory


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A case's save directory, as a copy to be spoiled."""

    def made(case: str) -> Path:
        return Path(shutil.copytree(originals / case / "saved", tmp_path / case))

    return made


def tag(root: Path) -> Path:
    return root / "global_step3"


def contents(folder: Path) -> dict[str, Any]:
    paths = sorted(folder.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def refused(root: Path, kind: type[Exception], match: str) -> None:
    """Reading and merging are refused in these words; nothing is written, the source is as it was."""
    before = contents(root.parent)
    with pytest.raises(kind, match=match):
        open_source(root).checkpoint(None, frozenset())
    with pytest.raises(kind, match=match):
        merge(root, root.parent / "out")
    assert contents(root.parent) == before


class Evil:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("case", OPTIM)
@pytest.mark.parametrize("which", [OPTIM, MODEL])
def test_a_file_that_runs_a_command(
    copy: Callable[[str], Path], tmp_path: Path, case: str, which: dict[str, str]
) -> None:
    root, canary = copy(case), tmp_path / "canary"
    path = tag(root) / which[case].format(1)
    value = torch.load(path, weights_only=False)
    value["client"] = {"hidden": [Evil(canary)]}
    torch.save(value, path)
    refused(root, UnsupportedError, rf"{path.name} needs the class posix\.system")
    assert not canary.exists()


@pytest.mark.parametrize("case", OPTIM)
@pytest.mark.parametrize("which", [OPTIM, MODEL])
def test_a_truncated_file(copy: Callable[[str], Path], case: str, which: dict[str, str]) -> None:
    root = copy(case)
    path = tag(root) / which[case].format(1)
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 3, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(root, DamagedError, path.name)


def records(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and size of each record."""
    data, out = path.read_bytes(), {}
    with zipfile.ZipFile(path) as found:
        for info in found.infolist():
            lengths = data[info.header_offset + 26 : info.header_offset + 30]
            start = info.header_offset + 30 + int.from_bytes(lengths[:2], "little")
            start += int.from_bytes(lengths[2:], "little")
            out[info.filename.partition("/")[2]] = (start, info.file_size)
    return out


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("case", OPTIM)
def test_a_flipped_bit_in_any_tensor_leaves_nothing_named(
    copy: Callable[[str], Path], tmp_path: Path, case: str
) -> None:
    root = copy(case)
    path = tag(root) / OPTIM[case].format(1)
    index = open_source(root).checkpoint(None, frozenset()).index
    needed = {e.block.offset for extents in index.names().values() for e in extents if e.block.path == path.name}
    tensors = [place for name, place in records(path).items() if name.startswith("data/") and place[1]]
    data = path.read_bytes()
    steps = [place for place in tensors if data[place[0] : sum(place)] == struct.pack("<f", 3)]
    masters_and_moments = [place for place in tensors if place[0] in needed]
    assert len(masters_and_moments) >= 6 and steps  # a partition of padding alone is never read
    for start, size in (*masters_and_moments, *steps):
        whole = path.read_bytes()
        for offset in (start, start + size - 1):
            flip(path, offset)
            with pytest.raises(DamagedError, match=path.name):
                merge(root, tmp_path / "out")
            path.write_bytes(whole)
            assert sorted(found.name for found in tmp_path.iterdir()) == [case]
    assert merge(root, tmp_path / "out").certificate.as_found  # as it was again


def test_a_flipped_bit_in_frozen_parameters_and_buffers(copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = copy(ZERO3)
    checkpoint = open_source(root).checkpoint(None, frozenset())
    found = checkpoint.index.names()
    for slot in ("frozen", "buffer"):
        extent = next(extents for (_, name), extents in found.items() if name == slot)[0]
        path = Path(extent.block.files.root) / extent.block.path  # type: ignore[attr-defined]
        flip(path, extent.block.offset)
        with pytest.raises(DamagedError, match=path.name):
            merge(root, tmp_path / "out")
        flip(path, extent.block.offset)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", OPTIM)
@pytest.mark.parametrize("which", [OPTIM, MODEL])
def test_a_flipped_bit_in_the_structure(copy: Callable[[str], Path], case: str, which: dict[str, str]) -> None:
    root = copy(case)
    path = tag(root) / which[case].format(1)
    start, size = records(path)["data.pkl"]
    whole = path.read_bytes()
    for offset in (start, start + size // 2, start + size - 1, len(whole) - 22, whole.index(b"PK\x01\x02")):
        flip(path, offset)
        refused(root, DamagedError, path.name)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "name",
    [
        "../elsewhere/global_step3", "..", ".", "/etc", "", "\n", "global_step3/", "a\0b", "a\\b",
        "global_step3\nglobal_step2",
    ],
)  # fmt: skip
def test_latest_that_leads_elsewhere(copy: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    root = copy(ZERO1)
    shutil.copytree(tag(root), tmp_path / "elsewhere" / "global_step3")
    (root / "latest").write_text(name)
    refused(root, MergeError, "not an entry of the directory")


def test_latest_that_is_no_name(copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = copy(ZERO1)
    latest = root / "latest"
    latest.write_bytes(b"\xff\xfe")
    refused(root, DamagedError, "not text")
    latest.write_bytes(b"x" * 5000)
    refused(root, DamagedError, "latest has 5000 bytes")
    latest.write_text("global_step4")
    refused(root, MergeError, "no checkpoint global_step4, which latest names; there are: global_step2, global_step3")
    latest.unlink()
    refused(root, MergeError, "no file 'latest': name one of its checkpoints, global_step2, global_step3")
    (tmp_path / "name").write_text("global_step3")
    latest.symlink_to(tmp_path / "name")
    refused(root, StorageError, "symbolic link")


@pytest.mark.parametrize("asked", ["../global_step3", "/etc", "..", "global_step3/../global_step2"])
def test_a_tag_that_leads_elsewhere(copy: Callable[[str], Path], tmp_path: Path, asked: str) -> None:
    with pytest.raises(MergeError, match="the requested tag"):
        merge(copy(ZERO1), tmp_path / "out", save=asked)
    assert not (tmp_path / "out").exists()


def test_links(copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = copy(ZERO1)
    tag(root).rename(tmp_path / "moved")
    tag(root).symlink_to(tmp_path / "moved")
    refused(root, MergeError, "no checkpoint global_step3, which latest names: it is a symbolic link to .*moved")
    tag(root).unlink()
    (tmp_path / "moved").rename(tag(root))
    path = tag(root) / OPTIM[ZERO1].format(1)
    path.rename(tmp_path / "file.pt")
    path.symlink_to(tmp_path / "file.pt")
    assert merge(root, tmp_path / "out").certificate.as_found  # as in deduplicated storage
    shutil.rmtree(tmp_path / "out")
    path.unlink()
    path.symlink_to(tmp_path / "nothing.pt")
    refused(root, StorageError, "nothing.pt, which cannot be read")
    path.unlink()
    path.symlink_to(tag(root))
    refused(root, DamagedError, "is not a regular file")


@pytest.mark.parametrize("case", OPTIM)
def test_a_rank_is_missing_or_one_too_many(copy: Callable[[str], Path], case: str) -> None:
    root = copy(case)
    path = tag(root) / OPTIM[case].format(1)
    data = path.read_bytes()
    path.unlink()
    refused(root, MergeError, rf"{path.name} is missing.* 2 ranks")
    path.write_bytes(data)
    extra = tag(root) / OPTIM[case].format(2)
    extra.write_bytes(data)
    refused(root, MergeError, rf"{extra.name} is of rank 2, but 2 ranks saved this checkpoint")
    extra.unlink()
    if case == ZERO3:
        (tag(root) / MODEL[case]).unlink()
        refused(root, MergeError, rf"{MODEL[case]} is missing")
    else:
        (tag(root) / MODEL[case]).unlink()
        refused(root, (MergeError, NoStoreError), "no checkpoint global_step3|no model states")  # type: ignore[arg-type]


@pytest.mark.parametrize("case", OPTIM)
def test_ranks_of_different_steps(copy: Callable[[str], Path], case: str) -> None:
    root = copy(case)
    name = OPTIM[case].format(1)
    shutil.copy(root / "global_step2" / name, tag(root) / name)
    refused(root, MergeError, "differ.*they are of different saves")


@pytest.mark.parametrize("case", OPTIM)
def test_ranks_that_changed_places(copy: Callable[[str], Path], case: str) -> None:
    root = copy(case)
    one, other = (tag(root) / OPTIM[case].format(rank) for rank in (0, 1))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    refused(root, MergeError, rf"{one.name} was saved as {other.name}")


def test_ranks_that_count_otherwise(copy: Callable[[str], Path]) -> None:
    root = copy(ZERO1)
    path = tag(root) / OPTIM[ZERO1].format(1)
    for step in (torch.tensor(2.0), torch.tensor(3, dtype=torch.int64), 10**30):
        edited(path, lambda value, step=step: _states(value)[1].update(step=step))
        refused(root, MergeError, "differ in scalars, so they are of different saves")


def _states(value: dict[str, Any]) -> dict[int, Any]:
    states: dict[int, Any] = value["optimizer_state_dict"]["base_optimizer_state"]["state"]
    return states


def test_model_states_of_another_step(copy: Callable[[str], Path]) -> None:
    root = copy(ZERO3)
    shutil.copy(root / "global_step2" / MODEL[ZERO3], tag(root) / MODEL[ZERO3])
    refused(root, MergeError, "differ in global_steps")


def test_files_of_two_runs(copy: Callable[[str], Path]) -> None:
    root = copy(ZERO1)
    other = copy(ROUND_ROBIN)
    name = OPTIM[ROUND_ROBIN].format(1)
    shutil.copy(tag(other) / name, tag(root) / name)
    shutil.rmtree(other)
    refused(root, MergeError, " of rank 1: remove that of the other run")
    (tag(root) / OPTIM[ZERO1].format(1)).unlink()
    refused(root, MergeError, "files of two different runs")


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


@pytest.mark.parametrize("how", ["configuration", "shapes", "mappings", "paddings"])
def test_places_that_contradict_each_other(copy: Callable[[str], Path], how: str) -> None:
    root = copy(ROUND_ROBIN)
    model, optim = tag(root) / MODEL[ROUND_ROBIN], tag(root) / OPTIM[ROUND_ROBIN].format(0)
    if how == "configuration":
        edited(model, lambda value: value["ds_config"]["zero_optimization"].pop("round_robin_gradients"))
    elif how == "shapes":
        edited(model, lambda value: value["param_shapes"][1].move_to_end(next(iter(value["param_shapes"][1]))))
    elif how == "mappings":
        edited(optim, lambda value: _shift(value["optimizer_state_dict"]["param_slice_mappings"][1]))
    else:
        edited(optim, lambda value: value["optimizer_state_dict"]["group_paddings"].__setitem__(1, 2))
    refused(root, MergeError, "cannot be located|cannot hold the .* elements")


def _shift(mapping: dict[str, Any]) -> None:
    next(iter(mapping.values())).start += 1


def test_what_is_not_handled_is_told(copy: Callable[[str], Path]) -> None:
    refused(copy(ELASTIC), UnsupportedError, "elastic_checkpoint")
    refused(copy(STAGE0), UnsupportedError, "no ZeRO optimizer files")
    root = copy(ZERO1)
    for name, match in {
        "layer_0_expert_0_mp_rank_00_model_states.pt": "MoE",
        "mp_rank_01_model_states.pt": "tensor or pipeline parallelism",
        "layer_00-model_states.pt": "a pipeline",
    }.items():
        (tag(root) / name).write_bytes(b"x")
        refused(root, UnsupportedError, match)
        (tag(root) / name).unlink()
    (tag(root) / "offloaded_tensors").mkdir()
    refused(root, UnsupportedError, "NVMe")


def test_a_parameter_that_no_file_holds(copy: Callable[[str], Path]) -> None:
    root = copy(ZERO3)
    for rank in (0, 1):
        path = tag(root) / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        edited(path, lambda value: value["frozen_param_shapes"].pop("blocks.1.down.bias"))
    refused(root, MergeError, r"blocks\.1\.down\.bias requires gradients but is in no param group")


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to every value in a nest."""
    out = [way] if way else []
    if isinstance(value, dict):
        for key, item in value.items():
            out += places(item, (*way, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            out += places(item, (*way, i))
    return out


STRANGE: tuple[Any, ...] = (
    None, -1, 10**30, 2.5, float("nan"), "x", "../x", b"x", True, [], [[]], [None], {}, {"x": 1}, {0: {}}, (), {1, 2},
    torch.ones(2, 3), torch.ones(()), torch.Size([3]), torch.float32, LossScaler(1.0),
)  # fmt: skip


@pytest.mark.parametrize("case", OPTIM)
@pytest.mark.parametrize("which", [OPTIM, MODEL])
def test_any_value_may_be_of_any_kind(copy: Callable[[str], Path], case: str, which: dict[str, str]) -> None:
    """Whatever stands where, what is raised says so on purpose; or what was read was not touched by it."""
    root = copy(case)
    path = tag(root) / which[case].format(0)
    original = torch.load(path, weights_only=False)
    random = Random(f"{case} {path.name}")
    ways = places(original)
    ways = [way for way in ways if len(way) < 4 or way[0] != "ds_config"]
    raised = 0
    for _ in range(40):
        way, strange = random.choice(ways), random.choice(STRANGE)
        value = copy_of(original)
        inner = value
        for key in way[:-1]:
            inner = inner[key]
        inner[way[-1]] = strange
        torch.save(value, path)
        try:
            open_source(root).checkpoint(None, frozenset())
        except DriftpointError:
            raised += 1
        except Exception as error:
            raise AssertionError(f"{way} = {strange!r} ends in {type(error).__name__}: {error}") from error
    assert raised > 10
