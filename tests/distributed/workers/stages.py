"""Models whose ranks hold different tensors, in unusual ways, 4 ranks: saved, resumed on the same and on other meshes.

Gradients are drawn by name, so all meshes take the same steps. Usage: stages.py SPEC.json
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resume_jobs import Results, leave, rank, start_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import monitor
from monitor.adapters import adapter_for
from monitor.adapters.optimizer_state import AnyOptimizer, JointOptimizer
from store.errors import UnsupportedError

WIDTH, STEPS = 16, 2
Made = tuple[nn.Module, Any]
PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Extra(nn.Module):
    """Has extra state."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> int:
        return self.value

    def set_extra_state(self, state: int) -> None:
        self.value = state


class Net(nn.ModuleDict):
    """``fully_shard`` takes no container without a forward. It is never called: gradients are drawn."""

    def forward(self) -> None:
        raise NotImplementedError


def block() -> nn.Module:
    parts = {"up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)}
    return nn.ModuleDict(parts)


def net(seed: int, *parts: str) -> Any:
    """The whole model, or those ``parts`` of it."""
    torch.manual_seed(seed)
    layers = nn.ModuleDict({"0": block(), "1": block()})
    model = Net({"embed": nn.Embedding(32, WIDTH), "layers": layers, "head": nn.Linear(WIDTH, 32)})
    for path in ("embed", "layers.0", "layers.1", "head") if parts else ():
        if path not in parts:
            holder, _, name = path.rpartition(".")
            del model.get_submodule(holder)[name]  # type: ignore[operator]
    return model


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)


def muon(model: nn.Module) -> Any:
    """For the matrices of the second layer, if it is here; AdamW for the rest."""
    own = [p for name, p in model.named_parameters() if "layers.1" in name and p.ndim == 2]
    ids = {id(p) for p in own}
    rest = torch.optim.AdamW([p for p in model.parameters() if id(p) not in ids], lr=1e-2, foreach=False)
    return [torch.optim.Muon(own, lr=1e-2), rest] if own else rest


def stage(seed: int) -> tuple[Any, int, DeviceMesh]:
    mesh = mesh_of(stage=2, data=2)
    number = mesh.get_local_rank("stage")
    return net(seed, *(("embed", "layers.0") if number == 0 else ("layers.1", "head"))), number, mesh


def whole(seed: int) -> Made:
    model = net(seed)
    return model, adamw(model)


def pp(seed: int) -> Made:
    model = stage(seed)[0]
    return model, adamw(model)


def sharded_stage(which: int, seed: int) -> Made:
    """One stage under tensor parallelism, the other plain."""
    model, number, mesh = stage(seed)
    if number == which:
        parallelize_module(model.layers[str(which)], mesh["data"], PLAN)
    return model, adamw(model)


def pp_muon(seed: int) -> Made:
    model = stage(seed)[0]
    return model, muon(model)


def whole_muon(seed: int) -> Made:
    model = net(seed)
    return model, muon(model)


def tied(seed: int) -> Made:
    """Pipeline stages under DistributedDataParallel, both with the embeddings."""
    mesh = mesh_of(stage=2, data=2)
    parts = ("embed", "layers.0") if mesh.get_local_rank("stage") == 0 else ("embed", "layers.1", "head")
    model = net(seed, *parts)
    model.register_buffer("number", torch.tensor([seed, mesh.get_local_rank("stage")]))
    return DistributedDataParallel(model, process_group=mesh.get_group("data")), adamw(model)


def extra(build: Callable[[int], Made], seed: int) -> Made:
    model, optimizer = build(seed)
    for number, layer in model.layers.items():
        layer["extra"] = Extra(10 * seed + int(number))
    return model, optimizer


