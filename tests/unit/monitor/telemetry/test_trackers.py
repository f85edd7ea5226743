"""Trackers get the numbers that Prometheus gets: TensorBoard, Weights & Biases and MLflow, in their offline modes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitor.telemetry.metrics import Metrics
from tests.support.jobs import LAYERS, Job, job


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path / "store", every=2, policy={"name": "parity", "k": 2}) as one:
        assert one.ckpt.resume() == 0
        for _ in range(4):
            one.step()
        yield one


def test_all_that_prometheus_gets(trained: Job) -> None:
    values = trained.ckpt.metrics.scalars()
    assert values["driftpoint_step"] == 4 and values["driftpoint_last_commit_step"] == 2  # of 4 a job learns later
    drift = {layer: values[f"driftpoint_layer_drift_ratio/{layer}/fp32"] for layer in LAYERS}
    assert drift == {one: trained.metric("driftpoint_layer_drift_ratio", layer=one, slot="fp32") for one in LAYERS}
    assert max(drift.values()) > 0
    assert values["driftpoint_save_duration_seconds_count"] == 1 and values["driftpoint_saves_skipped_total/busy"] == 0
    read = [sample for family in trained.registry.collect() for sample in family.samples]
    assert len(values) == sum(not one.name.endswith(("_bucket", "_created")) for one in read)
    assert all(type(value) is float for value in values.values())


def test_other_ranks_have_none() -> None:
    assert Metrics(rank=1).scalars() == {}


def test_tensorboard(trained: Job, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    values = trained.ckpt.metrics.scalars()
    with SummaryWriter(str(tmp_path / "runs")) as writer:
        for name, value in values.items():
            writer.add_scalar(name, value, 4)
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == values.keys()
    for name, value in values.items():
        (event,) = events.Scalars(name)
        assert event.step == 4 and event.value == pytest.approx(value, rel=1e-6)


def test_wandb(trained: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    values = trained.ckpt.metrics.scalars()
    with wandb.init(mode="offline", project="test", dir=tmp_path, settings=wandb.Settings(silent=True)) as run:
        run.log(values, step=4)
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert _wandb_history(written) == {"_step": 4, **values}


def _wandb_history(path: Path) -> dict[str, float]:
    from wandb.proto import wandb_internal_pb2

    found = {}
    for data in _log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            found["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return {name: value for name, value in found.items() if name == "_step" or not name.startswith("_")}


def _log_records(data: bytes, block: int = 1 << 15) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, which W&B's offline runs are, after a header of their own."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_mlflow(trained: Job, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    values = trained.ckpt.metrics.scalars()
    with mlflow.start_run() as run:
        mlflow.log_metrics(values, step=4)
    stored = mlflow.tracking.MlflowClient().get_run(run.info.run_id)
    assert stored.data.metrics == values
    assert [
        one.step for one in mlflow.tracking.MlflowClient().get_metric_history(run.info.run_id, "driftpoint_step")
    ] == [4]
