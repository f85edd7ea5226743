"""Whether stale layers should be coasted forward at a resume, and whether lost progress tells what a composite costs.

    python benchmarks/coasting.py [--rates 1e-3 1e-4] [--seeds 0 1 2 3 4] [--marks 700 720 740] [--few]
                                  [--results FILE.jsonl] [--summary]

To coast a stale version is to take the steps that it lacks with its own moments and no gradient: its weights move by
``rate * m / (sqrt(v) + eps)`` a step, corrected for bias, while m decays by beta1. That needs no bytes. Composites are
put together in memory from the states of one uninterrupted run, at the moments of its saves: what a resume of raw
saves gives. Each is trained to the end three times: as it is, coasted, and from its effective step.

Lost progress of a layer is the sum of ``rate * m^2 / (sqrt(v) + eps)`` over the steps that it lacks: how much loss
these steps took away, to first order, if m is the gradient. docs/benchmarks/quality.md says what a gap is; a cost is a
gap at equal compute, with the steps that a resume goes back.

A rate of a seed that is in ``--results`` is not run again. One thread, float32.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.coasting_tables import AGE, WHOLE, tables
from benchmarks.learner import Course, Learner, sources
from benchmarks.quality_curves import went_on
from benchmarks.quality_results import load
from benchmarks.quality_settings import SHAPE, Setting, Span
from benchmarks.quality_trunk import State, place, placed, state_of, take
from store.certificate import LayerAge, effective_step

HEIGHT = 1e-3
"""The rate at which all runs learn the text first."""
SETTLE = 500
"""The step from which on the rate that is tried holds."""
SPAN = Span(start=600, first=700, last=740, end=790)
MARKS = (700, 720, 740)
GRID = 5  # steps between two states that are kept

Ages = Mapping[str, int]
"""Steps that a layer's version is old; layers that are not named are fresh."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Falling(Course):
    """Holds its rate up to ``SETTLE``, then ``rest`` of it up to ``hold``, and falls to 0 from there."""

    rest: float = 1.0

    def factor(self, step: int) -> float:
        return super().factor(step) * (1.0 if step <= SETTLE else self.rest)


class Plain(Learner):
    """Without autocast: several times faster on CPUs that have no bf16 instructions."""

    def _loss(self, windows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=windows, labels=windows).loss
        return loss


def setting_at(rate: float) -> Setting:
    """The small Llama of setting ``pretraining``, at another rate."""
    course = Falling(sources(), HEIGHT, SPAN.end, floor=0.0, rest=rate / HEIGHT)

    def make(course: Course, seed: int, init: int | None) -> Learner:
        return Plain(replace(SHAPE, held_out=128), course, seed, init=init)

    return Setting(f"{rate:g}", course, SPAN, make, grid=SPAN.end)


def layer_of(parameter: str) -> str:
    """The layer of a parameter, as Driftpoint groups them."""
    parts = parameter.split(".")
    return ".".join(parts[:3] if "layers" in parts else parts[:-1])


