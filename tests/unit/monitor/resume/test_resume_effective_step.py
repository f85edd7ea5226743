"""A composite goes on at its effective step: everything but the weights is, to the bit, what it was at that save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import monitor
from monitor.observe.layers import find_layers
from store.catalog import Catalog, open_catalog
from store.certificate import certify
from store.errors import ModelMismatchError
from store.names import SaveId, part_path, payload_path
from store.resolve import newest_resumable
from store.retention import Retention, plan_prune
from store.segment import read_part
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.jobs import Model

Seen = Mapping[str, Any]


class Loader:
    """Batches from a generator of its own; where it stands is its state."""

    def __init__(self) -> None:
        self.position = 0

    def batch(self) -> torch.Tensor:
        self.position += 1
        made = torch.randn(4, 3, generator=torch.Generator().manual_seed(self.position))
        return made * float(1 + np.random.rand() / 10)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class Run:
    """A job of plain torch with dropout, a schedule and a loader; :attr:`seen` is all of it after every step."""

    def __init__(self, store: Path, seed: int = 1, **settings: Any) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        self.model, self.loader = Model(), Loader()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)
        values = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **settings}
        self.ckpt = monitor.attach((self.model, self.optimizer), values, state=[self.schedule, self.loader])
        self.seen: dict[int, Seen] = {}

    def train(self, first: int, last: int) -> None:
        """Steps ``first`` + 1 to ``last``, each with its save committed."""
        for step in range(first, last):
            report = self.advance()
            assert report is not None and report.step == step + 1 and report.skipped is None, report
            self.seen[step + 1] = self.look()

    def advance(self) -> monitor.StepReport | None:
        """One step and what was decided; its save, if there is one, is committed."""
        loss = self.model(self.loader.batch()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        report = self.ckpt.step()
        self.ckpt.flush()
        return report

    def look(self) -> Seen:
        """What a resume has to bring back besides tensors, and the tensors."""
        return {
            "last_epoch": self.schedule.last_epoch,
            "lr": self.optimizer.param_groups[0]["lr"],
            "steps": {name: float(self.optimizer.state[p]["step"]) for name, p in self.model.named_parameters()},
            "position": self.loader.position,
            "torch": torch.get_rng_state().tolist(),
            "numpy": np.random.get_state()[1].tolist(),  # type: ignore[union-attr]
            "tensors": self.tensors(),
        }

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        found = {(name, "fp32"): p.detach().clone() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            found |= {(name, slot): self.optimizer.state[p][slot].clone() for slot in ("exp_avg", "exp_avg_sq")}
        return found

    def layer(self, name: str) -> str:
        return next(layer.name for layer in find_layers(self.model, self.seen_names()) if name in layer.fqns)

    def seen_names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def metric(self, name: str) -> float | None:
        return self.ckpt.metrics.registry.get_sample_value(name)


@contextmanager
def run(store: Path, **settings: Any) -> Iterator[Run]:
    made = Run(store, **settings)
    try:
        yield made
    finally:
        made.ckpt.close(save=False)


def parity(k: int, **settings: Any) -> dict[str, Any]:
    return {"policy": {"name": "parity", "k": k}, **settings}


def trained(store: Path, k: int, steps: int, **settings: Any) -> dict[int, Seen]:
    """The states of a job that trained ``steps`` and then died."""
    with run(store, **parity(k, **settings)) as one:
        assert one.ckpt.resume() == 0
        one.train(0, steps)
        return one.seen


def catalog_of(store: Path) -> Catalog:
    return open_catalog(LocalFiles(store))


def nearest(store: Path) -> list[int]:
    """The steps that the newest commit is made of, from its effective step on. Not by the code under test."""
    certificate = certify(newest_resumable(catalog_of(store))[0])
    steps = {unit.step for unit in certificate.units}
    return sorted(steps, key=lambda step: (abs(step - certificate.effective_step), step))


def run_state(seen: Seen) -> dict[str, Any]:
    return {key: value for key, value in seen.items() if key != "tensors"}


def require_versions(one: Run, seen: Mapping[int, Seen]) -> None:
    """Every tensor is that of the step that the certificate names."""
    certificate = one.ckpt.certificate
    assert certificate is not None and not certificate.exact
    step_of = {(unit.layer, unit.slot): unit.step for unit in certificate.units}
    for (name, slot), values in one.tensors().items():
        step = step_of[one.layer(name), slot]
        assert torch.equal(values, seen[step]["tensors"][name, slot]), (name, slot, step)


@pytest.mark.parametrize(("k", "steps"), [(2, 6), (2, 7), (4, 7), (4, 9), (5, 12)])
def test_a_composite_goes_on_at_its_effective_step(store: Path, k: int, steps: int) -> None:
    seen = trained(store, k, steps)
    wanted = nearest(store)[0]
    assert k == 2 or wanted < steps
    with run(store, seed=5, **parity(k)) as other:
        assert other.ckpt.resume() == wanted
        certificate = other.ckpt.certificate
        assert certificate is not None and certificate.step == steps
        assert min(unit.step for unit in certificate.units) < certificate.effective_step < steps
        assert run_state(other.look()) == run_state(seen[wanted])
        require_versions(other, seen)
        assert other.metric("driftpoint_resumed_step") == wanted
        assert other.metric("driftpoint_effective_step") == certificate.effective_step


def test_what_is_fresh_goes_on_where_it_is(store: Path) -> None:
    """Policy full; and fresh weights beside stale moments."""
    with run(store, policy="full") as one:
        one.ckpt.resume()
        one.train(0, 4)
        seen = one.seen
    policy = {"name": "threshold", "threshold": 0.0, "slots": {"exp_avg": 1e9, "exp_avg_sq": 1e9}}
    with run(store, seed=3, policy=policy) as two:
        assert two.ckpt.resume() == 4
        assert two.ckpt.certificate is not None and two.ckpt.certificate.exact
        assert run_state(two.look()) == run_state(seen[4])
        two.train(4, 9)
        seen = two.seen
    with run(store, seed=4) as three:
        assert three.ckpt.resume() == 9
        certificate = three.ckpt.certificate
        assert certificate is not None and not certificate.exact and certificate.effective_step == 9
        assert certificate.max_staleness == 5
        assert run_state(three.look()) == run_state(seen[9])


def test_at_newest_nothing_goes_back(store: Path) -> None:
    seen = trained(store, 4, 7)
    with run(store, seed=5, **parity(4, resume={"at": "newest"})) as other:
        assert other.ckpt.resume() == 7
        assert run_state(other.look()) == run_state(seen[7])
        require_versions(other, seen)
        assert other.metric("driftpoint_resumed_step") == 7
        effective = other.metric("driftpoint_effective_step")
        assert effective is not None and effective < 7


def test_data_goes_on_where_it_was(store: Path) -> None:
    seen = trained(store, 4, 7)
    wanted = nearest(store)[0]
    with run(store, seed=5, **parity(4, resume={"data": "on"})) as other:
        assert other.ckpt.resume() == wanted < 7
        found = other.look()
        assert {key: found[key] for key in ("last_epoch", "lr", "steps")} == {
            key: seen[wanted][key] for key in ("last_epoch", "lr", "steps")
        }
        assert {key: found[key] for key in ("position", "torch", "numpy")} == {
            key: seen[7][key] for key in ("position", "torch", "numpy")
        }
        require_versions(other, seen)


# ---- going on from there


def test_the_next_save_is_full_and_begins_a_branch_of_its_own(store: Path) -> None:
    trained(store, 4, 7, retention={"keep_last": 20})
    before = catalog_of(store).saves()
    wanted = nearest(store)[0]
    with run(store, **parity(4, retention={"keep_last": 20})) as other:
        assert other.ckpt.resume() == wanted
        other.train(wanted, wanted + 1)
        catalog = catalog_of(store)
        newest = newest_resumable(catalog)[0].manifest
        assert (newest.save, newest.previous) == (SaveId(wanted + 1, 2), before[0].name)
        assert {record.version for record in newest.units} == {newest.save}
        assert catalog.saves() == [newest.save, *before]
        other.train(wanted + 1, wanted + 6)
        assert any(record.staleness for record in newest_resumable(catalog_of(store))[0].manifest.units)
        assert verify(catalog_of(store)).ok
        seen = other.seen
    following = nearest(store)[0]
    with run(store, seed=7, **parity(4)) as third:
        assert third.ckpt.resume() == following
        assert run_state(third.look()) == run_state(seen[following])


def test_what_does_not_move_is_not_saved_again(store: Path) -> None:
    def frozen(one: Run) -> None:
        for p in one.model.embed.parameters():
            p.requires_grad_(False)

    with run(store, **parity(4)) as one:
        frozen(one)
        one.look = lambda: {}  # type: ignore[method-assign]
        one.ckpt.resume()
        one.train(0, 7)
    with run(store, seed=5, **parity(4)) as other:
        frozen(other)
        other.look = lambda: {}  # type: ignore[method-assign]
        first = other.ckpt.resume()
        assert first < 7
        other.train(first, first + 1)
    units = newest_resumable(catalog_of(store))[0].manifest.units
    assert {(record.layer, record.version.step) for record in units if record.slot == "frozen"} == {("embed", 1)}
    assert {record.version.step for record in units if record.slot != "frozen"} == {first + 1}


def test_the_bound_on_staleness_holds_over_a_resume(store: Path) -> None:
    settings = {"policy": {"name": "threshold", "threshold": 0.2}, "bounds": {"max_staleness": 5}}
    with run(store, **settings) as one:
        one.ckpt.resume()
        one.train(0, 9)
    with run(store, seed=2, **settings) as other:
        first = other.ckpt.resume()
        assert first == nearest(store)[0]
        for step in range(first, first + 8):
            other.train(step, step + 1)
            for record in newest_resumable(catalog_of(store))[0].manifest.units:
                assert 0 <= record.staleness <= 5
                # What a resume loses of it are updates made since this process began, or more.
                assert record.version.epoch == 2 or record.version.step <= first


def test_a_crash_before_the_next_commit_loses_nothing(store: Path) -> None:
    seen = trained(store, 4, 7)
    wanted = nearest(store)[0]
    for seed in (5, 6, 7):
        with run(store, seed=seed, **parity(4)) as other:
            assert other.ckpt.resume() == wanted
            assert run_state(other.look()) == run_state(seen[wanted])
            require_versions(other, seen)


@pytest.mark.parametrize("life", [1, *(pytest.param(life, marks=pytest.mark.slow) for life in (2, 3))])
@pytest.mark.parametrize(
    "policy",
    [{"name": "parity", "k": 4}, {"name": "filter", "n": 1, "m": 9}, {"name": "threshold", "threshold": 0.15}],
    ids=lambda policy: policy["name"],
)
def test_a_job_that_fails_often_gets_on(store: Path, policy: dict[str, Any], life: int) -> None:
    """Every incarnation dies after a step or three. One that began where all weights were fresh may leave no fresher
    ones behind; the next one's first save is full then. (One that commits nothing leaves everything as it was.)"""
    with run(store, policy=policy) as one:
        one.ckpt.resume()
        for _ in range(7):
            one.advance()
    reached = []
    for seed in range(12):
        newest = catalog_of(store).saves()[0]
        with run(store, seed=seed, policy=policy) as other:
            first = other.ckpt.resume()
            for _ in range(life):
                other.advance()
        if catalog_of(store).saves()[0] != newest:
            reached.append(first)
    assert len(reached) >= 3
    assert reached == sorted(reached)
    assert all(early < late for early, late in zip(reached, reached[2:], strict=False)), reached
    assert verify(catalog_of(store)).ok


