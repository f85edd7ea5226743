"""DeepSpeed's Adam on the CPU keeps beta^t, a running product, in no state dict. A resume repeats that product."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from monitor.adapters.cpu_adam import powers_of

Schedule = Mapping[int, tuple[float, float]]  # betas from a step on


def floats(*betas: Any) -> tuple[np.float32, ...]:
    return tuple(map(np.float32, betas))


class CounterOfCpuAdam:
    """``IncrementStep`` of DeepSpeed's csrc/includes/cpu_adam.h. Building the real one takes minutes."""

    def __init__(self) -> None:
        self.step, self.betas, self.powers = 0, floats(0.9, 0.999), [np.float32(1), np.float32(1)]

    def adam_update(self, _: int, step: int, _lr: float, *rest: object) -> None:
        betas = floats(*rest[:2])
        if betas == self.betas and step == self.step:
            return
        running = betas == self.betas and step == self.step + 1
        for at, beta in enumerate(betas):
            self.powers[at] = self.powers[at] * beta if running else np.float32(float(beta) ** step)
        self.step, self.betas = step, betas


class CpuAdam(torch.optim.Adam):
    """Only what of DeepSpeedCPUAdam, or of FusedAdam on the CPU, counts."""

    def __init__(
        self, betas: list[tuple[float, float]], fused: bool, frozen: int | None = None, loaded: int | None = None
    ) -> None:
        self.counter, self.opt_id, self.adam_w_mode = CounterOfCpuAdam(), 0, 1
        if fused:
            self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)
        else:
            self.ds_opt_adam = self.counter
        super().__init__([{"params": [torch.nn.Parameter(torch.ones(3))], "betas": one} for one in betas])
        for number, group in enumerate(self.param_groups):
            group["params"][0].grad = None if number == frozen else torch.ones(3)
        self.state.update({group["params"][0]: {"step": loaded} for group in self.param_groups if loaded})
        self.attach()

    def multi_tensor_adam(
        self, _chunk: int, _overflow: object, tensors: list[list[torch.Tensor]], *rest: object
    ) -> None:
        lr, beta1, beta2, _eps, step, _mode, _correction, _decay = rest
        assert [tensor.numel() for (tensor,) in tensors] == [0] * 4
        self.counter.adam_update(0, step, lr, beta1, beta2)  # type: ignore[arg-type]

    def attach(self) -> None:
        powers = powers_of(self)
        assert powers is not None
        self.powers = powers

    def at(self, step: int, saved: list[float] | None = None) -> CpuAdam:
        """Load this step."""
        self.state.update({group["params"][0]: {"step": step} for group in self.param_groups if step})
        self.powers.restore(self, saved)
        return self

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in [group for group in self.param_groups if group["params"][0].grad is not None]:
            state = self.state[group["params"][0]]
            state["step"] = state.get("step", 0) + 1
            self.counter.adam_update(self.opt_id, state["step"], 1e-3, *group["betas"])

    def train(
        self, steps: range, schedule: Schedule = MappingProxyType({}), *, after: bool = False
    ) -> list[tuple[float, ...]]:
        """Return beta^t after each step, of the last group. after: the schedule sets betas after the step."""
        seen = []
        for step in steps:
            if after:
                self.step()
            for group in self.param_groups:
                group["betas"] = schedule.get(step, group["betas"])
            if not after:
                self.step()
            seen.append(tuple(map(float, self.counter.powers)))
        return seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("betas", [[(0.9, 0.999)], [(0.9, 0.95)] * 2, [(0.9, 0.999), (0.8, 0.95)]])
def test_a_resumed_optimizer_corrects_bias_as_one_that_ran_on(betas: list[tuple[float, float]], fused: bool) -> None:
    undisturbed = CpuAdam(betas, fused).train(range(60))
    for step in (0, 1, 2, 18, 37):
        resumed = CpuAdam(betas, fused).at(step)
        assert resumed.train(range(step, 60)) == undisturbed[step:]
    assert resumed.at(5).train(range(5, 60)) == undisturbed[5:]  # back to an earlier step, in the same process


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_so_does_one_whose_betas_moved(fused: bool, after: bool) -> None:
    """Warm-up of momentum: they move for some steps, stay, and move again. after: a schedule's step comes last."""
    schedule = {step: (0.85 + step / 200, 0.999) for step in (*range(10), 30, 31, 50)}
    undisturbed = CpuAdam([(0.9, 0.999)], fused).train(range(60), schedule, after=after)
    for step in (1, 5, 9, 10, 11, 25, 30, 31, 32, 45, 55):
        first = CpuAdam([(0.9, 0.999)], fused)
        first.train(range(step), schedule, after=after)
        resumed = CpuAdam([first.param_groups[0]["betas"]], fused).at(step, first.powers.state(first))
        assert resumed.train(range(step, 60), schedule, after=after) == undisturbed[step:]
        again = CpuAdam([(0.9, 0.999)], fused)
        again.train(range(step - 1))  # its last step is the one before that which is resumed
        again.param_groups[0]["betas"] = first.param_groups[0]["betas"]
        assert (
            again.at(step, first.powers.state(first)).train(range(step, 60), schedule, after=after)
            == undisturbed[step:]
        )


