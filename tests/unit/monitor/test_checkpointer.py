"""The checkpointer in one process, on a real store: saving, resuming, refusing, and staying out of training's way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml

import monitor
from store.catalog import open_catalog
from store.errors import (
    ConfigError,
    DamagedError,
    ModelMismatchError,
    NewerFormatError,
    NothingToResumeError,
    StorageError,
    StoreInUseError,
    UnsupportedError,
)
from store.names import Unit
from store.schema import seal, unseal
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.jobs import LAYERS, Job, Model, job, same
from tests.support.launch import ENVIRONMENT


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def steps_of(store: Path) -> list[int]:
    return sorted(save.step for save in open_catalog(LocalFiles(store)).saves())


# ---- saving and resuming


def test_an_empty_store_resumes_at_0(store: Path) -> None:
    with job(store) as one:
        assert one.ckpt.resume() == 0
        assert one.ckpt.certificate is None


def test_what_was_saved_is_what_is_resumed(store: Path) -> None:
    with job(store) as one:
        for _ in range(3):
            one.step()
        saved = one.weights()
    with job(store) as other:
        assert not same(other.weights(), {key: saved[key] for key in other.weights()})
        assert other.ckpt.resume() == 3
        assert same(other.weights(), saved)
        assert other.ckpt.certificate is not None and other.ckpt.certificate.exact


def test_layers_are_named(store: Path) -> None:
    with job(store) as one:
        assert one.ckpt.layers == LAYERS


def test_decisions_come_every_so_many_steps(store: Path) -> None:
    with job(store, every=3) as one:
        reports = [one.step() for _ in range(7)]
    assert [report.step for report in reports if report is not None] == [3, 6]
    assert steps_of(store) == [3, 6]


def test_save_saves_now_and_everything(store: Path) -> None:
    with job(store, every=100, policy={"name": "parity", "k": 2}) as one:
        one.update()
        one.ckpt.step()
        report = one.ckpt.save(wait=True)
        assert report.skipped is None and report.saved is not None
        assert {unit.layer for unit in report.saved} == set(LAYERS)
        assert steps_of(store) == [1]
        assert one.metric("driftpoint_saves_total") == 1


def test_a_step_can_be_saved_twice(store: Path) -> None:
    """As when a signal asks for a full save in the very step that a partial one was made in."""
    with job(store, policy={"name": "parity", "k": 2}) as one:
        one.step()
        one.step()
        saved = one.weights()
        assert one.ckpt.save(wait=True).skipped is None
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 0
    with job(store) as other:
        assert other.ckpt.resume() == 2
        assert same(other.weights(), saved)
        assert other.ckpt.certificate is not None and other.ckpt.certificate.exact


def test_close_waits_for_the_save_under_way(store: Path) -> None:
    with job(store) as one:
        one.step(flush=False)
    assert steps_of(store) == [1]


FORGETFUL = """
import sys, time
from pathlib import Path
from tests.support.jobs import Job
job = Job(Path(sys.argv[1]))
job.hook().before = lambda operation, path: time.sleep(0.05) if operation == "write" else None
job.step(flush=False)
if sys.argv[2] == "error":
    raise RuntimeError("training went wrong")
"""


@pytest.mark.parametrize(("ending", "code"), [("end", 0), ("error", 1)])
def test_a_script_that_never_closes_keeps_its_last_save(store: Path, ending: str, code: int) -> None:
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", FORGETFUL, store, ending], env=environment, check=False)
    assert done.returncode == code
    assert steps_of(store) == [1]


def test_a_closed_checkpointer_says_so(store: Path) -> None:
    with job(store) as one:
        one.step()
    with pytest.raises(ConfigError, match="closed"):
        one.ckpt.step()
    with pytest.raises(ConfigError, match="closed"):
        one.ckpt.save()
    one.ckpt.close()


def test_a_resume_and_a_step_prove_the_commit(store: Path) -> None:
    with job(store) as one:
        one.step()
    with job(store, every=10) as other:
        other.ckpt.resume()
        other.ckpt.flush()
        assert open_catalog(LocalFiles(store)).proven() == set()
        other.step()
        assert {save.name for save in open_catalog(LocalFiles(store)).proven()} == {"00000001-000001"}


def test_retention_prunes(store: Path) -> None:
    with job(store, retention={"keep_last": 2, "log_spaced": False}) as one:
        for _ in range(5):
            one.step()
    assert steps_of(store) == [4, 5]
    assert sorted(path.name[:8] for path in (store / "segments").iterdir()) == ["00000004", "00000005"]


def test_parity_goes_on_with_its_turn_after_a_restart(store: Path) -> None:
    policy = {"name": "parity", "k": 2}
    with job(store, policy=policy) as one:
        first = [one.step() for _ in range(2)]
    with job(store, policy=policy, resume={"at": "newest"}) as other:
        other.ckpt.resume()
        second = [other.step() for _ in range(2)]
    saved = [sorted({unit.layer for unit in report.saved or ()}) for report in [*first, *second] if report]
    assert saved == [
        sorted(LAYERS),
        sorted(LAYERS[0::2]),
        sorted(LAYERS[1::2]),
        sorted(LAYERS[0::2]),
    ]


class Awkward(torch.nn.Module):
    """Tied weights, an empty parameter, one without dimensions, batch norm, and one that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.gain = torch.nn.Parameter(torch.tensor(1.0))
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) * self.gain


