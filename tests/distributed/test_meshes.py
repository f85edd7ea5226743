"""What one mesh saved, every other resumes to the last bit, and a merge writes for stock code: real torchrun, gloo."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.layouts.base import Target
from merger.merge import MergeResult, merge
from store.catalog import open_catalog
from store.errors import NothingToResumeError
from store.names import payload_path
from store.resolve import resolve
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.launch import Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LLAMAS = (
    "ddp",
    "fsdp",
    "fsdp-columns",
    "descending",
    "hsdp",
    "tp",
    "fsdp-tp",
    "hsdp-tp",
    "pp",
    "zero1",
    "zero2",
    "zero3",
)
MIXTURES = ("moe-ddp", "ep", "moe-zero1", "moe-zero2", "moe-zero3")
PAIRS = [
    *((case, case) for case in (*LLAMAS, *MIXTURES)),
    *((case, LLAMAS[(number + shift) % len(LLAMAS)]) for number, case in enumerate(LLAMAS) for shift in (4,)),
    *(pair for pair in (("fsdp-tp", "pp"), ("pp", "fsdp-tp"))),
    *(pair for case in MIXTURES if case != "ep" for pair in ((case, "ep"), ("ep", case))),
]
"""(saved by, resumed by): each on itself, and on some of the others; all pairs take minutes."""
KILLED = [(f"killed-{case}", case) for case in ("ddp", "fsdp", "hsdp", "tp", "fsdp-tp", "pp", "ep")]
MERGED = ("ddp", "fsdp", "fsdp-columns", "hsdp", "tp", "fsdp-tp", "pp", "ep")
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
STOCK: list[tuple[str, int, dict[str, Any]]] = [
    *((case, stage, {}) for case in ("fsdp-tp", "pp") for stage in (1, 2, 3)),
    *((case, number % 3 + 1, {}) for number, case in enumerate(MERGED) if case not in ("fsdp-tp", "pp")),
    ("pp", 1, BF16),
    ("fsdp-tp", 3, BF16),
]
"""(saved by, ZeRO stage that stock DeepSpeed loads it at on 2 ranks, more of its configuration)."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def saved(directory: Path) -> Launched:
    pytest.importorskip("deepspeed")
    done = torchrun("meshes.py", 4, {"pairs": []}, directory)
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.fixture(scope="module")
def resumed(directory: Path, saved: Launched) -> Launched:
    died = torchrun("meshes.py", 4, {"kill": True, "pairs": []}, directory, restarts=len(KILLED))
    assert died.code == 0 and "AssertionError" not in died.output, died.output[-6000:]
    done = torchrun("meshes.py", 4, {"pairs": [*dict.fromkeys(PAIRS), *KILLED]}, directory)
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.fixture(scope="module")
def universal(directory: Path, saved: Launched) -> dict[str, MergeResult]:
    del saved
    return {case: merge(directory / case, directory / f"u-{case}", target=Target("universal")) for case in MERGED}


@pytest.fixture(scope="module")
def stock(directory: Path, universal: dict[str, MergeResult]) -> Launched:
    cases = [(case, stage, universal[case].load, more) for case, stage, more in STOCK]
    done = torchrun("meshes.py", 2, {"stock": cases, "pairs": []}, directory)
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.mark.parametrize(("source", "target"), [*dict.fromkeys(PAIRS), *KILLED])
def test_every_mesh_resumes_what_another_saved(source: str, target: str, saved: Launched, resumed: Launched) -> None:
    ranks = resumed.of("resumed", source=source, target=target)
    assert [(one["step"], one["exact"], one["wrong"]) for one in ranks] == [(2, True, [])] * 4
    if source.removeprefix("killed-") == target:  # killed inside its second save, or not
        losses = {one["rank"]: one["losses"] for one in saved.of("trained", case=target)}
        assert {one["rank"]: one["losses"] for one in ranks} == losses