def test_resuming_twice_in_one_process(store: Path) -> None:
    with run(store, **parity(4, retention={"keep_last": 20})) as one:
        one.ckpt.resume()
        one.train(0, 7)
        seen = dict(one.seen)
        wanted = nearest(store)[0]
        assert one.ckpt.resume() == one.ckpt.resume() == wanted < 7
        assert run_state(one.look()) == run_state(seen[wanted])
        require_versions(one, seen)
        one.train(wanted, 9)
        saves = catalog_of(store).saves()
        assert [save for save in saves if save.step > wanted and save.epoch == 2] == [
            SaveId(step, 2) for step in range(9, wanted, -1)
        ]
        assert verify(catalog_of(store)).ok


def test_pruning_keeps_what_a_resume_needs(store: Path) -> None:
    retention = {"keep_last": 1, "log_spaced": False}
    seen = trained(store, 4, 7, retention=retention)
    for seed in range(5):
        wanted = nearest(store)[0]
        catalog = catalog_of(store)
        assert not plan_prune(catalog, Retention(1, None, False)).groups
        with run(store, seed=seed, **parity(4, retention=retention)) as other:
            assert other.ckpt.resume() == wanted
            assert run_state(other.look()) == run_state(seen[wanted])
            other.train(wanted, wanted + 3)
            seen = {**seen, **other.seen}
        assert verify(catalog_of(store)).ok


