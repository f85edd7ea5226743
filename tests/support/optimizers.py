"""Optimizers as people have them: torch's, those of packages, and small ones with each kind of state.

Each case says what becomes of it: ``None``, carried bit for bit, or the words by which it is refused.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer


class Net(nn.Module):
    """Matrices, vectors, a convolution in channels-last memory, a number."""

    def __init__(self, *, conv: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last) if conv else None  # type: ignore[call-overload]
        self.first = nn.Linear(16, 12)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, 12)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.conv is not None:
            image = x[:, :16].view(-1, 2, 8).repeat_interleave(4, 1).view(-1, 2, 4, 8)
            x = x + self.conv(image).flatten(1)[:, :16]
        return self.last(self.norm(self.first(x)).relu()) * self.gain


class Wide(nn.Sequential):
    """Matrices that are large enough for torchao to pack their state."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16))


class Hollow(Net):
    """With a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(conv=False)
        self.hollow = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.hollow.sum()


class Embedding(nn.Module):
    """Sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.abs().mul(4).long().clamp(max=15))


class Rule(Optimizer):
    """An optimizer whose subclasses update one parameter in :meth:`update`."""

    def __init__(self, parameters: Any, lr: float = 0.01, **hyper: Any) -> None:
        super().__init__(parameters, {"lr": lr, **hyper})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Rule):
    """Signs of a momentum (arXiv:2302.06675)."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        average = state.setdefault("exp_avg", torch.zeros_like(p))
        p.sub_(average.mul(0.9).add(grad, alpha=0.1).sign(), alpha=group["lr"])
        average.mul_(0.99).add_(grad, alpha=0.01)


class ScheduleFree(Rule):
    """Averaged iterates, and counters in the param group (arXiv:2405.15682)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, k=0, weight_sum=0.0, train_mode=True)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
        super().step()

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        z = state.setdefault("z", p.clone())
        z.sub_(grad, alpha=group["lr"])
        p.lerp_(z, 1 / group["k"])


class Shampoo(Rule):
    """Kronecker factors of other shapes than the parameter, in lists (arXiv:1802.09568)."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        matrix = grad.reshape(grad.shape[0], -1) if grad.ndim > 1 else grad.reshape(-1, 1)
        factors = state.setdefault("preconditioners", [torch.eye(size) for size in matrix.shape])
        factors[0].add_(matrix @ matrix.T)
        factors[1].add_(matrix.T @ matrix)
        state["roots"] = [_power(factor, -0.25) for factor in factors]
        state["step"] = state.get("step", 0) + 1
        left, right = state["roots"]
        p.sub_((left @ matrix @ right).reshape(p.shape), alpha=group["lr"])


class Soap(Rule):
    """Moments in the eigenbasis of Shampoo's factors; the bases lie column by column (arXiv:2409.11321)."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        matrix = grad.reshape(grad.shape[0], -1) if grad.ndim > 1 else grad.reshape(-1, 1)
        factor = state.setdefault("GG", torch.eye(len(matrix)))
        factor.lerp_(matrix @ matrix.T, 0.1)
        state["Q"] = torch.linalg.eigh(factor)[1]
        rotated = (state["Q"].T @ matrix).T
        square = state.setdefault("exp_avg_sq", torch.zeros_like(rotated))
        square.lerp_(rotated.square(), 0.1)
        p.sub_((state["Q"] @ (rotated / (square.sqrt() + 1e-8)).T).reshape(p.shape), alpha=group["lr"])


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-6).pow(exponent)) @ vectors.T


class Projector:
    """As in GaLore: an object that holds a matrix."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix


class GaLore(Rule):
    """Moments of a projected gradient (arXiv:2403.03507). ``as_object``: the projector is an object of its own."""

    def __init__(self, parameters: Any, *, as_object: bool) -> None:
        super().__init__(parameters)
        self._as_object = as_object

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        matrix = grad.reshape(grad.shape[0], -1) if grad.ndim > 1 else grad.reshape(-1, 1)
        if "projector" not in state:
            basis = torch.linalg.svd(matrix, full_matrices=False)[0][:, :2]
            state["projector"] = Projector(basis) if self._as_object else basis
        basis = state["projector"].matrix if self._as_object else state["projector"]
        average = state.setdefault("exp_avg", torch.zeros(basis.shape[1], matrix.shape[1]))
        average.lerp_(basis.T @ matrix, 0.1)
        p.sub_((basis @ average).reshape(p.shape), alpha=group["lr"])


class AdaLomo(Rule):
    """Second moments in attributes of the optimizer, which its state dict lacks (arXiv:2310.10195)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.exp_avg_sq = {index: torch.zeros_like(p) for index, p in enumerate(self.param_groups[0]["params"])}

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        index = next(index for index, one in enumerate(group["params"]) if one is p)
        square = self.exp_avg_sq[index].lerp_(grad.square(), 0.1)
        p.sub_(grad / (square.sqrt() + 1e-8), alpha=group["lr"])