def outside(seed: int) -> Made:
    """The embeddings are on the ranks 2 and 3 alone; all ranks have the module."""
    model, mesh = net(seed), DeviceMesh("cpu", [2, 3])
    half = model.embed.weight.detach().chunk(2)[rank() % 2] if rank() >= 2 else torch.empty(0)
    shape, stride = model.embed.weight.shape, model.embed.weight.stride()
    local = DTensor.from_local(half.clone(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    model.embed.weight = nn.Parameter(local)
    return model, adamw(model)


def fsdp_tp(seed: int) -> Made:
    model, mesh = net(seed), mesh_of(data=2, tensor=2)
    for layer in model.layers.values():
        parallelize_module(layer, mesh["tensor"], PLAN)
    fully_shard(model, mesh=mesh["data"])
    return model, adamw(model)


def frozen(build: Callable[[int], Made], seed: int) -> Made:
    del seed  # of the base model, which the script loads
    model, _ = build(0)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
    return model, adamw(model)


def unusual(model: nn.Module, optimizer: Any) -> None:
    """One tensor in two places of the state, and moments in another memory order."""
    first, second = [p for p in model.parameters() if p.ndim == 1][:2]
    optimizer.state[first]["of both"] = optimizer.state[second]["of both"] = torch.full((3,), 5.0)
    for p in (p for p in model.parameters() if p.ndim == 2):
        optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].t().contiguous().t()


def steps_of(
    model: nn.Module, optimizer: Any, idle: Callable[[str, int], bool] = lambda name, step: False
) -> Iterator[int]:
    """idle: whether a parameter gets no gradient."""
    for step in range(STEPS):
        for name, p in model.named_parameters():
            seed = zlib.crc32(name.encode()) + step
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            if isinstance(p, DTensor) and p.device_mesh.get_coordinate() is None:
                continue
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = grad if p.requires_grad and not idle(name, step) else None
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.step()
        yield step


def state(model: Any, optimizer: Any) -> dict[str, Any]:
    """All that is here, gathered by torch; of tensors on other ranks only, nothing."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    joint: AnyOptimizer = JointOptimizer(optimizer) if isinstance(optimizer, list) else optimizer
    here = {n: p for n, p in model.named_parameters() if not isinstance(p, DTensor) or p.device_mesh.get_coordinate()}
    found: dict[str, Any] = {
        f"{name}/{key}": value for name, p in here.items() for key, value in joint.state.get(p, {}).items()
    }
    found |= here | {f"{name}/extra": part.value for name, part in model.named_modules() if isinstance(part, Extra)}
    tensors = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}
    return {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in tensors.items()}


def joined(made: Made) -> dict[str, Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, state(*made))
    return {name: value for one in every for name, value in one.items()}


def alike(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


class Scenes:
    """Saves and resumes, and tells what came back."""

    def __init__(self, results: Results, directory: Path) -> None:
        self._results, self._directory = results, directory
        self.made: Made

    def attach(self, name: str, made: Any, **settings: Any) -> monitor.Checkpointer:
        base = {"store": str(self._directory / name), "every": 1, "metrics": {"enabled": False}}
        return monitor.attach(made, {**base, **settings})

    def save(self, name: str, made: Made, then: Callable[..., None] | None = None, **settings: Any) -> dict[str, Any]:
        idle = settings.pop("idle", lambda name, step: False)
        with self.attach(name, made, **settings) as ckpt:
            for _ in steps_of(made[0].module if hasattr(made[0], "module") else made[0], made[1], idle):
                if then is not None:
                    then(*made)
                ckpt.step()
                ckpt.flush()
        return joined(made)

    def resume(self, name: str, made: Made, was: Mapping[str, Any], case: str, **settings: Any) -> Made:
        with self.attach(name, made, **settings) as ckpt:
            step, exact = ckpt.resume(), ckpt.certificate is not None and ckpt.certificate.exact
        now = joined(made)
        wrong = sorted(was.keys() ^ now.keys()) + [
            key for key in was.keys() & now.keys() if not alike(was[key], now[key])
        ]
        self._results.tell("resumed", case=case, step=step, exact=exact, wrong=wrong)
        return made


PAIRS: dict[str, tuple[Callable[[int], Made], Callable[[int], Made]]] = {
    "plain, then sharded stage": (lambda seed: sharded_stage(1, seed), whole),
    "sharded, then plain stage": (lambda seed: sharded_stage(0, seed), whole),
    "another optimizer in each stage": (pp_muon, whole_muon),
    "extra state": (lambda seed: extra(pp, seed), lambda seed: extra(whole, seed)),
    "outside of a mesh": (outside, whole),
}


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=True)
    torch.set_num_threads(1)
    results, directory = Results(spec["results"]), Path(spec["directory"])
    scenes = Scenes(results, directory)
    for case, builds in PAIRS.items():
        for source, target in ((builds[0], builds[0]), builds, builds[::-1]):
            name = f"{case} {source is builds[0]} {target is builds[0]}"
            was = scenes.save(name, source(0))
            scenes.resume(name, target(1), was, case)
    was = scenes.save("tied", tied(0))
    ddp: Any = scenes.resume("tied", tied(1), was, "tied stages under DDP")[0]
    results.tell("tied", number=ddp.module.number.tolist(), stage=rank() // 2)
    model = net(1)
    model.register_buffer("number", torch.zeros(2, dtype=torch.int64))
    scenes.resume("tied", (model, adamw(model)), was, "tied stages under DDP")
    was = scenes.save("unusual", pp(0), unusual)
    model, optimizer = scenes.resume("unusual", pp(1), was, "unusual state")
    first, second = [p for p in model.parameters() if p.ndim == 1][:2]
    one = optimizer.state[first]["of both"] is optimizer.state[second]["of both"]
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters() if p.ndim == 2]
    results.tell("unusual", one=one, transposed=[moment.t().is_contiguous() for moment in moments])
    was = scenes.save("strides", whole(0), unusual)
    scenes.resume("strides", fsdp_tp(1), was, "strides for DTensors")
    experts(results, scenes)
    replicas(results, scenes)
    for encoding in ("compact", "careful"):
        scenes.save(encoding, fsdp_tp(0), encoding=encoding)
        again = joined(scenes.resume(encoding, fsdp_tp(1), {}, encoding))
        for build in (pp, whole):
            scenes.resume(encoding, build(1), again, f"lossy {encoding}")
    for build in (fsdp_tp, pp):
        was = scenes.save(f"skip {build.__name__}", frozen(build, 0), frozen="skip")
        for other in (fsdp_tp, pp, whole):
            scenes.resume(f"skip {build.__name__}", frozen(other, 1), was, "frozen: skip", frozen="skip")
    of_deepspeed(results, scenes)
    leave()


def experts(results: Results, scenes: Scenes) -> None:
    """Experts of some ranks get no gradient in a step, so their optimizer counts fewer."""

    def build(seed: int) -> Made:
        model, mesh = net(seed), mesh_of(data=2, experts=2)
        model["experts"] = nn.Module()
        whole = torch.randn(4, WIDTH, WIDTH)
        model.experts.w = nn.Parameter(distribute_tensor(whole, mesh["experts"], [Shard(0)]))
        return model, adamw(model)

    made, again = build(0), build(1)
    was = scenes.save("experts", made, idle=lambda name, step: name == "experts.w" and step == 1 and rank() % 2 == 1)
    scenes.resume("experts", again, was, "experts")
    model = net(1)
    model["experts"] = nn.Module()
    model.experts.w = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))
    scenes.resume("experts", (model, adamw(model)), was, "experts elsewhere")
    steps = [float(optimizer.state[model.experts.w]["step"]) for model, optimizer in (made, again)]
    results.tell("experts", steps=steps, idle=rank() % 2 == 1)


def replicas(results: Results, scenes: Scenes) -> None:
    """Replicas of shards that differ."""
    model = fully_shard(net(0), mesh=mesh_of(replicate=2, shard=2))
    if rank() >= 2:
        model.head.weight.to_local().data.add_(1)
    made = model, adamw(model)
    scenes.save("replicas", made)
    with scenes.attach("replicas", made) as ckpt:
        ckpt.resume()
        assert ckpt.certificate is not None
        results.tell("replicas", exact=ckpt.certificate.exact, problems=list(ckpt.certificate.problems))


def pipeline(stages: int, seed: int) -> Any:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    torch.manual_seed(seed)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    model = PipelineModule(layers, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        parameter.data = torch.randn(parameter.shape, generator=generator) / WIDTH
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def train(engine: Any, step: int) -> float:
    generator = torch.Generator().manual_seed(100 * step + engine.grid.get_data_parallel_rank())
    return float(engine.train_batch(iter([tuple(torch.randn(2, 2, WIDTH, generator=generator)) for _ in range(2)])))


def of_deepspeed(results: Results, scenes: Scenes) -> None:
    """Its pipelines at ZeRO stage 0 are carried; at stage 1, and under its tensor parallelism, refused."""
    engine = pipeline(2, 0)
    with scenes.attach("deepspeed", engine) as ckpt:
        for step in range(STEPS):
            train(engine, step)
            ckpt.step()
            ckpt.flush()
    was = joined((engine.module, engine.optimizer))
    losses = [train(engine, step) for step in range(STEPS, STEPS + 3)]
    for stages in (2, 4):
        other = pipeline(stages, 1)
        with scenes.attach("deepspeed", other) as ckpt:
            step = ckpt.resume()
        now = joined((other.module, other.optimizer))
        wrong = sorted(was.keys() ^ now.keys()) + [
            key for key in was.keys() & now.keys() if not alike(was[key], now[key])
        ]
        same = stages != 2 or [train(other, step) for step in range(STEPS, STEPS + 3)] == losses
        results.tell("pipeline", stages=stages, step=step, steps=other.global_steps, wrong=wrong, same=same)
    results.tell("refused", what="AutoTP", text=refusal(tensor_parallel()))


def tensor_parallel() -> Any:
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, config={**settings, "tensor_parallel": {"autotp_size": 2}})
    tokens = torch.randint(64, (2, 9))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    return engine


def refusal(target: Any) -> str:
    try:
        adapter_for(target)
    except UnsupportedError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
