"""Real training, recorded under ``observe``, and what each policy would have done with the same bytes.

    python benchmarks/simulated.py [--steps 300] [--json FILE]

A small Llama on real text (AdamW), three times: all layers alike at learning rate 1e-3 and at 1e-4, and layers whose
learning rates differ thirtyfold. Of every family of policies, raw and encoded, the recommendation's search takes the
member that makes the most of the same bytes an hour; compared is expected damage as docs/budget.md models it, by
docs/simulate.md. No recovered loss is measured here: benchmarks/quality.py does that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import monitor  # noqa: E402
from benchmarks.figures import Figure, report  # noqa: E402
from deploy.simulate.simulation import Limits, Recommendation, read_trace, recommend  # noqa: E402
from deploy.simulate.summary import Terms  # noqa: E402
from examples.stdlib_text import VOCABULARY, Batches, standard_library  # noqa: E402
from policies.replay.recorded_run import Costs, Run, run_of  # noqa: E402

EVERY = 5
SHARES = (4, 16)
"""Of what saving everything raw at every decision writes, one part in so many is allowed."""

REGIMES = {"1e-3": (1e-3, 1.0), "1e-4": (1e-4, 1.0), "layers apart": (1e-3, 30.0)}
"""Learning rate, and by how much it is less in the lower half of the layers."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    figures = []
    for name, (rate, apart) in REGIMES.items():
        with tempfile.TemporaryDirectory(prefix="driftpoint-bench-") as folder:
            run = recorded(Path(folder), options.steps, rate, apart)
        for share in SHARES:
            for exact in (True, False):
                figures += compared(f"{name}, 1/{share}", run, share, exact)
    return report("simulated", figures, options.json)


def recorded(folder: Path, steps: int, rate: float, apart: float) -> Run:
    """A run that only observes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
        )
    )  # fmt: skip
    lower = [p for name, p in model.named_parameters() if "layers.0" in name or "layers.1" in name or "embed" in name]
    lower += [p for name, p in model.named_parameters() if "layers.2" in name]
    chosen = {id(p) for p in lower}
    upper = [p for p in model.parameters() if id(p) not in chosen]
    optimizer = torch.optim.AdamW([{"params": lower, "lr": rate / apart}, {"params": upper, "lr": rate}])
    settings = {
        "store": str(folder / "store"), "every": EVERY, "policy": {"name": "observe", "inner": "full"},
        "metrics": {"enabled": False},
    }  # fmt: skip
    batches = iter(Batches(standard_library(1 << 21), length=64, size=8, seed=0))
    with monitor.attach((model, optimizer), settings) as ckpt:
        ckpt.resume()
        for _ in range(steps):
            batch = next(batches)
            optimizer.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            ckpt.step()
    return run_of(read_trace(folder / "store.trace.jsonl"))


def compared(name: str, run: Run, share: int, exact: bool) -> list[Figure]:
    """Damage under ``budget`` against the best of every other family, at the same bytes."""
    full = sum(unit.nbytes for unit in run.segments[-1].units) * len(run.decisions)
    limits = Limits(bytes_per_hour=full / share / (run.seconds / 3600), exact=exact)
    found = recommend(run, Terms(), limits, Costs())
    best = best_of(found)
    what = "raw" if exact else "any encoding"
    others = {family: damage for family, damage in best.items() if family != "budget"}
    return [
        Figure(f"{name}, {what}: budget / {family}", best["budget"] / damage, "x damage", family, 1.0)
        for family, damage in others.items()
    ]


def best_of(found: Recommendation) -> dict[str, float]:
    """Least expected damage of each family."""
    best: dict[str, float] = {}
    for one in found.tried:
        family = one.name.split()[0].rstrip(",")
        best[family] = min(best.get(family, float("inf")), one.exposure.total.mean)
    return best


if __name__ == "__main__":
    sys.exit(main())