def test_a_damaged_box_is_found_and_never_loaded(directory: Path, saved: Launched, tmp_path: Path) -> None:
    del saved
    store = Path(shutil.copytree(directory / "tp", tmp_path / "tp"))
    catalog = open_catalog(LocalFiles(store))
    (version,) = {version.save for version in resolve(catalog, catalog.saves()[0]).versions.values()}
    parts = catalog.group(version, catalog.manifest(version).groups[version.name]).parts
    part, entry = next((part, entry) for part in parts.values() for entry in part.entries if entry.box is not None)
    with (store / payload_path(version, part.rank)).open("r+b") as file:
        file.seek(part.header_bytes + entry.offset + entry.nbytes // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    assert not verify(open_catalog(LocalFiles(store))).ok
    with pytest.raises(NothingToResumeError, match=entry.layer):
        merge(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_share_is_the_part_of_the_full_tensor_that_a_rank_has(saved: Launched) -> None:
    assert [one["misplaced"] for one in saved.of("shares")] == [[]] * 4


@pytest.mark.parametrize("case", MERGED)
def test_a_merge_writes_what_stock_code_loads(
    case: str, directory: Path, universal: dict[str, MergeResult], tmp_path: Path
) -> None:
    from meshes import llama
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole: dict[str, list[torch.Tensor]] = torch.load(directory / f"{case}.pt", weights_only=True)
    (model := llama(1)).save_pretrained(tmp_path / "model")
    merge(directory / case, tmp_path / "hf", target=Target("hf", files=tmp_path / "model"))
    weights = dict(chain.from_iterable(load_file(file).items() for file in (tmp_path / "hf").glob("*.safetensors")))
    if case != "ep":  # transformers has no such model
        weights = type(model).from_pretrained(tmp_path / "hf").state_dict()
    assert {name: torch.equal(weights[name], found[0]) for name, found in whole.items()} == dict.fromkeys(whole, True)
    for source in (directory / case, universal[case].out):
        out = tmp_path / f"dcp-{source.name}"
        assert merge(source, out, target=Target("dcp")).certificate.whole
        dcp_to_torch_save(out, tmp_path / "dcp.pt")
        loaded: Any = torch.load(tmp_path / "dcp.pt", weights_only=True)
        for name, (weight, *moments) in whole.items():
            state = loaded["optim"]["state"][name]
            assert torch.equal(loaded["model"][name], weight) and state["step"] == 2
            assert all(map(torch.equal, (state["exp_avg"], state["exp_avg_sq"]), moments))


@pytest.mark.parametrize("number", range(len(STOCK)), ids=[f"{case}-zero{stage}" for case, stage, _ in STOCK])
def test_stock_deepspeed_loads_what_a_mesh_saved(number: int, saved: Launched, stock: Launched) -> None:
    """Weights, master weights, moments and steps bit for bit, into the engine's own configuration."""
    case, _, more = STOCK[number]
    ranks = stock.of("stock", number=number)
    assert [(one["wrong"], one["steps"], one["counters"]) for one in ranks] == [([], [2.0], [2, 2 * 2 * 2, 1e-2])] * 2
    assert {one["dtype"] for one in ranks} == {"torch.bfloat16" if more else "torch.float32"}
    if case in ("fsdp-tp", "pp") and not more:  # two data ranks, as here; a pipeline's loss is of two micro-batches
        first, spacing, batches = (2, 1, 2) if case == "pp" else (0, 2, 1)
        losses = {one["rank"]: one["losses"] for one in saved.of("trained", case=case)}
        for one in ranks:
            was = [loss / batches for loss in losses[first + spacing * one["rank"]]]
            assert one["losses"] == pytest.approx(was, rel=1e-4)


@pytest.mark.parametrize("layout", ["deepspeed", "universal"])
def test_deepspeed_loads_what_an_engine_and_a_mesh_saved(layout: str, resumed: Launched) -> None:
    for one in resumed.of("mixed", layout=layout):
        assert one["wrong"] == []
    assert resumed.one("mixed", layout=layout, rank=0)["boxes"] > 0