@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_an_awkward_model_comes_back(store: Path, staging: str) -> None:
    def made() -> tuple[Awkward, torch.optim.Optimizer, monitor.Checkpointer]:
        model = Awkward()
        optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
        settings = {"store": str(store), "every": 1, "metrics": {"enabled": False}, "staging": staging}
        return model, optimizer, monitor.attach((model, optimizer), settings)

    model, optimizer, ckpt = made()
    with ckpt:
        for _ in range(2):
            ckpt.flush()
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            ckpt.step()
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model, optimizer, ckpt = made()
    with ckpt:
        assert ckpt.resume() == 2
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, saved[name]), name
        assert model.unused not in optimizer.state
        assert optimizer.state[model.gain]["step"] == 2
        assert set(optimizer.state[model.gain]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


# ---- refusing


def test_forgetting_resume_is_an_error(store: Path) -> None:
    with job(store) as one:
        one.step()
    with job(store) as other:
        other.update()
        with pytest.raises(ConfigError, match="resume\\(\\) was not called"):
            other.ckpt.step()
        with pytest.raises(ConfigError, match="resume\\(\\) was not called"):
            other.ckpt.save()
    assert steps_of(store) == [1]


def test_another_models_store_is_refused_and_intact(store: Path) -> None:
    with job(store) as one:
        one.step()
        saved = one.weights()
    with job(store, width=9) as other:
        before = other.weights()
        with pytest.raises(ModelMismatchError, match=r"another model: other shapes .*: blocks\.0\.0\.bias"):
            other.ckpt.resume()
        assert same(other.weights(), before)
    with job(store) as third:
        assert third.ckpt.resume() == 1
        assert same(third.weights(), saved)


def test_parameters_of_other_names_are_told(store: Path) -> None:
    with job(store) as one:
        one.step()
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = monitor.attach((model, optimizer), {"store": str(store), "metrics": {"enabled": False}})
    with ckpt, pytest.raises(ModelMismatchError, match=r"only in the store: .*only in this model: 0\.bias, 0\.weight"):
        ckpt.resume()


def test_another_optimizer_is_refused(store: Path) -> None:
    with job(store) as one:
        one.step()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckpt = monitor.attach((model, optimizer), {"store": str(store), "metrics": {"enabled": False}})
    with ckpt, pytest.raises(ModelMismatchError, match="optimizer AdamW, this job has SGD"):
        ckpt.resume()


def test_another_number_of_state_objects_is_refused(store: Path) -> None:
    with job(store) as one:
        one.step()
    with job(store, state=[torch.Generator()]) as other:
        before = other.weights()
        with pytest.raises(ModelMismatchError, match="state of 0 objects"):
            other.ckpt.resume()
        now = other.weights()
        assert same({name: now[name] for name in before}, before)


def test_a_store_in_use_is_refused(store: Path) -> None:
    with job(store) as one:
        with pytest.raises(StoreInUseError, match="attached already in this process"):
            Job(store)
        one.step()
    with job(store) as after:
        assert after.ckpt.resume() == 1


def test_a_store_of_a_newer_format_is_refused(store: Path) -> None:
    with job(store) as one:
        one.step()
    path = store / "STORE.json"
    body = unseal(path.read_bytes(), "STORE.json")
    path.write_bytes(seal({**body, "format": 2, "reader": 2}))
    with pytest.raises(NewerFormatError, match="pip install --upgrade"):
        Job(store)


def test_no_commit_that_is_whole_is_an_error(store: Path) -> None:
    with job(store) as one:
        one.step()
    for path in (store / "manifests").iterdir():
        path.write_bytes(path.read_bytes()[:-2])
    with job(store) as other, pytest.raises(NothingToResumeError, match="driftpoint verify"):
        other.ckpt.resume()


def test_a_file_where_the_store_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match="file"):
        Job(tmp_path / "file")
    with pytest.raises(StorageError, match="file"):
        Job(tmp_path / "file" / "below")


