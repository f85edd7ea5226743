"""One model on every mesh, 4 ranks: save on each and train on, or, in another launch, resume what each saved on each,
or die inside a save; 2 ranks load what a merge wrote of it with stock DeepSpeed.

Models: a Llama of transformers with tied embeddings, and a mixture of experts. Usage: meshes.py SPEC.json
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from resume_jobs import Results, leave, rank, start_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import monitor
from merger.layouts.base import Target
from merger.merge import merge
from monitor.adapters import adapter_for
from monitor.adapters.dtensor import share_in_memory
from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.internals import hook_files

STEPS, MORE = 2, 5
VOCABULARY, WIDTH, INNER, EXPERTS = 201, 96, 384, 4
SLOTS = ("exp_avg", "exp_avg_sq")
Whole = dict[str, list[torch.Tensor]]


@dataclass(frozen=True)
class Job:
    target: Any
    step: Callable[[int], float]
    whole: Callable[[], Whole]  # weight, and moments if there are any, of each parameter here, gathered by torch


def llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(settings)


class Experts(nn.Module):
    """Every token goes to its best expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, best = self.router(x).softmax(-1).max(-1)
        chosen = F.one_hot(best, EXPERTS).to(x.dtype) * weight[..., None]
        inner = torch.einsum("bte,btd,edf->btef", chosen, x, full(self.up)).relu()
        return x + torch.einsum("btef,efd->btd", inner, full(self.down))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Experts(), Experts()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return predicted(self.head(x), tokens)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def predicted(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def batch(step: int, data_rank: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(100 * step + data_rank))


def average(model: nn.Module, group: Any) -> None:
    """What DistributedDataParallel does, also for DTensors."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(grad, group=group)
            grad /= dist.get_world_size(group)


def job(model: Any, data_rank: int, group: Any = None, loss_of: Callable[..., Any] | None = None) -> Job:
    """group: ranks over which gradients are averaged by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def step(number: int) -> float:
        tokens = batch(number, data_rank)
        loss = model(input_ids=tokens, labels=tokens).loss if loss_of is None else loss_of(tokens)
        loss.backward()
        if group is not None:
            average(model, group)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return Job((model, optimizer), step, lambda: torch_state(model, optimizer))


def torch_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Whole:
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        name: [
            full(one).detach().clone() for one in (p, *(optimizer.state[p][slot] for slot in SLOTS if optimizer.state))
        ]
        for name, p in bare.named_parameters()
    }


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


