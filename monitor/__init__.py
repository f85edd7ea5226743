"""Driftpoint inside the training process.

import monitor

ckpt = monitor.attach(engine, "driftpoint.yaml", state=[scheduler, loader])
for step in range(ckpt.resume(), total_steps):
    ...
    engine.step()
    ckpt.step()
"""

from monitor.attach import attach
from monitor.checkpointer import Checkpointer
from monitor.config import Config
from monitor.report import Preempted, StepReport

__all__ = ["Checkpointer", "Config", "Preempted", "StepReport", "attach"]
