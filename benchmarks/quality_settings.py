"""What the quality benchmark trains: a setting is a learner, its course, and where in the course failures fall.

The rate of a course stays at its height until all failures are over and then falls in a straight line, so that drift
keeps its pace while states are saved, and losses at the end are quiet enough to be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import nn

from benchmarks.learner import Course, Learner, Shape, reference, sources
from benchmarks.quality_rows import FEW, LAGGED, LARGE, RULED

SHAPE = Shape(hidden=96, inner=256, held_out=32)
LARGE_SHAPE = Shape(hidden=768, inner=3072, layers=12, heads=12, windows=16, length=256, held_out=64, device="cuda")
"""114 million parameters."""

STRANGER = 1000
"""Added to a seed for the values that a resume must replace."""

TIERS = ("all", "usual", "few", "ruled", "lagged", "large")
"""Which rows are run; ``ruled``: those whose resumes are tried from several steps; ``lagged``: with several lags;
``large``: the fewest."""

_RANK = 4
_DECAY = 0.5
"""Of the rate, from one layer to the one below it."""


@dataclass(frozen=True)
class Span:
    """In steps: the first save, the failures' first and last, the end; where the rate begins to fall (None: last)."""

    start: int = 800
    first: int = 900
    last: int = 960
    end: int = 1000
    hold: int | None = None

    @property
    def falls(self) -> int:
        """The step from which on the rate falls."""
        return self.last if self.hold is None else self.hold


@dataclass(frozen=True)
class Setting:
    """make: a learner on a course, from a seed; another seed for its first values, where they are a stranger's.

    delays: how many steps shorter runs are made that tell what a step is worth. marks: failures a seed.
    grid: steps between two evaluations after a resume. ages: in steps, of slots in the calibration.
    rules: whether resumes are tried from several steps. rows: one of TIERS."""

    name: str
    course: Course
    span: Span
    make: Callable[[Course, int, int | None], Learner]
    delays: tuple[int, ...] = (120, 80, 40)
    marks: int = 2
    grid: int = 20
    ages: tuple[int, ...] = (10, 20, 40, 80)
    rules: bool = False
    rows: str = "usual"

    def runs(self, name: str, more: bool) -> bool:
        """Whether a row is run: its name, and whether it is one of the ``more``."""
        named = {"few": FEW, "ruled": RULED, "lagged": LAGGED, "large": LARGE}
        return name in named[self.rows] if self.rows in named else self.rows == "all" or not more

    def begin(self, seed: int, *, stranger: bool = False) -> Learner:
        """At step 0."""
        course = replace(self.course, steps=self.span.end, hold=self.span.falls)
        return self.make(course, seed, seed + STRANGER if stranger else None)


def _llama(course: Course, seed: int, init: int | None) -> Learner:
    return Learner(SHAPE, course, seed, init=init)


def _large(course: Course, seed: int, init: int | None) -> Learner:
    return Learner(LARGE_SHAPE, course, seed, init=init)


@cache
def _teacher() -> dict[str, torch.Tensor]:
    """Weights that have learned the sources."""
    torch.manual_seed(0)
    teacher = Learner(SHAPE, Course(sources(), 1e-3, 1000), STRANGER - 1)
    for _ in range(1000):
        teacher.step()
    return {name: value.clone() for name, value in teacher.model.state_dict().items()}


class Adapter(nn.Module):
    """A linear layer that stands still, and what is added to it: the product of two thin matrices, at first 0."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.randn(_RANK, inner.in_features) / inner.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(inner.out_features, _RANK))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = (values @ self.down.T) @ self.up.T
        return self.inner(values) + added  # type: ignore[no-any-return]


class Adapted(Learner):
    """Blocks stand still but for adapters of rank 4 at queries, values and the way down; embeddings, norm and head
    move as well."""

    def _new_model(self) -> nn.Module:
        model = super()._new_model()
        for block in model.model.layers:
            for parameter in block.parameters():
                parameter.requires_grad_(False)
            for owner, name in ((block.self_attn, "q_proj"), (block.self_attn, "v_proj"), (block.mlp, "down_proj")):
                setattr(owner, name, Adapter(getattr(owner, name)))
        return model

    def _groups(self) -> list[dict[str, object]]:
        return [{"params": [one for one in self.model.parameters() if one.requires_grad]}]

    def begin_pretrained(self) -> None:
        """Take the teacher's weights; adapters add nothing yet."""
        own = dict(self.model.named_parameters())
        for name, value in _teacher().items():
            inner = name.replace("_proj.weight", "_proj.inner.weight")
            own[inner if inner in own else name].data.copy_(value)