PLAN: dict[str, Any] = {
    "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(), "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(), "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}  # fmt: skip


def tensor_parallel(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.model.layers:
        parallelize_module(layer, mesh, PLAN)
    return model


def sharded(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def replicated(model: nn.Module) -> nn.Module:
    """Otherwise its buckets are made anew after the first step, and sums of four ranks get another order."""
    return DistributedDataParallel(model, find_unused_parameters=True)


def columns(parameter: torch.Tensor) -> Shard:
    return Shard(parameter.ndim - 1)


def ddp(seed: int) -> Job:
    return job(replicated(llama(seed)), rank())


def fsdp(seed: int) -> Job:
    return job(sharded(llama(seed), mesh_of(data=4)), rank())


def fsdp_columns(seed: int) -> Job:
    return job(sharded(llama(seed), mesh_of(data=4), shard_placement_fn=columns), rank())


def descending(seed: int) -> Job:
    return job(sharded(llama(seed), DeviceMesh("cpu", [2, 0, 3, 1])), rank())


def hsdp(seed: int) -> Job:
    return job(sharded(llama(seed), mesh_of(replicate=2, shard=2)), rank())


def tp(seed: int) -> Job:
    mesh = mesh_of(data=2, tensor=2)
    return job(tensor_parallel(llama(seed), mesh["tensor"]), mesh.get_local_rank("data"), mesh.get_group("data"))


def fsdp_tp(seed: int) -> Job:
    mesh = mesh_of(data=2, tensor=2)
    return job(sharded(tensor_parallel(llama(seed), mesh["tensor"]), mesh["data"]), mesh.get_local_rank("data"))


def hsdp_tp(seed: int) -> Job:
    mesh = mesh_of(replicate=2, shard=1, tensor=2)
    model = sharded(tensor_parallel(llama(seed), mesh["tensor"]), mesh["replicate", "shard"])
    return job(model, mesh.get_local_rank("replicate"))


def pp(seed: int) -> Job:
    """2 stages x 2; the embeddings are in both, tied, and their gradients are added."""
    mesh = mesh_of(stage=2, data=2)
    number, model, data, stages = (
        mesh.get_local_rank("stage"),
        llama(seed),
        mesh["data"].get_group(),
        mesh.get_group("stage"),
    )
    own = [*model.model.layers.named_children()][number : number + 1]
    model.model.layers = nn.ModuleDict(dict(own))
    if number == 0:
        model.model.norm = model.lm_head = None
    model.forward = MethodType(_stage, model)
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=stages)
    schedule = ScheduleGPipe(stage, 2, loss_fn=predicted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def step(index: int) -> float:
        tokens, losses = batch(index, mesh.get_local_rank("data")), list[torch.Tensor]()
        if number == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens, losses=losses)
        average(model, data)
        dist.all_reduce(model.model.embed_tokens.weight.grad, group=stages)
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(losses))

    return Job((model, optimizer), step, lambda: torch_state(model, optimizer))


def _stage(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.model.norm is None:
        x = self.model.embed_tokens(x)
    places = torch.arange(x.shape[1])[None]
    turns = self.model.rotary_emb(x, position_ids=places)
    for layer in self.model.layers.values():
        x = layer(x, attention_mask=None, position_ids=places, position_embeddings=turns)
    return x if self.model.norm is None else self.lm_head(self.model.norm(x))


def mixture(seed: int) -> Mixture:
    torch.manual_seed(seed)
    return Mixture()


def moe_ddp(seed: int) -> Job:
    model = replicated(mixture(seed))
    return job(model, rank(), loss_of=model)


def ep(seed: int) -> Job:
    mesh = mesh_of(data=2, expert=2)
    model = mixture(seed)
    for layer in model.layers:
        for name in ("up", "down"):
            whole = getattr(layer, name).detach()
            setattr(layer, name, nn.Parameter(distribute_tensor(whole, mesh["expert"], [Shard(0)])))
    return job(model, mesh.get_local_rank("data"), mesh.get_group("data"), model)


def zero(stage: int, seed: int, model: Callable[[int], Any] = llama, **more: Any) -> Job:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1 << 14, "memory_efficient_linear": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **more,
    }
    engine, *_ = deepspeed.initialize(model=model(seed), config=settings)

    def step(number: int) -> float:
        tokens = batch(number, rank())
        loss = engine(tokens) if model is mixture else engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    def whole() -> Whole:
        adapter, every = adapter_for(engine), list[Any]([None] * dist.get_world_size())
        dist.all_gather_object(every, [(one.fragment, one.tensor.clone()) for one in adapter.owned()])
        out: Whole = {}
        for fqn, info in adapter.tensors().items():
            own = sorted((f.slot, f.start, t) for found in every for f, t in found if f.fqn == fqn)
            slots = dict.fromkeys(("fp32", *SLOTS))
            found = [[t for slot, _, t in own if slot == wanted] for wanted in slots]
            out[fqn] = [torch.cat(parts).view(info.shape) for parts in found if parts]
        return out

    return Job(engine, step, whole)


LLAMAS: dict[str, Callable[[int], Job]] = {
    "ddp": ddp, "fsdp": fsdp, "fsdp-columns": fsdp_columns, "descending": descending, "hsdp": hsdp, "tp": tp,
    "fsdp-tp": fsdp_tp, "hsdp-tp": hsdp_tp, "pp": pp, "zero1": lambda seed: zero(1, seed),
    "zero2": lambda seed: zero(2, seed), "zero3": lambda seed: zero(3, seed),
}  # fmt: skip
MIXTURES: dict[str, Callable[[int], Job]] = {
    "moe-ddp": moe_ddp, "ep": ep, "moe-zero1": lambda seed: zero(1, seed, mixture),
    "moe-zero2": lambda seed: zero(2, seed, mixture), "moe-zero3": lambda seed: zero(3, seed, mixture),
}  # fmt: skip
FAMILIES = (LLAMAS, MIXTURES)


def attached(case: str, made: Job, directory: Path, **more: Any) -> monitor.Checkpointer:
    settings = {"store": str(directory / case), "every": STEPS, "metrics": {"enabled": False}, **more}
    return monitor.attach(made.target, settings)


def joined(made: Job) -> Whole:
    """The whole state, of all stages."""
    written, every = io.BytesIO(), [b""] * dist.get_world_size()
    torch.save(made.whole(), written)  # at once: pickled by itself, each tensor takes longer to read than to train
    dist.all_gather_object(every, written.getvalue())
    return {name: found for one in every for name, found in torch.load(io.BytesIO(one), weights_only=True).items()}


def misplaced() -> list[str]:
    """DTensors whose share is not the part of ``full_tensor()`` that this rank has: uneven, and over odd meshes."""
    made: dict[str, tuple[nn.Module, Callable[[nn.Module], Any]]] = {}
    mesh, cube = mesh_of(data=2, tensor=2), mesh_of(a=2, b=1, c=2)
    for rows in (8, 5, 3):
        for name, plan in (("rows", ColwiseParallel()), ("columns", RowwiseParallel())):
            model = parallelize_module(nn.Sequential(nn.Linear(7, rows)), mesh["tensor"], {"0": plan})
            made[f"{rows} {name}"] = model, partial(fully_shard, mesh=mesh["data"])
        made[f"{rows} descending"] = nn.Linear(7, rows), partial(fully_shard, mesh=DeviceMesh("cpu", [2, 0, 3, 1]))
    tensors = {}
    for name, (model, shard) in made.items():
        shard(model)
        tensors |= {f"{name} {number}": one for number, one in enumerate(model.parameters())}
    cuts = [[Shard(0), Replicate(), Shard(0)], [Shard(1), Shard(0), Shard(2)], [Replicate(), Shard(1), Shard(1)]]
    tensors |= {str(cut): distribute_tensor(torch.randn(5, 7, 3), cube, cut) for cut in cuts}
    wrong = []
    for name, tensor in tensors.items():
        share, local = share_in_memory(tensor, name)
        whole, inside = tensor.full_tensor(), zip(share.box.offsets, share.box.sizes, strict=True)
        if not torch.equal(whole[tuple(slice(offset, offset + size) for offset, size in inside)], local):
            wrong.append(name)
    return wrong


def save(results: Results, directory: Path) -> None:
    results.tell("shares", misplaced=misplaced())
    for case, build in [item for family in FAMILIES for item in family.items()]:
        made = build(0)
        with attached(case, made, directory) as ckpt:
            for step in range(STEPS):
                made.step(step)
                ckpt.step()
        state = joined(made)
        if rank() == 0:
            torch.save(state, directory / f"{case}.pt")
        results.tell("trained", case=case, losses=[made.step(step) for step in range(STEPS, STEPS + MORE)])


def mixed(results: Results, directory: Path) -> None:
    """An engine resumes boxes and saves a part of the layers; DeepSpeed's own code loads what is merged from both."""
    if rank() == 0:
        shutil.copytree(directory / "fsdp-tp", directory / "mixed")
    dist.barrier()
    engine = zero(2, 1)
    with attached("mixed", engine, directory, every=1, policy={"name": "parity", "k": 4}) as ckpt:
        engine.step(ckpt.resume())
        ckpt.step()
        ckpt.flush()
        ckpt.close(save=False)
    resumed = zero(2, 2)
    with attached("mixed", resumed, directory) as ckpt:
        ckpt.resume()
        ckpt.close(save=False)
    was, boxes = joined(resumed), 0
    if rank() == 0:
        catalog = open_catalog(LocalFiles(directory / "mixed"))
        boxes = sum(unit.boxes for unit in catalog.manifest(catalog.saves()[0]).units)
        merge(directory / "mixed", directory / "deepspeed", target=Target("deepspeed", zero_stage=2, world_size=4))
        merge(directory / "mixed", directory / "universal", target=Target("universal"))
    dist.barrier()
    for layout, more in (("deepspeed", {}), ("universal", {"checkpoint": {"load_universal": True}})):
        stock = zero(2, 3, **more)
        stock.target.load_checkpoint(str(directory / layout))
        now = joined(stock)
        wrong = [name for name in was.keys() | now.keys() if not all(map(torch.equal, was[name], now[name]))]
        results.tell("mixed", layout=layout, boxes=boxes, wrong=wrong)


def stock(results: Results, directory: Path, cases: list[tuple[str, int, list[str], dict[str, Any]]]) -> None:
    """DeepSpeed's own code loads a universal checkpoint of each mesh with the printed lines, and trains on."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    for number, (case, stage, lines, more) in enumerate(cases):
        model = mixture if case in MIXTURES else llama
        made = zero(stage, 1, model, checkpoint={"load_universal": True}, gradient_clipping=0.0, **more)
        engine, was = made.target, torch.load(directory / f"{case}.pt", weights_only=True)
        exec("\n".join(lines), {"torch": torch, "engine": engine})
        found = {}
        for name, parameter in engine.module.named_parameters():
            with GatheredParameters(parameter, enabled=stage == 3):
                working = parameter.detach().clone()
            found[name] = [safe_get_full_fp32_param(parameter)]
            found[name] += [safe_get_full_optimizer_state(parameter, slot) for slot in SLOTS]
            found[name].append(working.float())
        wrong = sorted(was.keys() ^ found.keys())
        for name, kept in was.items():
            wanted = [*kept, kept[0].to(working.dtype).float()]
            wrong += [name] if not all(map(torch.equal, found[name], wanted)) else []
        steps = {float(state["step"]) for state in engine.optimizer.optimizer.state.values()}
        counters = [engine.global_steps, engine.global_samples, engine.optimizer.optimizer.param_groups[0]["lr"]]
        losses = [] if model is mixture else [made.step(step) for step in range(STEPS, STEPS + MORE)]
        told = {"wrong": wrong, "steps": sorted(steps), "counters": counters, "losses": losses}
        results.tell("stock", number=number, dtype=str(working.dtype), **told)


KILLS = {
    "ddp": (3, "write", "rank-00003.safetensors"),
    "fsdp": (1, "sync", "rank-00001.json"),
    "hsdp": (1, "write", "rank-00001.safetensors"),
    "tp": (2, "link", "rank-00002.json"),
    "fsdp-tp": (3, "sync", "rank-00003.safetensors"),
    "pp": (2, "create", "rank-00002.json"),
    "ep": (0, "link", "manifests/"),
}
"""By mesh: the rank that dies, and before what, in the second of its saves."""


def die(case: str, directory: Path) -> None:
    victim, *at = KILLS[case]

    def before(operation: str, path: str) -> None:
        if operation == at[0] and at[1] in path:
            os.kill(os.getpid(), signal.SIGKILL)

    made = {**LLAMAS, **MIXTURES}[case](0)
    ckpt = attached(f"killed-{case}", made, directory)
    for step in range(2 * STEPS):
        made.step(step)
        ckpt.step()
        ckpt.flush()
        if rank() == victim and step == STEPS - 1:
            hook_files(ckpt).before = before
    assert rank() != victim, f"rank {victim} did not die"
    time.sleep(120)  # until torchrun ends all


def resume(results: Results, directory: Path, pairs: list[list[str]]) -> None:
    mixed(results, directory)
    builds = {**LLAMAS, **MIXTURES}
    for source, target in pairs:
        made = builds[target](1)
        with attached(source, made, directory) as ckpt:
            step, exact = ckpt.resume(), ckpt.certificate is not None and ckpt.certificate.exact
        whole = directory / f"{source.removeprefix('killed-')}.pt"
        was, now = torch.load(whole, weights_only=True), joined(made)
        wrong = sorted(was.keys() ^ now.keys())
        wrong += [name for name in was.keys() & now.keys() if not all(map(torch.equal, was[name], now[name]))]
        losses = [made.step(one) for one in range(step, step + MORE * (source.removeprefix("killed-") == target))]
        results.tell("resumed", source=source, target=target, step=step, exact=exact, wrong=wrong, losses=losses)


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=True)
    torch.set_num_threads(1)
    results, directory = Results(spec["results"]), Path(spec["directory"])
    incarnation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if spec.get("kill") and incarnation < len(KILLS):
        die([*KILLS][incarnation], directory)
    elif spec.get("stock"):
        stock(results, directory, spec["stock"])
    elif spec["pairs"]:
        resume(results, directory, spec["pairs"])
    elif not spec.get("kill"):
        save(results, directory)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
