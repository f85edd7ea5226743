"""How well a sample foretells the packed size, on normal values and on the state of a real optimizer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from store.encoding import CHUNK, ENCODINGS
from store.encoding.estimate import SAMPLE_RUN, SAMPLE_RUNS, estimate, sample_runs
from store.encoding.packing import packed_bound
from store.encoding.stream import Packing, chunked, encoded

Floats = NDArray[np.float32]


def trained(slot: str) -> tuple[Floats, Floats]:
    """A slot of an embedding, whose rows are seen more or less often, at two steps of AdamW."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(6000, 128)
    head = torch.nn.Linear(128, 50)
    optimizer = torch.optim.AdamW([*table.parameters(), *head.parameters()], lr=1e-3)
    states = []
    for step in range(30):
        words = (torch.rand(2048) ** 3 * 6000).long()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(table(words)), words % 50).backward()
        optimizer.step()
        if step in (24, 29):
            source = table.weight if slot == "fp32" else optimizer.state[table.weight][slot]
            states.append(source.detach().numpy().astype("<f4").reshape(-1).copy())
    return states[0], states[1]


def check(name: str, values: Floats, old: Floats | None = None) -> None:
    encoding = ENCODINGS[name]
    base = None if old is None else [encoding.encode(chunk) for chunk in chunked(old)]
    real = sum(map(len, encoded(chunked(values), encoding, values.size, "F32", Packing(1, base))))
    runs = sample_runs(values.size)
    sample_base = None if old is None else encoding.encode(np.concatenate([old[run] for run in runs]))
    guess = estimate(
        encoding, "F32", values.size, np.concatenate([values[run] for run in runs]), level=1, base=sample_base
    )
    assert guess == pytest.approx(real, rel=0.2)
    assert guess <= packed_bound(encoding, values.size, "F32")


@pytest.mark.parametrize("name", sorted(ENCODINGS))
@pytest.mark.parametrize("numel", [3000, CHUNK + 12345])
def test_normal_values(name: str, numel: int) -> None:
    values = np.abs(np.random.default_rng(0).standard_normal(numel) * 1e-3).astype("<f4")
    check(name, values)
    check(name, values, np.abs(values + np.random.default_rng(1).standard_normal(numel).astype("<f4") * 1e-5))


@pytest.mark.parametrize("slot", ["fp32", "exp_avg", "exp_avg_sq"])
def test_training_state(slot: str) -> None:
    old, values = trained(slot)
    for name in ENCODINGS:
        if name != "int8-sqrt-block" or slot == "exp_avg_sq":
            check(name, values)
            check(name, values, old)


def test_runs_are_spread_over_the_whole_fragment() -> None:
    assert sample_runs(0) == []
    assert sample_runs(77) == [slice(0, 77)]
    for numel in (SAMPLE_RUN * SAMPLE_RUNS + 1, CHUNK, 10 * CHUNK + 3):
        runs = sample_runs(numel)
        assert len(runs) == SAMPLE_RUNS
        assert runs[0].start == 0
        assert numel - 2 * SAMPLE_RUN < runs[-1].stop <= numel
        assert all(run.stop - run.start == SAMPLE_RUN and run.start % SAMPLE_RUN == 0 for run in runs)
        assert all(one.stop <= other.start for one, other in pairwise(runs))


def test_nothing_packs_to_nothing_and_tells_nothing() -> None:
    assert estimate(ENCODINGS["bf16"], "F32", 0, np.zeros(0, "<f4")) == 0
    with pytest.raises(ValueError, match="empty"):
        estimate(ENCODINGS["bf16"], "F32", 5, np.zeros(0, "<f4"))


def test_raw_takes_bytes_of_any_dtype() -> None:
    assert estimate(ENCODINGS["raw"], "BF16", 1000, np.zeros(2000, np.uint8)) < 100