def test_a_group_that_takes_no_steps_does_not_count() -> None:
    groups = [(0.9, 0.999), (0.8, 0.95)]
    undisturbed, first = CpuAdam(groups, False, frozen=1), CpuAdam(groups, False, frozen=1)
    seen = undisturbed.train(range(40))
    first.train(range(20))
    assert CpuAdam(groups, False, frozen=1).at(20, first.powers.state(first)).train(range(20, 40)) == seen[20:]


@pytest.mark.parametrize("fused", [False, True])
def test_state_that_another_loaded_is_computed_anew(fused: bool) -> None:
    """As by ``engine.load_checkpoint()``, before an attach or after it. Without one, the C++ object computes, too."""
    loaded = CpuAdam([(0.9, 0.999)], fused, loaded=20)
    seen = [(float(np.float32(0.9) ** 21), float(np.float32(0.999) ** 21)), *loaded.train(range(20, 60))[1:]]
    for step, before in itertools.product((21, 22, 40), (True, False)):
        first = CpuAdam([(0.9, 0.999)], fused, loaded=20 if before else None)
        first.state.update({group["params"][0]: {"step": 20} for group in first.param_groups})
        first.train(range(20, step))
        state = first.powers.state(first)
        assert state[0] == 21
        assert CpuAdam([(0.9, 0.999)], fused).at(step, state).train(range(step, 60)) == seen[step - 20 :]


def load(optimizer: CpuAdam, step: int) -> None:
    """As ``engine.load_checkpoint()``."""
    optimizer.state.update({group["params"][0]: {"step": step} for group in optimizer.param_groups})


@pytest.mark.parametrize("moved", [1, 351])
@pytest.mark.parametrize("saved_at", [200, 201, 300])
def test_an_earlier_step_that_another_loaded_is_computed_anew(moved: int, saved_at: int) -> None:
    """In the middle of training, and saved before or after the next step."""
    live = CpuAdam([(0.85, 0.999)], False)
    live.train(range(400), {moved - 1: (0.9, 0.999)})
    load(live, 200)
    live.train(range(200, saved_at))
    state = live.powers.state(live)
    resumed = CpuAdam([(0.9, 0.999)], False).at(saved_at, state)
    again = resumed.powers.state(resumed)
    seen = live.train(range(saved_at, 500))
    assert CpuAdam([(0.9, 0.999)], False).at(saved_at, again).train(range(saved_at, 500)) == seen
    first = resumed.train(range(saved_at, 310))
    last = CpuAdam([(0.9, 0.999)], False).at(310, resumed.powers.state(resumed))
    assert [*first, *last.train(range(310, 500))] == seen


@pytest.mark.parametrize("counts", [(200, 5), (200, 199), (201, 199), (5, 200), (199, 200)])
def test_groups_that_count_differently(counts: tuple[int, int]) -> None:
    def made() -> CpuAdam:
        optimizer = CpuAdam([(0.9, 0.999)] * 2, False)
        for group, count in zip(optimizer.param_groups, counts, strict=True):
            optimizer.state[group["params"][0]] = {"step": count}
        return optimizer

    live = made()
    live.train(range(40))
    resumed = made()
    for group in resumed.param_groups:
        resumed.state[group["params"][0]]["step"] += 40
    resumed.powers.restore(resumed, live.powers.state(live))
    assert resumed.train(range(20)) == live.train(range(20))


def test_a_second_attach_to_one_that_was_trained_is_exact() -> None:
    trained = CpuAdam([(0.9, 0.999)], False)
    trained.train(range(20))
    trained.attach()
    trained.train(range(20, 30))
    state = trained.powers.state(trained)
    seen = trained.train(range(30, 60))
    assert CpuAdam([(0.9, 0.999)], False).at(30, state).train(range(30, 60)) == seen


def test_saves_that_lack_the_step_are_read() -> None:
    """Of before betas that move were carried: as if they had never moved."""
    schedule = {step: (0.85 + step / 200, 0.999) for step in range(10)}
    first = CpuAdam([(0.9, 0.999)], False)
    first.train(range(20), schedule)
    assert first.powers.state(first)[0] == 10
    resumed = CpuAdam([first.param_groups[0]["betas"]], False).at(20)
    assert resumed.powers.state(resumed)[0] == 1
    turns = CpuAdam([(0.9, 0.999), (0.8, 0.95)], False).at(20)
    assert turns.powers.state(turns)[0] == 20


def test_other_optimizers_are_left_alone() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    assert powers_of(optimizer) is None
    optimizer.step()
    assert [int(state["step"]) for state in optimizer.state.values()] == [1]
