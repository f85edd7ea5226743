"""What the checks of foreign checkpoints train: one model with everything awkward, and the truth about its state.

The truth is read off the live engine's memory, by addresses and by DeepSpeed's own functions, never off files.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, BATCH = 23, 7, 2
CPU = {"device": "cpu"}
ROUND_ROBIN = {"round_robin_gradients": True}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero1-bf16": (1, "bf16", {}),
    "zero1-bf16-wrapper": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero1-fp16": (1, "fp16", {}),
    "zero2-fp32-round-robin": (2, "fp32", ROUND_ROBIN),
    "zero2-bf16-aligned-round-robin": (2, "bf16", {"parameter_alignment": True, **ROUND_ROBIN}),
    "zero2-bf16-offload": (2, "bf16", {"offload_optimizer": CPU}),
    "zero3-bf16-sub-groups": (3, "bf16", {"sub_group_size": 60, "stage3_param_persistence_threshold": 20}),
    "zero3-fp32": (3, "fp32", {}),
    "zero3-fp16": (3, "fp16", {}),
}
ADAPTERS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero2-adapters": (2, "bf16", {}),
    "zero3-adapters": (3, "bf16", {}),
}
"""Everything but the adapters is frozen, and saved without."""
REFUSED = {"zero1-bf16-elastic": (1, "bf16", {"elastic_checkpoint": True}), "zero0-fp32": (0, "fp32", {})}
"""What the merger says it cannot read."""


class Adapted(nn.Module):
    """A frozen matrix with a low-rank addition, as adapters have it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, out, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B["default"](self.lora_A["default"](x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = Adapted(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Awkward(nn.Module):
    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.gain = nn.Parameter(torch.full((1,), 1.5))
        if empty:
            self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.blocks[0].seen += 1
        x = (self.embed(tokens) * self.scale).to(self.embed.weight.dtype)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.gain
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY).float(), tokens[:, 1:].reshape(-1))


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, vectors, and one of a single element: three weight decays."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if all("lora" in name for name, _ in named):
        return [{"params": [p for _, p in named], "weight_decay": 0.03}]
    matrices = [p for name, p in named if len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for name, p in named if len(getattr(p, "ds_shape", p.shape)) == 1 and name != "gain"]
    gain = [p for name, p in named if name == "gain"]
    return [
        {"params": gain, "weight_decay": 0.5, "lr": 2e-3},
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 3e-3},
    ]


def build(case: str) -> Any:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    stage, precision, zero = {**CASES, **ADAPTERS, **REFUSED}[case]
    get_accelerator().is_fp16_supported = lambda: True  # torch computes in fp16 on the CPU
    torch.manual_seed(3)
    model = Awkward(empty=stage < 3)  # DeepSpeed cannot gather a parameter without elements at ZeRO-3
    if case in ADAPTERS:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)
    settings = _config(stage, precision, dict(zero), len(param_groups(model)))
    return deepspeed.initialize(model=model, model_parameters=param_groups(model), config=settings)[0]


def _config(stage: int, precision: str, zero: dict[str, Any], groups: int) -> dict[str, Any]:
    types = zero.pop("data_types", None)
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.7,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.95], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {
            "warmup_min_lr": [1e-4 * (i + 1) for i in range(groups)],
            "warmup_max_lr": [1e-2 / (i + 1) for i in range(groups)],
            "warmup_num_steps": 9,
        }},
        "steps_per_print": 1 << 30,
    }  # fmt: skip
    if precision == "bf16":
        out["bf16"] = {"enabled": True}
    if precision == "fp16":
        out["fp16"] = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 3}
    if types:
        out["data_types"] = types
    return out


def train(engine: Any, steps: int) -> None:
    for step in range(steps):
        for micro in range(2):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
            loss = engine(torch.randint(VOCABULARY, (BATCH, 6), generator=generator))
            engine.backward(loss)
            engine.step()


def truth(engine: Any) -> dict[str, Any]:
    """Every (fqn, slot), whole; param groups by name; counters; scheduler; scaler. Collective."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    tensors = _optimized_3(engine) if engine.zero_optimization_stage() == 3 else _optimized_12(engine, names)
    tensors |= {(name, "frozen"): value for name, value in _frozen(engine).items()}
    persistent = engine.module.state_dict().keys()
    tensors |= {
        (name, "buffer"): buffer.clone() for name, buffer in engine.module.named_buffers() if name in persistent
    }
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "tensors": tensors,
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in engine.optimizer.optimizer.param_groups
        ],
        "members": [[names[key] for key in group] for group in _GIVEN[-1]],
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps),
        "scheduler": engine.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else (type(scaler).__name__, dict(vars(scaler))),
    }


_GIVEN: list[list[list[int]]] = []
"""The user's groups by parameter, without what DeepSpeed leaves out; of each engine built."""


def remember(engine: Any) -> None:
    """Note which live parameters each of the user's groups has."""
    _GIVEN.append([[id(p) for p in group["params"] if _is_held(p)] for group in param_groups(engine.module)])


def _is_held(parameter: Any) -> bool:
    return bool(parameter.requires_grad and getattr(parameter, "ds_numel", parameter.numel()))


def _optimized_12(engine: Any, names: dict[int, str]) -> dict[tuple[str, str], torch.Tensor]:
    """Whole flat tensors gathered; each parameter is where its working copy is a view of the working flat tensor."""
    zero, out = engine.optimizer, {}
    wrapper = hasattr(zero, "bf16_groups_flat")
    masters = zero.fp32_groups_flat_partition if wrapper else zero.single_partition_of_fp32_groups
    working = zero.bf16_groups_flat if wrapper else zero.bit16_groups_flat
    for master, flat in zip(masters, working, strict=True):
        state = zero.optimizer.state[master]
        whole = {"fp32": _gathered(master), "exp_avg": _gathered(state["exp_avg"])}
        whole["exp_avg_sq"] = _gathered(state["exp_avg_sq"])
        for parameter in engine.module.parameters():
            offset = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
            if parameter.numel() and 0 <= offset < flat.numel():
                for slot, tensor in whole.items():
                    own = tensor[offset : offset + parameter.numel()]
                    out[names[id(parameter)], slot] = own.clone().view(parameter.shape)
    return out


def _gathered(part: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts)


def _optimized_3(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    out = {}
    for name, parameter in engine.module.named_parameters():
        if _is_held(parameter):
            out[name, "fp32"] = safe_get_full_fp32_param(parameter).detach().clone()
            for slot in ("exp_avg", "exp_avg_sq"):
                out[name, slot] = safe_get_full_optimizer_state(parameter, slot).detach().clone()
    return out


def _frozen(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    out = {}
    for name, parameter in engine.module.named_parameters():
        if not _is_held(parameter):
            if hasattr(parameter, "ds_id"):
                with deepspeed.zero.GatheredParameters([parameter]):
                    out[name] = parameter.detach().clone()
            else:
                out[name] = parameter.detach().clone()
    return out
