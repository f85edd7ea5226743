"""Planning for very many ranks: parts as so many ranks would write them, generated; no payload, no tensors.

    python benchmarks/planning.py [--ranks 4096 8192 16384] [--json FILE]

A model of 126 layers (the shapes of a 405-billion-parameter Llama), its state cut as ZeRO-1/2 cuts it: one flat
tensor, equal partitions, so that a rank holds pieces of one or two parameters. What is timed is all that comes
before the first byte moves: the catalogue, every part read and checked, holes looked for, where each byte goes.

Then boxes: a matrix a layer, cut by a square mesh of all ranks (FSDP2 over tensor parallelism). Timed are the index of
all of them, looking for overlaps, and what a rank of a mesh of another form would read of it.

ZeRO-3 and FSDP2 cut every parameter over all ranks, which gives ranks x parameters x slots fragments. That is
generated at smaller numbers of ranks and told as time a fragment.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.figures import Figure, report  # noqa: E402
from merger.plan import Request, open_request, plan_merge  # noqa: E402
from store.catalog import open_or_create  # noqa: E402
from store.commit import commit  # noqa: E402
from store.fragments import FragmentIndex, Source  # noqa: E402
from store.names import RAW, Box, Fragment, SaveId, manifest_path, part_path, payload_path, segment_dir  # noqa: E402  # noqa: E402
from store.schema import Entry, GroupRecord, LayerRecord, ManifestRecord, PartRecord, TensorRecord, UnitRecord, to_bytes  # noqa: E402
from store.segment import parts_digest  # noqa: E402
from store.session import claim_epoch  # noqa: E402
from store.state_tree import encode  # noqa: E402
from store.storage.atomic import ensure_dir  # noqa: E402
from store.storage.local import LocalFiles  # noqa: E402

LAYERS = 126
SLOTS = ("fp32", "exp_avg", "exp_avg_sq")
HIDDEN, INNER, VOCABULARY, KEY = 16384, 53248, 128256, 1024
SAVE = SaveId(1000, 1)
DIGEST = "0" * 32
_RNG = {"python": random.Random(0).getstate()}
"""The bulkiest of the generators' states in JSON; the others are tensors."""
SMALL = (32, 64, 128)
"""Numbers of ranks at which every parameter is cut over all of them."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="driftpoint-bench-") as folder:
        return report("planning", planning(options.ranks, Path(folder)), options.json)


@dataclass(frozen=True)
class Parameter:
    layer: str
    fqn: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.shape[0] * (self.shape[1] if len(self.shape) > 1 else 1)


def planning(ranks: Sequence[int], folder: Path) -> list[Figure]:
    """Seconds to plan, by number of ranks; the manifest's size; and time a fragment where all are cut."""
    figures, per_rank = [], []
    for count in sorted(ranks):
        root = folder / f"even-{count}"
        generate(root, count, every_parameter=False)
        seconds, fragments = plan(root)
        per_rank.append(seconds / count)
        figures.append(
            Figure(f"planning {count} ranks x {LAYERS} layers", seconds, "s", f"{fragments} fragments", 60.0)
        )
    if ranks:
        figures.append(Figure("time a rank, largest against smallest", per_rank[-1] / per_rank[0], "x", "linear", 1.5))
        manifest = folder / f"even-{max(ranks)}" / manifest_path(SAVE)
        figures.append(Figure("manifest", manifest.stat().st_size / 1e6, "MB", f"{max(ranks)} ranks", 1.0))
    if ranks:
        figures += boxes(max(ranks))
    rates = []
    for count in SMALL if ranks else ():
        root = folder / f"sliced-{count}"
        generate(root, count, every_parameter=True)
        seconds, fragments = plan(root)
        rates.append(1e6 * seconds / fragments)
        figures.append(Figure(f"planning {count} ranks, every parameter cut", seconds, "s", f"{fragments} fragments"))
    if rates:
        figures.append(Figure("time a fragment, every parameter cut", statistics.median(rates), "us"))
        figures.append(Figure("the same, most ranks against fewest", rates[-1] / rates[0], "x", "linear", 1.5))
    return figures


