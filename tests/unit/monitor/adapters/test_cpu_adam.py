"""DeepSpeed's Adam on the CPU keeps beta^t, a running product, in no state dict. A resume repeats that product."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from monitor.adapters.cpu_adam import BetaPowers

Schedule = Mapping[int, tuple[float, float]]  # betas from a step on


class CounterOfCpuAdam:
    """``IncrementStep`` of DeepSpeed's csrc/includes/cpu_adam.h. Building the real one takes minutes."""

    def __init__(self) -> None:
        self.step, self.betas, self.powers = 0, (0.9, 0.999), [np.float32(1), np.float32(1)]

    def adam_update(self, _: int, step: int, _lr: float, *rest: object) -> None:
        betas = rest[:2]
        if betas == self.betas and step == self.step:
            return
        running = betas == self.betas and step == self.step + 1
        for at, beta in enumerate(np.float32(betas)):
            self.powers[at] = self.powers[at] * beta if running else np.float32(float(beta) ** step)
        self.step, self.betas = step, betas


class CpuAdam(torch.optim.Adam):
    """Only what of DeepSpeedCPUAdam, or of FusedAdam on the CPU, counts."""

    def __init__(self, betas: list[tuple[float, float]], fused: bool) -> None:
        self.counter, self.opt_id, self.adam_w_mode = CounterOfCpuAdam(), 0, 1
        if fused:
            self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)
        else:
            self.ds_opt_adam = self.counter
        super().__init__([{"params": [torch.nn.Parameter(torch.ones(3))], "betas": one} for one in betas])
        for group in self.param_groups:
            group["params"][0].grad = torch.ones(3)
        self.powers = BetaPowers(self, [])

    def multi_tensor_adam(
        self, _chunk: int, _overflow: object, tensors: list[list[torch.Tensor]], *rest: object
    ) -> None:
        lr, beta1, beta2, _eps, step, _mode, _correction, _decay = rest
        assert [tensor.numel() for (tensor,) in tensors] == [0] * 4
        self.counter.adam_update(0, step, lr, beta1, beta2)  # type: ignore[arg-type]

    def at(self, step: int, computed: int | None = None) -> CpuAdam:
        """Load this step."""
        self.state.update({group["params"][0]: {"step": step} for group in self.param_groups if step})
        self.powers.restore(computed)
        return self

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            state = self.state[group["params"][0]]
            state["step"] = state.get("step", 0) + 1
            self.counter.adam_update(self.opt_id, state["step"], 1e-3, *group["betas"])

    def train(self, steps: range, schedule: Schedule = {}) -> list[tuple[float, ...]]:  # noqa: B006 - not changed
        """Return beta^t after each step, of the last group."""
        seen = []
        for step in steps:
            for group in self.param_groups:
                group["betas"] = schedule.get(step, group["betas"])
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
def test_so_does_one_whose_betas_moved(fused: bool) -> None:
    """Warm-up of momentum: they move for some steps, stay, and move again."""
    schedule = {step: (0.85 + step / 200, 0.999) for step in (*range(10), 30, 31, 50)}
    undisturbed = CpuAdam([(0.9, 0.999)], fused).train(range(60), schedule)
    for step in (1, 5, 9, 10, 11, 25, 30, 31, 32, 45, 55):
        first = CpuAdam([(0.9, 0.999)], fused)
        first.train(range(step), schedule)
        resumed = CpuAdam([first.param_groups[0]["betas"]], fused).at(step, first.powers.computed)
        assert resumed.train(range(step, 60), schedule) == undisturbed[step:]
        again = CpuAdam([(0.9, 0.999)], fused)
        again.train(range(step - 1))  # its last step is the one before that which is resumed
        again.param_groups[0]["betas"] = first.param_groups[0]["betas"]
        assert again.at(step, first.powers.computed).train(range(step, 60), schedule) == undisturbed[step:]


def test_saves_that_lack_the_step_are_read() -> None:
    """Of before betas that move were carried: as if they had never moved."""
    schedule = {step: (0.85 + step / 200, 0.999) for step in range(10)}
    first = CpuAdam([(0.9, 0.999)], False)
    first.train(range(20), schedule)
    assert first.powers.computed == 10
    resumed = CpuAdam([first.param_groups[0]["betas"]], False).at(20)
    assert resumed.powers.computed == 1
    assert CpuAdam([(0.9, 0.999), (0.8, 0.95)], False).at(20).powers.computed == 20


def test_other_optimizers_are_left_alone() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    powers = BetaPowers(optimizer, [])
    optimizer.step()
    powers.restore(1)
    assert powers.computed is None
    assert [int(state["step"]) for state in optimizer.state.values()] == [1]
