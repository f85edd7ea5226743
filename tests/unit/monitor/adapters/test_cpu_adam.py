"""DeepSpeedCPUAdam keeps beta^t, a running product in float, in no state dict. A resume repeats that product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monitor.adapters.deepspeed_base import replay_steps


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
    """Only what of DeepSpeedCPUAdam counts."""

    def __init__(self, betas: list[tuple[float, float]]) -> None:
        self.opt_id, self.ds_opt_adam = 0, CounterOfCpuAdam()
        super().__init__([{"params": [torch.nn.Parameter(torch.ones(3))], "betas": one} for one in betas])

    def train(self, steps: range) -> list[tuple[float, ...]]:
        """Return beta^t after each step, of the last group."""
        seen = []
        for step in steps:
            for group in self.param_groups:
                self.ds_opt_adam.adam_update(self.opt_id, step + 1, 1e-3, *group["betas"])
                self.state[group["params"][0]] = {"step": step + 1}
            seen.append(tuple(map(float, self.ds_opt_adam.powers)))
        return seen


@pytest.mark.parametrize("betas", [[(0.9, 0.999)], [(0.9, 0.95)] * 2, [(0.9, 0.999), (0.8, 0.95)]])
def test_a_resumed_optimizer_corrects_bias_as_one_that_ran_on(betas: list[tuple[float, float]]) -> None:
    undisturbed = CpuAdam(betas).train(range(60))
    for at in (0, 1, 2, 18, 37):
        resumed = CpuAdam(betas)
        resumed.state.update({group["params"][0]: {"step": at} for group in resumed.param_groups if at})
        replay_steps(resumed)
        assert resumed.train(range(at, 60)) == undisturbed[at:]
    resumed.state.update({group["params"][0]: {"step": 5} for group in resumed.param_groups})
    replay_steps(resumed)  # back to an earlier step, in the same process
    assert resumed.train(range(5, 60)) == undisturbed[5:]


def test_other_optimizers_are_left_alone() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    replay_steps(optimizer)
    assert [int(state["step"]) for state in optimizer.state.values()] == [1]