def boxes(ranks: int) -> list[Figure]:
    """Seconds to index boxes of so many ranks, and to cover those of another mesh: of one rank, and of all ranks."""
    side = int(ranks**0.5)
    part = PartRecord(
        store_id=DIGEST, step=1, epoch=1, rank=0, world_size=ranks, plan=DIGEST, payload_bytes=0, header_bytes=0,
        header_xxh3_128=DIGEST, entries=(), run_state=None, run_tensors=(),
    )  # fmt: skip
    stored = [
        Source(part, _entry(Parameter("l", one.fqn, (HIDDEN, HIDDEN)), "fp32", one.start, one.numel, 0, one.box))
        for one in _mesh(side, side)
    ]
    began = time.perf_counter()
    index = FragmentIndex(stored)
    indexed = time.perf_counter() - began
    wanted = _mesh(side // 4, side * 4)[::64]
    began = time.perf_counter()
    copies = sum(len(index.cover(one)) for one in wanted)
    read = (time.perf_counter() - began) * 64 / ranks
    return [
        Figure(f"boxes of {ranks} ranks x {LAYERS} layers: index", indexed, "s", f"{len(stored)} boxes"),
        Figure("boxes: index, and what one rank reads", indexed + read, "s", "another mesh", 15.0),
        Figure("boxes: a copy", 1e6 * read * ranks / 64 / copies, "us", f"mean of {copies}"),
    ]


def _mesh(rows: int, columns: int) -> list[Fragment]:
    sizes = HIDDEN // rows, HIDDEN // columns
    return [
        Fragment.of_box(f"layers.{layer}", "fp32", Box((i * sizes[0], j * sizes[1]), sizes, (HIDDEN, HIDDEN)))
        for layer in range(LAYERS)
        for i in range(rows)
        for j in range(columns)
    ]


def plan(root: Path) -> tuple[float, int]:
    """(seconds to plan a merge, fragments planned)."""
    request = Request(root)
    began = time.perf_counter()
    found = plan_merge(open_request(request), request)
    seconds = time.perf_counter() - began
    return seconds, sum(len(extents) for extents in found.checkpoint.index.names().values())


def model() -> list[Parameter]:
    """Every parameter, in model order."""
    out = [Parameter("embed_tokens", "embed_tokens.weight", (VOCABULARY, HIDDEN))]
    for i in range(LAYERS):
        block = f"layers.{i}"
        shapes = {
            "q_proj": (HIDDEN, HIDDEN), "k_proj": (KEY, HIDDEN), "v_proj": (KEY, HIDDEN), "o_proj": (HIDDEN, HIDDEN),
            "gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER),
            "norm_1": (HIDDEN,), "norm_2": (HIDDEN,),
        }  # fmt: skip
        out += [Parameter(block, f"{block}.{name}.weight", shape) for name, shape in shapes.items()]
    return [*out, Parameter("norm", "norm.weight", (HIDDEN,)), Parameter("head", "head.weight", (VOCABULARY, HIDDEN))]


def generate(root: Path, ranks: int, *, every_parameter: bool) -> None:
    """A store with one commit of so many ranks; payloads are of the right size and have no content."""
    files = LocalFiles(root)
    store_id = open_or_create(files).store_id
    claim_epoch(files, store_id)
    ensure_dir(files, segment_dir(SAVE))
    parameters = model()
    pieces = _sliced(parameters, ranks) if every_parameter else _even(parameters, ranks)
    first, _ = encode({"framework": _run_state(parameters), "rng": _RNG, "user": []}, lambda _: None)
    others, _ = encode({"framework": None, "rng": _RNG, "user": []}, lambda _: None)
    parts, nbytes = [], 0
    for rank, own in enumerate(pieces):
        entries, offset = [], 0
        for slot in SLOTS:
            for parameter, start, numel in own:
                entries.append(_entry(parameter, slot, start, numel, offset))
                offset += 4 * numel
        part = PartRecord(
            store_id=store_id,
            step=SAVE.step,
            epoch=SAVE.epoch,
            rank=rank,
            world_size=ranks,
            plan=DIGEST,
            payload_bytes=offset,
            header_bytes=0,
            header_xxh3_128=DIGEST,
            entries=tuple(entries),
            run_state=others if rank else first,
            run_tensors=(),
        )
        data = to_bytes(part)
        (root / part_path(SAVE, rank)).write_bytes(data)
        with (root / payload_path(SAVE, rank)).open("wb") as file:
            file.truncate(offset)
        parts.append(data)
        nbytes += offset
    group = GroupRecord(world_size=ranks, payload_bytes=nbytes, parts=parts_digest(parts))
    commit(files, _manifest(store_id, parameters, ranks, group))


def _even(parameters: Sequence[Parameter], ranks: int) -> Iterator[list[tuple[Parameter, int, int]]]:
    """(parameter, start, numel) of each rank, the model being one flat tensor cut evenly."""
    ends = list(accumulate(parameter.numel for parameter in parameters))
    size, first = -(-ends[-1] // ranks), 0
    for rank in range(ranks):
        begin, end = rank * size, min((rank + 1) * size, ends[-1])
        own = []
        while first < len(ends) and ends[first] <= begin:
            first += 1
        for i in range(first, len(ends)):
            origin = ends[i] - parameters[i].numel
            if origin >= end:
                break
            start, stop = max(begin, origin), min(end, ends[i])
            own.append((parameters[i], start - origin, stop - start))
        yield own


def _sliced(parameters: Sequence[Parameter], ranks: int) -> Iterator[list[tuple[Parameter, int, int]]]:
    """The same, every parameter being cut over all ranks."""
    for rank in range(ranks):
        own = []
        for parameter in parameters:
            size = -(-parameter.numel // ranks)
            start = min(rank * size, parameter.numel)
            own.append((parameter, start, min(size, parameter.numel - start)))
        yield own


def _entry(parameter: Parameter, slot: str, start: int, numel: int, offset: int, box: Box | None = None) -> Entry:
    return Entry(
        layer=parameter.layer,
        slot=slot,
        fqn=parameter.fqn,
        start=start,
        numel=numel,
        box=box,
        dtype="F32",
        encoding=RAW,
        offset=offset,
        nbytes=4 * numel,
        xxh3_128=DIGEST,
    )


def _run_state(parameters: Sequence[Parameter]) -> dict[str, object]:
    fqns = [parameter.fqn for parameter in parameters]
    return {
        "param_groups": [{"params": fqns, "hyper": {"lr": 1e-4}}],
        "scalars": {},
        "slots": {fqn: list(SLOTS[1:]) for fqn in fqns},
    }


def _manifest(store_id: str, parameters: Sequence[Parameter], ranks: int, group: GroupRecord) -> ManifestRecord:
    layers = list(dict.fromkeys(parameter.layer for parameter in parameters))
    numel = dict.fromkeys(layers, 0)
    for parameter in parameters:
        numel[parameter.layer] += parameter.numel
    return ManifestRecord(
        store_id=store_id,
        step=SAVE.step,
        epoch=SAVE.epoch,
        commits=1,
        world_size=ranks,
        framework="torch",
        policy="full",
        created="2026-01-01T00:00:00+00:00",
        previous=None,
        bytes_avoided=0,
        layers=tuple(LayerRecord(name=layer, block="." in layer) for layer in layers),
        tensors={
            parameter.fqn: TensorRecord(layer=parameter.layer, shape=parameter.shape, dtype="F32", kind="trainable")
            for parameter in parameters
        },
        groups={SAVE.name: group},
        units=tuple(
            UnitRecord(
                layer=layer,
                slot=slot,
                save=SAVE.name,
                encoding=RAW,
                numel=numel[layer],
                nbytes=4 * numel[layer],
                drift=0.0,
                staleness=0,
                moving=True,
                reason="policy full saves everything",
            )
            for layer in layers
            for slot in SLOTS
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