@dataclass
class Trunk:
    """The run that nothing interrupts. states, places: by step. progress: by step, layer -> summed since the start of
    (rate * m^2 / sqrt(v), rate * gradient * m / sqrt(v))."""

    names: list[str]
    layers: list[str]
    states: dict[int, State] = field(default_factory=dict)
    places: dict[int, State] = field(default_factory=dict)
    progress: dict[int, dict[str, tuple[float, float]]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def distance(self, layer: str, at: int, age: int) -> tuple[float, float, int]:
        """(distance to the version so many steps old, its norm, elements)."""
        new, old = self.states[at]["model"], self.states[at - age]["model"]
        own = [name for name in self.names if layer_of(name) == layer]
        apart = sqrt(sum(float((new[name] - old[name]).square().sum()) for name in own))
        return apart, sqrt(sum(float(old[name].square().sum()) for name in own)), sum(new[name].numel() for name in own)


def trunk_of(setting: Setting, seed: int, base: State) -> Trunk:
    """From the base to the end."""
    learner = take(setting.begin(seed), base)
    names = [name for name, _ in learner.model.named_parameters()]
    trunk = Trunk(names, list(dict.fromkeys(map(layer_of, names))))
    gained = dict.fromkeys(trunk.layers, (0.0, 0.0))

    def measure(optimizer: torch.optim.Optimizer, *_: object) -> None:
        group = optimizer.param_groups[0]
        for name, parameter in zip(names, group["params"], strict=True):
            slots = optimizer.state[parameter]
            move = group["lr"] * _direction(slots, int(slots["step"]), group)
            first = slots["exp_avg"] / (1 - group["betas"][0] ** int(slots["step"]))
            by_moment, by_gradient = gained[layer_of(name)]
            by_moment += float((move * first).sum())
            by_gradient += float((move * parameter.grad).sum())
            gained[layer_of(name)] = by_moment, by_gradient

    learner.optimizer.register_step_post_hook(measure)
    for step in range(SETTLE + 1, SPAN.end + 1):
        learner.step()
        if step <= SPAN.last:
            trunk.places[step] = placed(learner)
            trunk.progress[step] = dict(gained)
            if step >= SPAN.start and step % GRID == 0:
                trunk.states[step] = state_of(learner)
        if step in (*MARKS, SPAN.end):
            trunk.losses[step] = learner.loss()
    return trunk


def _direction(slots: Mapping[str, torch.Tensor], count: int, group: Mapping[str, Any]) -> torch.Tensor:
    """What Adam moves by at rate 1, from moments of ``count`` steps."""
    beta1, beta2 = group["betas"]
    second = (slots["exp_avg_sq"] / (1 - beta2**count)).sqrt() + group["eps"]
    return slots["exp_avg"] / (1 - beta1**count) / second


def composite(trunk: Trunk, at: int, weights: Ages, moments: Ages) -> State:
    """The state of ``at`` with older versions of some layers. Its place and Adam's count are those of ``at``."""
    fresh = trunk.states[at]
    model, slots = dict(fresh["model"]), dict(fresh["optimizer"]["state"])
    for number, name in enumerate(trunk.names):
        layer = layer_of(name)
        model[name] = trunk.states[at - weights.get(layer, 0)]["model"][name]
        old = trunk.states[at - moments.get(layer, 0)]["optimizer"]["state"][number]
        slots[number] = {**old, "step": slots[number]["step"]}
    return {**fresh, "model": model, "optimizer": {**fresh["optimizer"], "state": slots}}


def coasted(trunk: Trunk, state: State, ages: Ages, slots: str) -> State:
    """A composite, coasted. ages: of its moments, and of its weights where they move. slots: of w, m and v; ``/2``:
    weights go half as far."""
    group = state["optimizer"]["param_groups"][0]
    beta1, beta2 = group["betas"]
    model, held = dict(state["model"]), dict(state["optimizer"]["state"])
    for number, name in enumerate(trunk.names):
        age, own = ages.get(layer_of(name), 0), dict(held[number])
        if "w" in slots and age:
            steps = beta1 * (1 - beta1**age) / (1 - beta1)  # the sum of beta1^j, j from 1 to age
            steps *= 0.5 if slots.endswith("/2") else 1.0
            model[name] = model[name] - group["lr"] * steps * _direction(own, int(own["step"]) - age, group)
        for slot, letter, beta in (("exp_avg", "m", beta1), ("exp_avg_sq", "v", beta2)):
            own[slot] = own[slot] * beta**age if letter in slots else own[slot]
        held[number] = own
    return {**state, "model": model, "optimizer": {**state["optimizer"], "state": held}}


def in_turn(layers: Sequence[str], k: int, period: int, turn: int) -> Ages:
    """Ages when each save holds the layers whose position modulo ``k`` is the turn."""
    return {layer: (turn - position) % k * period for position, layer in enumerate(layers)}


def cases(layers: Sequence[str], seed: int, at: int, few: bool) -> Iterator[tuple[str, Ages, Ages, tuple[str, ...]]]:
    """(row, ages of weights, ages of moments, variants: slots to coast, none for as it is, or ``effective``)."""
    coarse = in_turn(layers, 4, 20, at // 20 + seed)
    yield "parity 4 @20", coarse, coarse, ("", "effective", "w", "w/2", "wm", *(() if few else ("wmv", "m")))
    fine = in_turn(layers, 4, 5, at // 20 + seed)
    yield "parity 4 @5", fine, fine, ("", "effective", "w", *(() if few else ("w/2", "wm")))
    whole = dict.fromkeys(layers, AGE)
    yield WHOLE, whole, whole, ("", "w", *(() if few else ("w/2", "wm")))
    yield "moments in turn, 8 @10", {}, in_turn(layers, 8, 10, at // 20 + seed), ("", "m")
    chance = random.Random(f"{seed} {at}")
    for number in range(5):
        old = chance.sample(layers, chance.randint(1, len(layers)))
        mixed = {layer: chance.choice((10, 20, 40, 80)) for layer in old}
        yield f"mixed {number}", mixed, mixed, ("",)


def told(trunk: Trunk, at: int, ages: Ages) -> dict[str, float]:
    """What can be known of a composite when it is saved, as sums or means over layers."""
    every = {layer: ages.get(layer, 0) for layer in trunk.layers}
    far = {layer: trunk.distance(layer, at, age) for layer, age in every.items()}
    lost = [
        [now - then for now, then in zip(trunk.progress[at][one], trunk.progress[at - age][one], strict=True)]
        for one, age in every.items()
    ]
    elements = sum(count for *_, count in far.values())
    return {
        "staleness": fmean(every.values()),
        "staleness, by elements": sum(age * far[layer][2] for layer, age in every.items()) / elements,
        "squared drift": sum((apart / norm) ** 2 for apart, norm, _ in far.values()),
        "lost progress": sum(one[0] for one in lost),
        "lost progress, by gradients": sum(one[1] for one in lost),
    }


def back(trunk: Trunk, at: int, ages: Ages) -> int:
    """Steps to the save that a composite reads from and that is nearest to its effective step."""
    far = {layer: trunk.distance(layer, at, age) for layer, age in ages.items()}
    layers = [LayerAge(far[one][2], age, far[one][0] / far[one][1] if age else None) for one, age in ages.items()]
    stale = at - effective_step(at, layers)
    return min(sorted(set(ages.values())), key=lambda age: (abs(age - stale), -age))


def regained(trunk: Trunk, at: int, age: int) -> Record:
    """Of the movement of all weights in ``age`` steps, and what coasting makes of it: products of the two."""
    ages = dict.fromkeys(trunk.layers, age)
    old = composite(trunk, at, ages, ages)
    new, coast = trunk.states[at]["model"], coasted(trunk, old, ages, "w")["model"]
    moved = torch.cat([(new[name] - old["model"][name]).flatten() for name in trunk.names]).double()
    made = torch.cat([(coast[name] - old["model"][name]).flatten() for name in trunk.names]).double()
    return {"age": age, "both": float(moved @ made), "moved": float(moved @ moved), "made": float(made @ made)}


def runs(rate: float, seed: int, base: State, marks: Sequence[int], few: bool) -> Iterator[Record]:
    """All that one seed tells at one rate."""
    setting = setting_at(rate)
    trunk = trunk_of(setting, seed, base)
    yield {"part": "trunk", "losses": trunk.losses}
    worker = setting.begin(seed)

    def end(state: State, where: State | None = None) -> Record:
        take(worker, state)
        if where is not None:
            place(worker, where)
        losses = went_on(setting, worker)
        return {"begin": losses[min(losses)], "end": losses[SPAN.end]}

    if end(trunk.states[marks[-1]])["end"] != trunk.losses[SPAN.end]:
        raise RuntimeError("a resume of the exact state does not end as the uninterrupted run does")
    for at in marks:
        yield from ({"part": "regained", "at": at, **regained(trunk, at, age)} for age in (5, 10, 20, 40, 80))
        for row, weights, moments, variants in cases(trunk.layers, seed, at, few):
            known = told(trunk, at, weights)
            for variant in variants:
                state, steps = composite(trunk, at, weights, moments), 0
                if variant == "effective":
                    steps = back(trunk, at, weights)
                    ended = end(state, trunk.places[at - steps])
                else:
                    ended = end(coasted(trunk, state, moments, variant))
                gaps = {"shock": ended["begin"] - trunk.losses[at], "gap": ended["end"] - trunk.losses[SPAN.end]}
                yield {"part": "case", "at": at, "row": row, "variant": variant, "back": steps, **gaps, "told": known}


def base_of(seed: int) -> State:
    """What all rates begin with."""
    learner = setting_at(HEIGHT).begin(seed)
    for _ in range(SETTLE):
        learner.step()
    return state_of(learner)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 1e-4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--marks", type=int, nargs="+", default=list(MARKS), choices=MARKS, help="steps of failures")
    parser.add_argument("--few", action="store_true", help="leave out variants that change little")
    parser.add_argument("--results", type=Path, default=Path("coasting.jsonl"))
    parser.add_argument("--summary", action="store_true", help="run nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    done = {(one["rate"], one["seed"]) for one in load(options.results) if one["part"] == "done"}
    for seed in options.seeds if not options.summary else ():
        rates = [rate for rate in options.rates if (rate, seed) not in done]
        base = base_of(seed) if rates else {}
        for rate in rates:
            began = time.perf_counter()
            lines = [*runs(rate, seed, base, options.marks, options.few), {"part": "done"}]
            with options.results.open("a") as file:
                file.writelines(json.dumps({"rate": rate, "seed": seed, **one}) + "\n" for one in lines)
            print(f"rate {rate:g}, seed {seed}: {time.perf_counter() - began:.0f} s", flush=True)
    print("\n".join(tables(load(options.results))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