# ---- what cannot be used


def flip_run_state(store: Path, step: int) -> None:
    """One byte of the random states that the save of ``step`` holds."""
    catalog = catalog_of(store)
    save = SaveId(step, 1)
    part = read_part(catalog.files, catalog.store_id, save, 0)
    tensor = next(tensor for tensor in part.run_tensors if tensor.nbytes)
    path = store / payload_path(save, 0)
    data = bytearray(path.read_bytes())
    data[part.header_bytes + tensor.offset] ^= 1
    path.write_bytes(data)


def test_damaged_run_state_is_passed_over_for_the_next_nearest(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = trained(store, 4, 7)
    order = nearest(store)
    assert order[0] != 7
    for tried, step in enumerate(order[: order.index(7)]):
        flip_run_state(store, step)
        wanted = order[tried + 1]
        caplog.clear()
        with run(store, seed=5, **parity(4)) as other:
            assert other.ckpt.resume() == wanted
            assert run_state(other.look()) == run_state(seen[wanted])
            require_versions(other, seen)
        told = [record.getMessage() for record in caplog.records if "skipped the run state" in record.getMessage()]
        assert len(told) == tried + 1
        assert f"skipped the run state of {SaveId(order[0], 1)}" in told[0]
    # The commit's own, too: then the commit itself is none.
    flip_run_state(store, 7)
    with run(store, seed=5, **parity(4)) as other:
        assert other.ckpt.resume() < 7
        assert other.ckpt.certificate is not None and other.ckpt.certificate.step < 7


def test_data_that_goes_on_needs_the_newest_run_state(store: Path) -> None:
    seen = trained(store, 4, 7)
    flip_run_state(store, 7)
    with run(store, seed=5, **parity(4)) as other:
        assert other.ckpt.resume() == nearest(store)[0]  # nothing of it is needed
        require_versions(other, seen)
    with run(store, seed=5, **parity(4, resume={"data": "on"})) as other:
        other.ckpt.resume()
        certificate = other.ckpt.certificate
        assert certificate is not None and certificate.step == 6
        assert other.look()["position"] == 6


def test_a_refused_resume_changes_nothing(store: Path) -> None:
    trained(store, 4, 7)
    with run(store, seed=5, **parity(4)) as other:
        other.ckpt._job.user.objects.append(Loader())
        before = {name: p.detach().clone() for name, p in other.model.named_parameters()}
        with pytest.raises(ModelMismatchError, match="2 objects"):
            other.ckpt.resume()
        assert all(torch.equal(p, before[name]) for name, p in other.model.named_parameters())
        assert (other.schedule.last_epoch, other.loader.position) == (0, 0)


def test_state_that_the_optimizer_did_not_have_yet(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A layer thawed late: an older save's run state knows no moments of it, and would have them dropped."""
    with run(store, **parity(5)) as one:
        for p in one.model.head.parameters():
            p.requires_grad_(False)
        one.ckpt.resume()
        one.look = lambda: {}  # type: ignore[method-assign]
        one.train(0, 5)
        for p in one.model.head.parameters():
            p.requires_grad_(True)
        one.train(5, 7)
        moments = one.optimizer.state[one.model.head.weight]["exp_avg"].clone()
        del one.look
        tensors = one.tensors()
    with run(store, seed=5, **parity(5)) as other:
        step = other.ckpt.resume()
        certificate = other.ckpt.certificate
        assert certificate is not None and certificate.effective_step < 5.5 and step > 5
        assert "had no exp_avg for head" in caplog.text
        version = next(u.step for u in certificate.units if (u.layer, u.slot) == ("head", "exp_avg"))
        if version == 7:
            assert torch.equal(other.optimizer.state[other.model.head.weight]["exp_avg"], moments)
        assert other.tensors().keys() == tensors.keys()


def test_a_save_of_parts_that_are_gone_is_no_place_to_go_on_from(store: Path) -> None:
    """A base, or a group of which nothing but the run state is lost, counts as damaged where a part does not stand."""
    trained(store, 4, 7)
    wanted = nearest(store)[0]
    (store / part_path(SaveId(wanted, 1), 0)).unlink()
    with run(store, seed=5, **parity(4)) as other:
        assert other.ckpt.resume() in (1, 2, 3, 4, 5, 6, 7)
        certificate = other.ckpt.certificate
        assert certificate is not None and all(unit.step != wanted for unit in certificate.units)
