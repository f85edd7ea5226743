"""Whole merges of stores as plain PyTorch writes them: what is rebuilt, what is reported, and what is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor
from merger.io.output_dir import CERTIFICATE
from merger.layouts.base import Target
from merger.merge import merge
from merger.plan import Request, open_request, plan_merge
from store.errors import MergeError, NoStoreError, NothingToResumeError, StorageError, UnsupportedError, UsageError
from store.names import SaveId, Unit
from tests.support.jobs import Job
from tests.support.plain_stores import PlainStore, digest_of, rebuilt, same
from tests.support.slow import others_slow
from tests.support.stores import FakeLayer, flip_byte

ROOT = Path(__file__).parents[3]


def damage(store: PlainStore, save: SaveId, unit: Unit, rank: int = 0) -> None:
    """Flip a byte of a unit's fragment on a rank."""
    from store.segment import read_part

    part = read_part(store.files, store.store_id, save, rank)
    entry = next(entry for entry in part.entries if entry.unit == unit)
    flip_byte(store.payload(save, rank), part.header_bytes + entry.offset)


def siblings(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if path.name != "store")


def test_a_full_save(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    before = digest_of(store.root)
    told: list[int] = []
    result = merge(store.root, tmp_path / "out", progress=told.append)
    assert same(rebuilt(tmp_path / "out"), store.expected(10))
    assert (result.tag, result.problems, result.certificate.exact) == ("step10", (), True)
    assert sum(told) == sum(12 * layer.numel for layer in store.layers)
    assert result.bytes_written == sum(path.stat().st_size for path in result.out.iterdir())
    assert digest_of(store.root) == before
    assert siblings(tmp_path / "out") == ["out"]


def test_the_optimizer_takes_its_state_dict(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    merge(store.root, tmp_path / "out")
    parameters = [torch.nn.Parameter(torch.zeros(layer.numel)) for layer in store.layers]
    optimizer = torch.optim.AdamW(parameters)
    optimizer.load_state_dict(torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.75)
    for parameter, layer in zip(parameters, store.layers, strict=True):
        state = optimizer.state[parameter]
        assert state["step"].item() == 10
        assert state["exp_avg"].numpy().tobytes() == store.values(Unit(layer.name, "exp_avg"), 10).tobytes()


def test_the_rest_of_the_run_state(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    merge(store.root, tmp_path / "out")
    extra = torch.load(tmp_path / "out" / "extra.pt", weights_only=True)
    assert (extra["save"], extra["step"]) == ("00000010-000001", 10)
    assert [extra["ranks"][rank]["user"] for rank in (0, 1)] == [
        [{"rank": rank, "names": {"a", "b"}}] for rank in (0, 1)
    ]
    kind, words, position = extra["ranks"][1]["rng"]["numpy"]
    assert (kind, words.tolist(), words.dtype, position) == ("MT19937", [0, 1, 2, 3], torch.uint32, 3)


@pytest.mark.parametrize("layout", ["torch", "dcp"])
@pytest.mark.parametrize("named", [True, False])
def test_objects_of_the_script_are_named_as_in_state(tmp_path: Path, layout: str, named: bool) -> None:
    schedule, loop = monitor.LoopState(at=3), monitor.LoopState(values=torch.arange(4.0), best=0.5)
    job = Job(tmp_path / "store", {"schedule": schedule, "{loop}": loop} if named else [schedule, loop])  # type: ignore[arg-type]
    job.step()
    job.ckpt.close()
    request = Request(tmp_path / "store", target=Target(layout))
    plan = plan_merge(open_request(request), request)
    out = merge(tmp_path / "store", tmp_path / "out", target=Target(layout)).out
    own = torch.load(out / "extra.pt", weights_only=True)["ranks"][0]
    assert [one.keys() for one in own["user"]] == [{"at"}, {"values", "best"}]
    assert list(own["state"]) == (["schedule", "{loop}"] if named else [])
    namespace: dict[str, Any] = {"torch": torch}
    exec(next(line for line in plan.load(out) if "extra.pt" in line), namespace)
    monitor.LoopState.load_state_dict(loop, namespace["objects"]["{loop}" if named else 1])
    assert loop.best == 0.5 and torch.equal(loop.values, torch.arange(4.0))


def test_a_composite_holds_what_its_certificate_names(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    store.save(20, layers=("layers.0",), drift=0.5)
    result = merge(store.root, tmp_path / "out")
    steps = {Unit(unit.layer, unit.slot): unit.step for unit in result.certificate.units}
    assert steps == {unit: 20 if unit.layer == "layers.0" else 10 for unit in store.units}
    assert same(rebuilt(result.out), store.expected(steps))
    document = json.loads((result.out / CERTIFICATE).read_text())
    assert (document["exact"], document["step"], document["max_staleness"], document["max_drift"]) == (
        False,
        20,
        10,
        0.5,
    )
    assert len(document["units"]) == len(store.units)


def test_frozen_layers(tmp_path: Path) -> None:
    store = PlainStore(tmp_path / "store", layers=[FakeLayer("one", 20), FakeLayer("two", 30, frozen=True)])
    store.save(10)
    store.save(20)
    result = merge(store.root, tmp_path / "out")
    model = torch.load(result.out / "model.pt", weights_only=True)
    assert model["two.weight"].numpy().tobytes() == store.values(Unit("two", "frozen"), 10).tobytes()
    assert model["one.weight"].numpy().tobytes() == store.values(Unit("one", "fp32"), 20).tobytes()
    assert result.certificate.exact


def test_damaged_units_fall_back_each_to_its_own_version_before(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    newest = store.save(20)
    hurt = {Unit("layers.1", "fp32"), Unit("lm_head", "exp_avg_sq")}
    for unit in hurt:
        damage(store, newest, unit, rank=1)
    result = merge(store.root, tmp_path / "out")
    assert same(rebuilt(result.out), store.expected({u: 10 if u in hurt else 20 for u in store.units}))
    assert {Unit(unit.layer, unit.slot) for unit in result.certificate.units if unit.fallback} == hurt
    assert not result.certificate.exact and result.certificate.max_drift is None
    for unit in hurt:
        assert any(f"{unit} of save 00000020-000001" in problem for problem in result.problems)
    assert siblings(result.out) == ["out"]


def test_a_unit_damaged_in_every_version_leaves_nothing_behind(store: PlainStore, tmp_path: Path) -> None:
    saves = [store.save(10), store.save(20)]
    for save in saves:
        damage(store, save, Unit("norm", "fp32"))
    with pytest.raises(NothingToResumeError, match="norm/fp32 has no version that is whole"):
        merge(store.root, tmp_path / "out")
    with pytest.raises(MergeError, match=r"00000020-000001 cannot be rebuilt: norm/fp32 has no version that is whole"):
        merge(store.root, tmp_path / "out", save=saves[1])
    assert siblings(tmp_path / "out") == []


def test_no_store_and_an_empty_one(store: PlainStore, tmp_path: Path) -> None:
    with pytest.raises(NothingToResumeError):
        merge(store.root, tmp_path / "out")
    with pytest.raises(NoStoreError):
        merge(tmp_path, tmp_path / "out")
    assert siblings(tmp_path / "out") == []


def test_another_framework_is_refused_by_name(tmp_path: Path) -> None:
    store = PlainStore(tmp_path / "store", framework="megatron")
    store.save(10)
    with pytest.raises(UnsupportedError, match="'megatron'"):
        merge(store.root, tmp_path / "out")


def test_a_deepspeed_store_without_its_layout_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    store = PlainStore(tmp_path / "store", framework="deepspeed")
    store.save(10)
    with pytest.raises(MergeError, match="ds_version"):
        merge(store.root, tmp_path / "out")


@pytest.mark.slow
def test_a_deepspeed_store_where_there_is_no_deepspeed(tmp_path: Path) -> None:
    store = PlainStore(tmp_path / "store", framework="deepspeed")
    store.save(10)
    code = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from pathlib import Path; from merger.merge import merge; from store.errors import UnsupportedError\n"
        "try: merge(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except UnsupportedError as error: sys.exit(str(error))"
    )
    command = [sys.executable, "-c", code, str(store.root), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, env=environment, timeout=180, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'driftpoint[deepspeed]'" in done.stderr
    assert siblings(tmp_path / "out") == []


@pytest.mark.parametrize("taken", ["file", "directory", "link"])
def test_nothing_is_replaced(store: PlainStore, tmp_path: Path, taken: str) -> None:
    store.save(10)
    out = tmp_path / "out"
    if taken == "file":
        out.write_text("mine")
    elif taken == "directory":
        out.mkdir()
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="already exists, and is never overwritten"):
        merge(store.root, out)


def test_the_output_is_not_put_into_the_store(store: PlainStore) -> None:
    store.save(10)
    before = digest_of(store.root)
    with pytest.raises(UsageError, match="inside the source"):
        merge(store.root, store.root / "deeper" / "out")
    assert digest_of(store.root) == before


def test_missing_parents_are_made(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    assert merge(store.root, tmp_path / "a" / "b" / "out").out == tmp_path / "a" / "b" / "out"


KILLED = """
import os, signal, sys
from pathlib import Path
from merger.merge import merge
left = [int(sys.argv[3])]
def progress(count):
    left[0] -= count
    if left[0] <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
merge(Path(sys.argv[1]), Path(sys.argv[2]), progress=progress)
"""


@pytest.mark.parametrize("after", others_slow([1, 2000]))
def test_a_killed_merge_leaves_a_temporary_name_only_and_the_next_one_removes_it(
    store: PlainStore, tmp_path: Path, after: int
) -> None:
    store.save(10)
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(store.root), str(out), str(after)]
    done = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=180)
    assert done.returncode == -signal.SIGKILL
    (left,) = siblings(out)
    assert left.startswith(".driftpoint-merge-") and left.endswith("-out")
    merge(store.root, tmp_path / "other")
    assert left in siblings(out)
    merge(store.root, out)
    assert siblings(out) == ["other", "out"]
    assert same(rebuilt(out), store.expected(10))


def test_a_merge_at_work_is_left_alone(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    busy = tmp_path / ".driftpoint-merge-0123456789ab-out"
    busy.mkdir()
    descriptor = os.open(busy, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another merge or import is writing to"):
            merge(store.root, tmp_path / "out")
        assert siblings(tmp_path / "out") == [busy.name]
    finally:
        os.close(descriptor)
    merge(store.root, tmp_path / "out")
    assert siblings(tmp_path / "out") == ["out"]


def test_a_failure_on_the_way_leaves_nothing_behind(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)

    class Stop(Exception):
        pass

    def progress(count: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        merge(store.root, tmp_path / "out", progress=progress)
    assert siblings(tmp_path / "out") == []


FULL = """
import resource, signal, sys
from pathlib import Path
from merger.merge import merge
from store.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    merge(Path(sys.argv[1]), Path(sys.argv[2]))
except StorageError as error:
    sys.exit(f"StorageError: {error}")
"""


@pytest.mark.slow
def test_a_storage_that_refuses_is_told_and_leaves_nothing_behind(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    command = [sys.executable, "-c", FULL, str(store.root), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, env=environment, timeout=180, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("StorageError: cannot write")
    assert siblings(tmp_path / "out") == []


def test_a_parent_that_is_a_file_is_told(store: PlainStore, tmp_path: Path) -> None:
    store.save(10)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=str(tmp_path / "file")):
        merge(store.root, tmp_path / "file" / "out")