class Graded(Learner):
    """Everything moves, but each layer at half the rate of the one above it."""

    def _groups(self) -> list[dict[str, object]]:
        return [
            {"params": [value], "lr": self.course.rate * _DECAY**depth}
            for depth, value in _depths(self.model, self.shape.layers)
        ]

    def begin_pretrained(self) -> None:
        """Take the teacher's weights."""
        self.model.load_state_dict(_teacher())


def _depths(model: nn.Module, layers: int) -> Iterator[tuple[int, nn.Parameter]]:
    """Each parameter with the number of layers above it."""
    for name, value in model.named_parameters():
        if ".layers." in name:
            yield layers - int(name.split(".layers.")[1].split(".")[0]), value
        else:
            yield (layers + 1 if "embed" in name else 0), value


def _pretrained(kind: Callable[..., Learner], shape: Shape) -> Callable[[Course, int, int | None], Learner]:
    def make(course: Course, seed: int, init: int | None) -> Learner:
        learner = kind(shape, course, seed, init=init)
        if init is None:
            learner.begin_pretrained()  # type: ignore[attr-defined]
        return learner

    return make


def _minilm(course: Course, seed: int, init: int | None) -> Learner:
    from benchmarks.minilm import Finetuned  # needs a package of its own

    return _pretrained(Finetuned, Shape(windows=4, length=32, held_out=32))(course, seed, init)


def _of(name: str, rate: float, make: Callable[[Course, int, int | None], Learner], **more: object) -> Setting:
    """A setting whose course holds the other text, or the one that is told."""
    span = more.pop("span", Span())
    text = more.pop("text", None)
    betas = more.pop("betas", (0.9, 0.999))
    spurt = more.pop("spurt", 0)
    course = Course(reference() if text is None else text, rate, span.end, floor=0.0, spurt=spurt, betas=betas)  # type: ignore[arg-type, attr-defined]
    return Setting(name, course, span, make, **more)  # type: ignore[arg-type]


_READING: dict[str, object] = {"text": sources(), "spurt": 600}
_SHORT = Span(start=300, first=400, last=460, end=500)

MAKERS: dict[str, Callable[[], Setting]] = {
    "pretraining": lambda: _of("pretraining", 3e-4, _llama, **_READING, rules=True, rows="all"),
    "adapters": lambda: _of("adapters", 5e-4, _pretrained(Adapted, SHAPE), span=_SHORT),
    "layer-wise": lambda: _of("layer-wise", 3e-4, _pretrained(Graded, SHAPE), span=_SHORT),
    "minilm": lambda: _of(
        "minilm", 5e-5, _minilm, span=Span(200, 260, 300, 340), delays=(80, 60, 40), ages=(10, 20, 40, 60), rows="few"
    ),
    "falling": lambda: _of(
        "falling", 3e-4, _llama, **_READING, span=Span(hold=800), delays=(), rules=True, rows="ruled"
    ),
    "beta2-0.95": lambda: _of("beta2-0.95", 3e-4, _llama, **_READING, betas=(0.9, 0.95)),
    "pretraining-114m": lambda: _of(
        "pretraining-114m",
        3e-4,
        _large,
        text=_READING["text"],
        span=Span(start=200, first=250, last=280, end=320),
        delays=(30, 20, 10),
        rows="large",
    ),
}
"""By name. beta2-0.95 and falling: pretraining with another beta2, and with a rate that falls while failures come.
pretraining-114m: needs a GPU."""

DEFAULTS = tuple(name for name in MAKERS if name != "pretraining-114m")
"""What is run where nothing is named: on a CPU the others would take days."""


@cache
def setting_named(name: str) -> Setting:
    """One of :data:`MAKERS`."""
    return MAKERS[name]()


@dataclass(frozen=True)
class Tiny:
    """Kept for tests: a setting that takes seconds."""

    shape: Shape = field(default=Shape(hidden=32, inner=64, layers=2, heads=2, windows=2, length=16, held_out=8))

    def setting(self) -> Setting:
        """Trains and fails within 80 steps."""
        span = Span(start=20, first=50, last=60, end=80)
        course = Course(reference(), 1e-3, span.end)

        def make(course: Course, seed: int, init: int | None) -> Learner:
            return Learner(self.shape, course, seed, init=init)

        return Setting(
            "tiny", course, span, make, delays=(20, 10), marks=2, grid=10, ages=(10, 20), rules=True, rows="all"
        )