class CountingSGD(Rule):
    """Counts its steps in an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step()

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"] / self.steps)


class Remembering(Rule):
    """Keeps a flag, a word, the latest norms and a number in attributes, and a count in its defaults."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.ready, self.phase, self.norms, self.largest = False, "a", deque[float](maxlen=2), np.float64(0)

    def step(self, closure: Any = None) -> None:
        if not self.ready:
            for p in self.param_groups[0]["params"]:
                self.state[p]["average"] = torch.zeros_like(p)
        self.ready, self.defaults["count"] = True, self.defaults.get("count", 0) + 1
        self.phase = self.phase.translate({97: 98, 98: 97})
        super().step()

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.norms.append(float(grad.norm()))
        self.largest = np.float64(max(self.largest, *self.norms))
        average = state["average"].lerp_(grad, 0.1 if self.phase == "a" else 0.2)
        p.sub_(average, alpha=group["lr"] * (sum(self.norms) + self.largest) / self.defaults["count"])


class Buffered(Rule):
    """A buffer and views of it among the hyperparameters, as in Muon for several ranks."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        buffers = [(p, torch.zeros(2, p.numel())) for p in parameters]
        super().__init__([{"params": [p], "buffer": buffer, "views": list(buffer)} for p, buffer in buffers])

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["buffer"].mul_(0.9).add_(grad.flatten())
        p.sub_(group["views"][0].view_as(p), alpha=group["lr"])


class Masters(Rule):
    """Masters and averages under the names that a store has for other things."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(fp32=p.detach().clone(), frozen=torch.zeros_like(p), buffer=torch.zeros_like(p))
        state["buffer"].lerp_(grad, 0.1)
        state["frozen"].add_(state["buffer"])
        p.copy_(state["fp32"].sub_(state["frozen"], alpha=group["lr"]))


class Learned(Rule):
    """A factor for each element, and one for all, that require gradients."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(each=nn.Parameter(torch.ones_like(p)), all=torch.ones((), requires_grad=True))
        state["each"].add_(grad.sign(), alpha=1e-3)
        state["all"].mul_(0.99)
        p.sub_(grad * state["each"] * state["all"], alpha=group["lr"])


class Viewed(Rule):
    """Two moments in one tensor, and views of it."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            both = torch.zeros(2, *p.shape)
            state.update(both=both, average=both[0])
        state["average"].lerp_(grad, 0.1)
        p.sub_(state["both"].sum(0), alpha=group["lr"])


class Aliased(Rule):
    """Calls the memory of a float32 parameter its master."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("master", p.data).sub_(grad, alpha=group["lr"])


class Both(Rule):
    """Two optimizers in one, whose state is theirs."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        parameters = self.param_groups[0]["params"]
        self.inner = [torch.optim.Adam(parameters[::2]), torch.optim.SGD(parameters[1::2], 0.01, momentum=0.9)]

    def step(self, closure: Any = None) -> None:
        for one in self.inner:
            one.step()