def test_a_directory_with_other_things_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"not empty.*notes\.txt"):
        Job(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unknown_key_of_the_yaml_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text(yaml.safe_dump({"store": str(tmp_path / "store"), "evrey": 5}))
    model = Model()
    with pytest.raises(ConfigError, match="did you mean 'every'"):
        monitor.attach((model, torch.optim.AdamW(model.parameters())), path)
    assert not (tmp_path / "store").exists()


def test_state_without_state_dict_is_refused(store: Path) -> None:
    with pytest.raises(ConfigError, match=r"state\[1\] is a object without state_dict"):
        Job(store, state=[torch.Generator(), object()])
    assert not store.exists()


class Unstorable:
    """State that cannot be stored, from a chosen moment on."""

    def __init__(self, fine: int) -> None:
        self._fine = fine

    def state_dict(self) -> dict[str, object]:
        self._fine -= 1
        return {"n": 1} if self._fine >= 0 else {"rule": lambda step: step}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state == {"n": 1}


def test_state_that_cannot_be_stored_is_refused_at_once(store: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"\['user'\]\[0\]\['rule'\] is a builtins.function"):
        Job(store, state=[Unstorable(0)])
    assert not store.exists()


def test_state_that_cannot_be_stored_later_fails_the_save_not_the_training(store: Path) -> None:
    with job(store, state=[Unstorable(2)]) as one:
        for _ in range(3):
            one.step()
        assert one.metric("driftpoint_failures_total", reason="UnsupportedError") == 1
    assert steps_of(store) == [1]


# ---- trouble with storage while training


def full(operation: str, path: str) -> None:
    if operation == "write":
        raise StorageError(f"cannot write {path}: the filesystem is full")


def test_a_failed_save_leaves_nothing_behind(store: Path) -> None:
    with job(store) as one:
        one.step()
        files = one.hook()
        files.before = lambda operation, path: full(operation, path) if path.endswith("rank-00000.json") else None
        one.step()
        one.step()
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 1
        files.before = lambda operation, path: None
        one.ckpt.flush()
        one.step()
        assert sorted(path.name[:8] for path in (store / "segments").iterdir()) == ["00000001", "00000004"]


def test_a_commit_in_doubt_keeps_its_segments(store: Path) -> None:
    """The manifest has its name, and then the directory could not be synced: nobody was told, but it may stand."""

    def unsynced(operation: str, path: str) -> None:
        if operation == "sync_dir" and path == "manifests" and (store / "manifests/00000002-000001.json").exists():
            raise StorageError("cannot fsync manifests: the device reported an I/O error")

    with job(store) as one:
        one.step()
        files = one.hook()
        files.before = unsynced
        one.step()
        files.before = lambda operation, path: None
        one.update()
        one.ckpt.step()
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 1
        saved = one.weights()
    assert steps_of(store) == [1, 2, 3]
    with job(store) as other:
        assert other.ckpt.resume() == 3
        assert same(other.weights(), saved)
    assert all(commit.state == "ok" for commit in verify(open_catalog(LocalFiles(store))).commits)


@pytest.mark.parametrize("method", ["exact", "sketch"])
@pytest.mark.parametrize("policy", ["full", {"name": "threshold", "threshold": 0.0}])
def test_a_full_disk_costs_the_save_not_the_training(store: Path, policy: object, method: str) -> None:
    with job(store, policy=policy, drift={"method": method}) as one:
        one.step()
        files = one.hook()
        files.before = full
        for _ in range(3):
            report = one.step()
            assert report is not None and report.skipped is None
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 2
        files.before = lambda operation, path: None
        one.step()
        saved = one.weights()
    assert steps_of(store) == [1, 5]
    with job(store) as other:
        assert other.ckpt.resume() == 5
        assert same(other.weights(), saved)


def test_references_stay_when_a_save_fails(store: Path) -> None:
    """Drift is the distance to what is committed, however many saves failed since."""
    with job(store, policy={"name": "threshold", "threshold": 1e9}, drift={"method": "exact"}) as one:
        one.step()
        committed = one.weights()
        files = one.hook()
        files.before = full
        assert _skipped(one.step()) == "nothing"
        one.ckpt.save(wait=True)
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 1
        report = one.step()
        assert report is not None
        drift = {stat.unit: stat.drift for stat in report.stats}
        now = one.weights()
    for layer in LAYERS:
        names = [name for name in now if name.startswith(f"{layer}.") and name.endswith("/fp32")]
        moved = sum((now[name] - committed[name]).double().square().sum() for name in names)
        size = sum(committed[name].double().square().sum() for name in names)
        assert drift[Unit(layer, "fp32")] == pytest.approx(float((moved / size) ** 0.5), rel=1e-5)


def test_training_does_not_wait_for_a_disk_that_hangs(store: Path) -> None:
    go_on = threading.Event()
    with job(store, timeouts={"close": 0.2}) as one:
        one.step()
        assert one.ckpt._saver.wait(180)  # flush() waits for 0.2 s, and the disk may be slower
        files = one.hook()
        files.before = lambda operation, path: None if operation != "write" else _wait(go_on)
        assert _skipped(one.step(flush=False)) is None
        assert [_skipped(one.step(flush=False)) for _ in range(5)] == ["busy"] * 5
        assert one.metric("driftpoint_saves_skipped_total", reason="busy") == 5
        one.ckpt.close()
        assert one.metric("driftpoint_failures_total", reason="close_timeout") == 1
        assert steps_of(store) == [1]
        go_on.set()
    with job(store) as other:
        assert other.ckpt.resume() in (1, 2)


def _wait(event: threading.Event) -> None:
    assert event.wait(180)


def _skipped(report: monitor.StepReport | None) -> str | None:
    assert report is not None
    return report.skipped


def test_marking_proven_fails_without_harm(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job(store) as one:
        one.step()
    with job(store, every=10) as other:
        other.ckpt.resume()
        other.hook().before = full
        other.step()
        assert other.metric("driftpoint_failures_total", reason="upkeep") == 1
    assert "marking the commit proven failed" in caplog.text
    assert open_catalog(LocalFiles(store)).proven() == set()


def test_pruning_fails_without_harm(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stuck(operation: str, path: str) -> None:
        if operation == "unlink" and path.startswith("manifests/0"):
            raise StorageError(f"cannot unlink {path}: the device reported an I/O error")

    with job(store, retention={"keep_last": 1, "log_spaced": False}) as one:
        one.step()
        one.hook().before = stuck
        one.step()
        one.step()
        assert one.metric("driftpoint_failures_total", reason="upkeep") == 2
        assert one.metric("driftpoint_last_commit_step") == 2
    assert "tidying up after the commit of step 2 failed: pruning stopped" in caplog.text
    assert steps_of(store) == [1, 2, 3]


# ---- health


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("policy", ["full", {"name": "threshold", "threshold": 0.0}])
def test_a_layer_with_broken_values_never_replaces_a_good_one(store: Path, policy: object, broken: float) -> None:
    with job(store, policy=policy) as one:
        one.step()
        good = one.weights()
        one.update()
        with torch.no_grad():
            one.model.blocks[1][0].weight[0, 0] = broken
        one.ckpt.step()
        one.ckpt.flush()
        then = one.weights()
    with job(store) as other:
        assert other.ckpt.resume() == 2
        assert other.ckpt.certificate is not None and not other.ckpt.certificate.exact
        for name, tensor in other.weights().items():
            expected = good if name.startswith("blocks.1.") else then
            assert torch.equal(tensor, expected[name]), name


def test_broken_values_in_the_first_save_withhold_it(store: Path) -> None:
    with job(store, policy={"name": "threshold", "threshold": 0.0}) as one:
        one.update()
        with torch.no_grad():
            one.model.head.bias[0] = float("nan")
        report = one.ckpt.step()
        assert report is not None and report.skipped == "withheld"
        assert one.metric("driftpoint_saves_skipped_total", reason="withheld") == 1
    assert steps_of(store) == []


def test_broken_values_in_the_first_full_save_fail_it(store: Path) -> None:
    with job(store) as one:
        one.update()
        with torch.no_grad():
            one.model.head.bias[0] = float("nan")
        one.ckpt.step()
    assert one.metric("driftpoint_failures_total", reason="NotFiniteError") == 1
    assert steps_of(store) == []


# ---- models that change while they train


@pytest.mark.parametrize("method", ["exact", "sketch"])
@pytest.mark.parametrize("policy", ["full", {"name": "threshold", "threshold": 1e9}])
def test_a_layer_unfrozen_on_the_way_is_saved(store: Path, policy: object, method: str) -> None:
    one = Job(store, policy=policy, drift={"method": method})
    one.model.blocks[1].requires_grad_(False)
    with one.ckpt:
        one.step()
        one.model.blocks[1].requires_grad_(True)
        report = one.step()
        assert report is not None and report.skipped is None
        saved = one.weights()
    with job(store) as other:
        assert other.ckpt.resume() == 2
        resumed = other.weights()
    for name in saved:
        if name.startswith("blocks.1."):
            assert torch.equal(resumed[name], saved[name])


@pytest.mark.parametrize("method", ["exact", "sketch"])
def test_a_bias_that_appears_changes_the_unit_and_forces_a_save(store: Path, method: str) -> None:
    one = Job(store, policy={"name": "threshold", "threshold": 1e9}, drift={"method": method})
    bias = one.model.head.bias
    bias.requires_grad_(False)
    with one.ckpt:
        one.step()
        assert _skipped(one.step()) == "nothing"
        bias.requires_grad_(True)
        report = one.step()
        assert report is not None and report.saved is not None
        assert Unit("head", "fp32") in report.saved
        assert _skipped(one.step()) == "nothing"


# ---- damage found on the way back


def test_a_flipped_byte_makes_one_unit_fall_back(store: Path) -> None:
    states = {}
    with job(store) as one:
        for step in (1, 2):
            one.step()
            states[step] = one.weights()
    _flip(store, Unit("blocks.1", "exp_avg"), "00000002-000001")
    with job(store) as other:
        assert other.ckpt.resume() == 2
        certificate = other.ckpt.certificate
        assert certificate is not None and not certificate.exact
        fallen = [(unit.layer, unit.slot, unit.step) for unit in certificate.units if unit.fallback]
        assert fallen == [("blocks.1", "exp_avg", 1)]
        assert any("blocks.1/exp_avg" in problem for problem in certificate.problems)
        assert other.metric("driftpoint_resume_fallback_units") == 1
        for name, tensor in other.weights().items():
            fell = name.startswith("blocks.1.") and name.endswith("/exp_avg")
            assert torch.equal(tensor, states[1 if fell else 2][name]), name
        other.step()
    assert verify(open_catalog(LocalFiles(store))).commits


def _flip(store: Path, unit: Unit, save: str) -> None:
    catalog = open_catalog(LocalFiles(store))
    found = next(one for one in catalog.saves() if one.name == save)
    part = catalog.group(found, catalog.manifest(found).groups[save]).parts[0]
    entry = next(entry for entry in part.entries if entry.unit == unit)
    path = store / "segments" / save / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[part.header_bytes + entry.offset] ^= 1
    path.write_bytes(data)


def test_a_damaged_store_record_is_told(store: Path) -> None:
    with job(store) as one:
        one.step()
    path = store / "STORE.json"
    path.write_bytes(path.read_bytes().replace(b"store_id", b"store_iD"))
    with pytest.raises(DamagedError, match=r"STORE\.json"):
        Job(store)


# ---- observe


def test_observe_writes_nothing_and_tells_what_it_would_save(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="driftpoint")
    with job(store, policy={"name": "observe", "inner": {"name": "parity", "k": 2}}) as one:
        assert one.ckpt.resume() == 0
        reports = [one.step() for _ in range(3)]
        assert one.ckpt.save(wait=True).skipped == "observe"
    assert not store.exists()
    assert [_skipped(report) for report in reports] == ["observe"] * 3
    layers = [sorted({unit.layer for unit in report.saved or ()}) for report in reports if report]
    assert layers == [sorted(LAYERS), sorted(LAYERS[0::2]), sorted(LAYERS[1::2])]
    assert "would have saved 15 of 15 layer slots" in caplog.text
    assert one.metric("driftpoint_observed_saves_total") == 4
    assert one.metric("driftpoint_saves_total") == 0
    drift = {one.unit: one.drift for one in reports[2].stats} if reports[2] else {}
    assert all(value is not None and value > 0 for value in drift.values())


def test_observe_reads_an_existing_store_and_leaves_it_alone(store: Path) -> None:
    with job(store) as one:
        one.step()
        saved = one.weights()
    before = sorted((str(path), path.stat().st_mtime_ns) for path in store.rglob("*"))
    with job(store, policy={"name": "observe"}) as other:
        assert other.ckpt.resume() == 1
        assert same(other.weights(), saved)
        other.step()
    assert sorted((str(path), path.stat().st_mtime_ns) for path in store.rglob("*")) == before
