"""What others store of the same training state, and what training makes of it.

    python benchmarks/encoding_others.py [--rate 1e-4] [--beta2 0.999] [--seeds 3] [--excp FOLDER] [--json FILE]

A Llama of five million parameters trains on after a short pretraining. Its state is stored four times, every ten
steps: by DCP with its ``ZStandard`` extension, ZipNN where it is installed, PaddleNLP's ``ckpt_quant_stage`` by its
formulas, ExCP by its own code where ``--excp`` names a clone (https://github.com/Gaffey/ExCP) and faiss is installed.
Of what is not lossless: the largest ratio of an update to the exact one by its second moment alone, the error of all
updates, and the loss on held-out text after 60 more steps less that of an exact resume. One thread. No goals.
"""

from __future__ import annotations

import argparse
import copy
import io
import lzma
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.encoding_bytes import Warm  # noqa: E402
from benchmarks.figures import Figure, report  # noqa: E402
from benchmarks.learner import Course, Learner, Shape, at_rate, sources  # noqa: E402
from monitor.config.schema import ENCODINGS  # noqa: E402
from monitor.save.torch_codecs import encoded_chunks, encoder_named  # noqa: E402
from store.encoding import encoding_named  # noqa: E402

SHAPE = Shape(hidden=256, inner=704, layers=6, heads=4, windows=4, length=64)  # all rows come out even by 32
SLOTS = ("fp32", "exp_avg", "exp_avg_sq")
EPS = 1e-8
EVERY, SAVES, AFTER = 10, 4, 60

State = list[dict[str, torch.Tensor]]
"""The slots of each parameter."""