class Damped:
    """A wrapper around SGD with a factor for each parameter, in an attribute that appears with the first step."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr=0.01)
        self._state: dict[int, torch.Tensor] = {}

    def step(self, closure: Any = None) -> None:
        for index, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            factor = self._state.setdefault(index, torch.ones(())).mul_(0.9)
            parameter.grad = parameter.grad * factor
        self.optimizer.step()


class EightBit(Rule):
    """Codes of a byte with a scale for each block, and one quantization map that all parameters share."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.qmap = torch.linspace(-1, 1, 256)

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(state1=torch.full_like(p, 127, dtype=torch.uint8), absmax1=torch.zeros(-(-p.numel() // 8)))
            state.update(qmap1=self.qmap, step=0)
        blocks = torch.zeros(len(state["absmax1"]) * 8)
        blocks[: p.numel()] = state["qmap1"][state["state1"].flatten().int()]
        blocks = blocks.view(-1, 8) * state["absmax1"][:, None]
        average = blocks.flatten()[: p.numel()].view(p.shape).lerp(grad, 0.1)
        blocks.flatten()[: p.numel()] = average.flatten()
        state["absmax1"].copy_(blocks.abs().amax(1).clamp(min=1e-12))
        codes = (blocks / state["absmax1"][:, None] + 1).mul(127.5).round().to(torch.uint8)
        state["state1"].copy_(codes.flatten()[: p.numel()].view(p.shape))
        state["step"] += 1
        p.sub_(average, alpha=group["lr"])


class Packed(torch.Tensor):
    """Codes and a scale that behave as float32, made of plain tensors, as torchao's low-bit states are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Packed:
        return cls(inner["codes"], inner["scale"], *context)

    def read(self) -> torch.Tensor:
        return (self.codes.float() - 127) * self.scale

    def write(self, values: torch.Tensor) -> None:
        self.scale.copy_(values.abs().max().clamp(min=1e-12) / 127)
        self.codes.copy_((values / self.scale).round().add(127))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].signed)
        return func(*[one.read() if isinstance(one, cls) else one for one in args], **(kwargs or {}))


class PackedMomentum(Rule):
    """Keeps its momentum as a :class:`Packed`."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = Packed(torch.full(p.shape, 127, dtype=torch.uint8), torch.ones(()), True)
        average = state["momentum"].read().lerp(grad, 0.1)
        state["momentum"].write(average)
        p.sub_(average, alpha=group["lr"])


class Mixed(Rule):
    """Lists, dicts, None, a deque, numpy, a dtype, a tensor in two places, a transposed slot."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, state_dtype=torch.bfloat16, mask=None)

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            average = torch.zeros_like(p)
            state.update(average=average, again=average, none=None, step=0.0, recent=deque(maxlen=2))
            state.update(more=OrderedDict(b=[torch.zeros(3), None], a={"x": 1}), norm=np.float64(0.0), name=b"x")
            state["turned"] = (
                torch.zeros(p.shape[::-1]).permute(*reversed(range(p.ndim))) if p.ndim else torch.zeros(())
            )
        state["again"].lerp_(grad, 0.1)
        state["turned"].add_(grad)
        state["step"] += 0.5
        state["recent"].append(float(grad.norm()))
        state["more"]["b"][0].add_(1)
        state["norm"] = np.float64(state["norm"] + sum(state["recent"]))
        rounded = state["average"].to(group["state_dtype"]).to(p.dtype)
        p.sub_(rounded + 1e-3 * state["turned"] / (1 + float(state["norm"])), alpha=group["lr"] * state["step"])


@dataclass(frozen=True)
class Case:
    """An optimizer of a model. refused: what the refusal says, None if it is carried. source: its package."""

    name: str
    make: Callable[[nn.Module], Any]
    refused: str | None = None
    source: str = "torch"
    net: Callable[[], nn.Module] | None = None  # None: a net without a convolution
    closure: bool = False

    @property
    def key(self) -> str:
        return f"{self.source} {self.name}"

    def model(self) -> nn.Module:
        return Net(conv=False) if self.net is None else self.net()

    @property
    def installed(self) -> bool:
        return self.source == EXAMPLE or find_spec(self.source.partition(".")[0]) is not None


EXAMPLE = "an example"


def of(kind: Callable[..., Any], **hyper: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(model.parameters(), **hyper)


def own(name: str, kind: Callable[..., Any], refused: str | None = None, **hyper: Any) -> Case:
    return Case(name, of(kind, **hyper), refused, EXAMPLE)


def packaged(source: str, name: str, refused: str | None = None, *, net: Any = None, **hyper: Any) -> Case:
    """An optimizer of a package, imported when it is made."""

    def make(model: nn.Module) -> Any:
        optimizer = getattr(import_module(source), name.partition(" ")[0])(model.parameters(), **hyper)
        if source == "schedulefree":
            optimizer.train()
        return optimizer

    return Case(name, make, refused, source, net)


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2])]


OBJECT = "which a save would not bring back as it is"
TORCH = torch.optim
CASES: tuple[Case, ...] = (
    Case("Adadelta", of(TORCH.Adadelta)),
    Case("Adafactor", of(TORCH.Adafactor)),
    Case("Adagrad", of(TORCH.Adagrad)),
    Case("Adam (amsgrad)", of(TORCH.Adam, amsgrad=True)),
    Case("AdamW", of(TORCH.AdamW)),
    Case("AdamW (fused)", of(TORCH.AdamW, fused=True)),
    Case("AdamW, channels-last", of(TORCH.AdamW), net=Net),
    Case("AdamW, an empty parameter", of(TORCH.AdamW), net=Hollow),
    Case("Adamax", of(TORCH.Adamax)),
    Case("ASGD", of(TORCH.ASGD)),
    Case("LBFGS", of(TORCH.LBFGS, max_iter=4), closure=True),
    Case("Muon + AdamW", muon_and_adamw),
    Case("NAdam", of(TORCH.NAdam)),
    Case("RAdam", of(TORCH.RAdam)),
    Case("RMSprop (centered, momentum)", of(TORCH.RMSprop, centered=True, momentum=0.9)),
    Case("Rprop", of(TORCH.Rprop)),
    Case("SGD", of(TORCH.SGD, lr=0.01)),
    Case("SGD (momentum), channels-last", of(TORCH.SGD, lr=0.01, momentum=0.9), net=Net),
    Case("SparseAdam", of(TORCH.SparseAdam), net=Embedding),
    own("Lion", Lion),
    own("SGD, schedule-free", ScheduleFree),
    own("Shampoo", Shampoo),
    own("SOAP", Soap),
    own("GaLore", GaLore, as_object=False),
    own("GaLore, projector as an object", GaLore, f"'projector' of gain as a .*Projector, {OBJECT}", as_object=True),
    own("AdaLomo", AdaLomo, r"AdaLomo keeps a value that changes, in its attribute exp_avg_sq\[0\]"),
    own("a counter in an attribute", CountingSGD),
    own("plain values in attributes and defaults", Remembering),
    own("a buffer and its views in a group", Buffered),
    own("state named as in a store", Masters),
    own("a learned rate", Learned),
    own("a view of other state", Viewed, r"Viewed keeps '(both|average)' of \S+ as a view of other state"),
    own(
        "the parameter's own memory", Aliased, "Aliased keeps 'master' of .* as a view of other state or of a parameter"
    ),
    own("two optimizers in one", Both, r"Both keeps another optimizer, with state, in its attribute inner\[0\]"),
    own("a wrapper with an attribute", Damped, r"Damped keeps a value that changes, in its attribute _state\[0\]"),
    own("codes of 8 bits, a shared map", EightBit),
    own("a low-bit tensor subclass", PackedMomentum),
    own("lists, dicts, None, dtypes", Mixed),
    packaged("bitsandbytes.optim", "AdamW8bit", min_8bit_size=1),
    packaged("bitsandbytes.optim", "Lion8bit", min_8bit_size=1),
    packaged("pytorch_optimizer", "CAME"),
    packaged("pytorch_optimizer", "GaLore"),
    packaged("pytorch_optimizer", "Kron"),
    packaged("pytorch_optimizer", "MADGRAD", "MADGRAD keeps state under 'k', which is not a parameter"),
    packaged("pytorch_optimizer", "Prodigy"),
    packaged("pytorch_optimizer", "ScalableShampoo", f"'pre_conditioner' of gain as a .*PreConditioner, {OBJECT}"),
    packaged("pytorch_optimizer", "SCION", f"'norm_type' of param group 0 as a .*LMONorm, {OBJECT}"),
    packaged("pytorch_optimizer", "Shampoo"),
    packaged("pytorch_optimizer", "SOAP"),
    packaged("pytorch_optimizer", "StableSPAM"),
    packaged("schedulefree", "AdamWScheduleFree"),
    packaged("schedulefree", "RAdamScheduleFree"),
    packaged("torchao.optim", "AdamW4bit", net=Wide),
    packaged("torchao.optim", "AdamW8bit", net=Wide),
    packaged("torchao.optim", "AdamWFp8", net=Wide),
)