Stored = tuple[State, float | None]
"""What is read back, and the bytes of a save; None: not measured here."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--beta2", type=float, default=0.999, help="of AdamW")
    parser.add_argument("--seeds", type=int, default=3, help="orders of the text")
    parser.add_argument("--excp", type=Path, default=None, help="a clone of ExCP")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm = Warm(SHAPE, Course(sources(), 1e-3, 300, betas=(0.9, options.beta2)))
    ways: dict[str, Callable[[list[State]], Stored]] = {
        "exact": lambda states: (states[-1], None),
        "compact": lambda states: (_compact(states[-1]), None),
        "PaddleNLP O2, float32 weights": lambda states: _paddle(states[-1], 4, float32=True),
        "PaddleNLP O2": lambda states: _paddle(states[-1], 4, float32=False),
        "PaddleNLP O1, float32 weights": lambda states: _paddle(states[-1], 8, float32=True),
        "PaddleNLP O1": lambda states: _paddle(states[-1], 8, float32=False),
        "DCP, ZStandard": lambda states: (states[-1], _dcp_bytes(states[-1])),
        "ZipNN": lambda states: (states[-1], _zipnn_bytes(states, differences=False)),
        "ZipNN, differences by bytes": lambda states: (states[-1], _zipnn_bytes(states, differences=True)),
    }
    if options.excp is not None:
        sys.path.append(str(options.excp))
        ways["ExCP, LZMA"] = lambda states: _excp(states, torch.float16)
        ways["ExCP, LZMA, float32 centers"] = lambda states: _excp(states, torch.float32)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for seed in range(1, options.seeds + 1):
        for name, seen in _one_order(warm, at_rate(warm.course, options.rate), seed, ways).items():
            found[name].append(seen)
    return report("others", [figure for name, seen in found.items() for figure in _figures(name, seen)], options.json)


def _figures(name: str, seen: Sequence[dict[str, float]]) -> list[Figure]:
    figures = []
    if seen and "bytes" in seen[0]:
        figures.append(Figure(f"{name}: bytes a parameter and save", fmean(one["bytes"] for one in seen), "B"))
    if seen and seen[0]["error"] > 0:
        losses = ", ".join(f"{one['loss']:+.4f}" for one in seen)
        figures.append(Figure(f"{name}: largest ratio of an update", max(one["ratio"] for one in seen), "x"))
        figures.append(Figure(f"{name}: error of updates", fmean(one["error"] for one in seen), ""))
        figures.append(Figure(f"{name}: loss after {AFTER} steps", fmean(one["loss"] for one in seen), "nats", losses))
    return figures


def _one_order(
    warm: Warm, course: Course, seed: int, ways: dict[str, Callable[[list[State]], Stored]]
) -> dict[str, dict[str, float]]:
    learner = Learner(SHAPE, course, seed)
    learner.model.load_state_dict(warm.learner.model.state_dict())
    state = copy.deepcopy(warm.learner.optimizer.state_dict()["state"])
    learner.optimizer.load_state_dict({**learner.optimizer.state_dict(), "state": state})
    states = []
    for _ in range(SAVES):
        for _ in range(EVERY):
            learner.step()
        states.append(_slots_of(learner))
    batches, optimizer = copy.deepcopy(learner.batches), copy.deepcopy(learner.optimizer.state_dict())
    found: dict[str, dict[str, float]] = {}
    exact = 0.0
    for name, way in ways.items():
        try:
            decoded, nbytes = way(states)
        except ImportError as error:
            print(f"NOT MEASURED: {name}: {error}", file=sys.stderr)
            continue
        seen = found[name] = _updates(states[-1], decoded) | ({} if nbytes is None else {"bytes": nbytes})
        learner.optimizer.load_state_dict(copy.deepcopy(optimizer))
        learner.batches = copy.deepcopy(batches)
        with torch.no_grad():
            for parameter, slots in zip(learner.model.parameters(), decoded, strict=True):
                parameter.copy_(slots["fp32"])
                for slot in SLOTS[1:]:
                    learner.optimizer.state[parameter][slot].copy_(slots[slot])
        for _ in range(AFTER):
            learner.step()
        exact = learner.loss() if name == "exact" else exact
        seen["loss"] = learner.loss() - exact
    return found


def _slots_of(learner: Learner) -> State:
    states = learner.optimizer.state
    return [
        {"fp32": one.detach().clone(), **{slot: states[one][slot].clone() for slot in SLOTS[1:]}}
        for one in learner.model.parameters()
    ]


def _updates(exact: State, decoded: State) -> dict[str, float]:
    """The largest ratio by second moments, and the root mean square of the changes over that of the updates."""
    ratio, wrong, whole = 0.0, 0.0, 0.0
    for one, other in zip(exact, decoded, strict=True):
        roots = [slots["exp_avg_sq"].clamp_min(0).sqrt() + EPS for slots in (one, other)]
        ratio = max(ratio, float((roots[0] / roots[1]).max()))
        update = one["exp_avg"] / roots[0]
        wrong += float((other["exp_avg"] / roots[1] - update).double().square().sum())
        whole += float(update.double().square().sum())
    return {"ratio": ratio, "error": (wrong / whole) ** 0.5}


def _numel(state: State) -> int:
    return sum(slots["fp32"].numel() for slots in state)


def _compact(state: State) -> State:
    return [{slot: _decoded(slots[slot], ENCODINGS["compact"][slot]) for slot in SLOTS} for slots in state]


def _decoded(values: torch.Tensor, name: str) -> torch.Tensor:
    flat, encoder = values.flatten(), encoder_named(name)
    data = torch.empty(encoding_named(name).stored_bytes(flat.numel(), "F32"), dtype=torch.uint8)
    out = torch.empty_like(flat)
    for elements, encoded in encoded_chunks(flat.numel(), name):
        encoder.encode(flat[elements], data[encoded])
        encoder.decode(data[encoded], out[elements])
    return out.view(values.shape)


def _paddle(state: State, bits: int, *, float32: bool) -> Stored:
    """``ckpt_quant_stage`` O1 (8 bits, one scale for each column) and O2 (4 bits, one for 32 rows of each column).

    First moments are symmetric; of second moments, 1 / (√v + ε) is stored between its least and its largest. The
    weights are stored in bfloat16, and in float32 as well unless ``remove_master_weight`` is set. Vectors stay."""
    decoded, nbytes = State(), 0.0
    for slots in state:
        weights = slots["fp32"] if float32 else slots["fp32"].bfloat16().float()
        first, second = slots["exp_avg"], slots["exp_avg_sq"]
        nbytes += weights.numel() * (6 if float32 else 2)
        if first.ndim < 2:
            nbytes += 8 * first.numel()
        else:
            rows = 32 if bits == 4 else first.shape[0]
            grouped = first.reshape(-1, rows, first.shape[1])
            inverse = (1 / (second.sqrt() + EPS)).reshape(grouped.shape)
            steps = grouped.abs().amax(1, keepdim=True).clamp_min(EPS) / (2 ** (bits - 1) - 1)
            least, largest = inverse.amin(1, keepdim=True), inverse.amax(1, keepdim=True)
            fine = (largest - least).clamp_min(EPS) / (2**bits - 1)
            first = ((grouped / steps).round() * steps).view(first.shape)
            inverse = ((inverse - least) / fine).round() * fine + least
            second = (1 / inverse - EPS).square().view(second.shape)
            nbytes += 2 * first.numel() * bits / 8 + 12 * steps.numel()
        decoded.append({"fp32": weights, "exp_avg": first, "exp_avg_sq": second})
    return decoded, nbytes / _numel(state)


def _dcp_bytes(state: State) -> float:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._extension import ZStandard

    values = {f"{number}.{slot}": slots[slot] for number, slots in enumerate(state) for slot in SLOTS}
    with tempfile.TemporaryDirectory(prefix="driftpoint-bench-") as folder:
        dcp.save(values, storage_writer=dcp.FileSystemWriter(folder, _extensions=[ZStandard()]), no_dist=True)
        return sum(file.stat().st_size for file in Path(folder).glob("*.distcp")) / _numel(state)


def _zipnn_bytes(states: list[State], *, differences: bool) -> float:
    from zipnn import ZipNN  # type: ignore[import-not-found]

    nbytes = 0
    for slot in SLOTS:
        before, now = (torch.cat([slots[slot].flatten() for slots in one]).numpy().tobytes() for one in states[-2:])
        if differences:
            packer = ZipNN(bytearray_dtype="float32", threads=1, delta_compressed_type="byte")
            nbytes += len(packer.compress(now, delta_second_data=before))
        else:
            nbytes += len(ZipNN(bytearray_dtype="float32", threads=1).compress(now))
    return nbytes / _numel(states[-1])


def _excp(states: list[State], centers: torch.dtype) -> Stored:
    """As its scripts do: residuals to what was read back of the save before, the settings of its script, then LZMA."""
    import compress_pythia as excp  # type: ignore[import-not-found]

    reference, decoded, sizes = [slots["fp32"] for slots in states[0]], State(), []
    for state in states[1:]:
        packed, decoded = bytearray(), State()
        for before, slots in zip(reference, state, strict=True):
            with redirect_stdout(io.StringIO()):
                residual, _ = excp.prune(slots["fp32"] - before, 5e-5 / slots["exp_avg_sq"].mean().sqrt())
                first, second, _ = excp.prune_optimizer(slots["exp_avg"], slots["exp_avg_sq"], residual, 2.0)
                kept = [_clustered(excp, values, centers, packed) for values in (residual, first, second)]
            decoded.append({"fp32": kept[0] + before, "exp_avg": kept[1], "exp_avg_sq": kept[2]})
        reference = [slots["fp32"] for slots in decoded]
        sizes.append(len(lzma.compress(bytes(packed), preset=9)))
    return decoded, fmean(sizes) / _numel(states[-1])


def _clustered(excp: Any, values: torch.Tensor, centers: torch.dtype, packed: bytearray) -> torch.Tensor:
    """Add the 4-bit numbers of 15 clusters and their centers to ``packed``, and return what they stand for."""
    numbers, found = excp.quant(values, 4)
    if found is None:
        packed += numbers.contiguous().numpy().tobytes()
        return values
    numbers, found = torch.Tensor(numbers).to(torch.uint8), torch.Tensor(found).to(centers)
    packed += numbers.numpy().tobytes() + found.numpy().tobytes()
    back: torch.Tensor = excp.unquantize(found.float(), numbers.clone(), 4)
    return back.view(values.shape)


if __name__ == "__main__":
    sys.exit(main())
