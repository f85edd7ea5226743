"""Trains every case of its spec, saves it encoded, and trains on without another save, until the process is killed;
in the processes that follow, resumes each and trains the same steps again. What decoding must give is worked out here
from the live state, with numpy's encodings; what came back is compared with it in the test.

With ``elsewhere`` in the spec, of another world size: resumes each case from the store of the first launch.

Usage: precision_train.py SPEC.json
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from adapter_model import BATCH, VOCABULARY
from resume_jobs import Results, Trainee, build, leave, rank, start_group
from resume_reshard import differences, gathered, whole

import monitor
from monitor.adapters import adapter_for
from monitor.adapters.base import Piece
from monitor.config.schema import ENCODINGS
from store.catalog import open_catalog
from store.encoding import RAW, encoding_named
from store.names import WEIGHTS
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.entries import iter_chunks
from tests.support.reference_encodings import ValuesError, encode_chunk

Case = Mapping[str, Any]


class Run:
    """One process of the spec."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.directory = Path(spec.get("elsewhere", spec["directory"]))
        self.results = Results(spec["results"])

    def straight(self, case: Case) -> None:
        """Saves up to ``saved`` steps; goes on to ``steps`` as if nothing had happened. Never closed."""
        trainee = build(case, seed=1)
        ckpt = self.attach(case, trainee)
        assert ckpt.resume() == 0
        for step in range(case["steps"]):
            self.train("straight", case, trainee, step)
            if step < case["saved"]:
                self.save(case, trainee, ckpt, last=step == case["saved"] - 1)

    def save(self, case: Case, trainee: Trainee, ckpt: monitor.Checkpointer, last: bool) -> None:
        if last and case.get("tampered") and rank() == 1:
            tamper(trainee)
        report = ckpt.step()
        ckpt.flush()
        if report is not None:
            assert report.skipped is None, report
            self.results.tell("saved", case=case["name"], step=report.step, hashes=hashes(decoded(case, trainee)))
        if last:
            self.results.tell("evaluated", case=case["name"], of="straight", loss=evaluated(trainee))
            state = gathered([(p.fragment, values) for p, values in decoded(case, trainee)])
            if rank() == 0:
                torch.save(state, self.directory / f"{case['name']}.pt")

    def resumed(self, case: Case) -> None:
        """From other weights and other random states."""
        trainee = build(case, seed=2)
        ckpt = self.attach(case, trainee)
        first = self.came_back(case, trainee, ckpt)
        for step in range(first, case["steps"]):
            self.train("continued", case, trainee, step)
        ckpt.close(save=False)

    def elsewhere(self, case: Case) -> None:
        """On another number of ranks, at the stage ``to``; trains on and saves."""
        trainee = build({**case, "stage": case["to"]}, seed=3)
        ckpt = self.attach(case, trainee)
        first = self.came_back(case, trainee, ckpt)
        wanted = torch.load(self.directory / f"{case['name']}.pt", weights_only=True)
        found = differences(wanted, whole(trainee))
        for _ in range(case["every"]):
            trainee.step()
            report = ckpt.step()
        ckpt.close(save=False)
        dist.barrier()
        healthy = verify(open_catalog(LocalFiles(Path(self.directory / case["name"])))).ok if rank() == 0 else True
        skipped = "nothing" if report is None else report.skipped
        self.results.tell(
            "elsewhere", case=case["name"], step=first, differences=found, healthy=healthy, skipped=skipped
        )

    def came_back(self, case: Case, trainee: Trainee, ckpt: monitor.Checkpointer) -> int:
        first = ckpt.resume()
        certificate = ckpt.certificate
        assert certificate is not None
        self.results.tell(
            "resumed",
            case=case["name"],
            step=first,
            exact=certificate.exact,
            units=[(u.layer, u.slot, u.step, u.encoding, u.drift) for u in certificate.units],
            hashes=hashes((p, p.tensor) for p in adapter_for(trainee.target).owned()),
        )
        self.results.tell("evaluated", case=case["name"], of="resumed", loss=evaluated(trainee))
        return first

    def train(self, kind: str, case: Case, trainee: Trainee, step: int) -> None:
        before = weights(trainee) if case.get("updates") else {}
        losses = trainee.step()
        after = weights(trainee) if case.get("updates") else {}
        moved = {key: after[key] - before[key] for key in before}
        self.results.tell(
            kind,
            case=case["name"],
            step=step,
            losses=losses,
            largest=max((float(delta.abs().max()) for delta in moved.values()), default=0.0),
            squares=by_layer(moved),
        )

    def attach(self, case: Case, trainee: Trainee) -> monitor.Checkpointer:
        settings = {"store": str(self.directory / case["name"]), "every": case["every"], "metrics": {"enabled": False}}
        return monitor.attach(trainee.target, settings | case["settings"], state=trainee.state)

    def die(self, trainee: Trainee) -> None:
        """The last rank, while the others are in the middle of a step."""
        if rank() == dist.get_world_size() - 1:
            self.results.tell("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        trainee.step()


def decoded(case: Case, trainee: Trainee) -> Iterator[tuple[Piece, torch.Tensor]]:
    """What a resume must give back of every fragment that this rank owns, by the definition of its encoding."""
    chosen = case["settings"].get("encoding", RAW)
    encodings = ENCODINGS[chosen] if isinstance(chosen, str) else chosen
    for piece in adapter_for(trainee.target).owned():
        live = piece.tensor.detach().cpu()
        name = encodings.get(piece.fragment.slot, RAW)
        if name == RAW or not piece.fragment.numel or live.dtype != torch.float32:
            yield piece, live.clone()
            continue
        try:
            yield piece, torch.from_numpy(_decoded(live.numpy(), name))
        except ValuesError:
            yield piece, live.clone()


def _decoded(values: np.ndarray, name: str) -> np.ndarray:
    encoding = encoding_named(name)
    chunks = ((one.size, encode_chunk(encoding, one)) for one in iter_chunks(values))
    return np.concatenate([encoding.decode(chunk, numel, "F32") for numel, chunk in chunks])


def tamper(trainee: Trainee) -> None:
    """A second moment that no encoding for second moments holds, on this rank alone."""
    piece = next(p for p in adapter_for(trainee.target).owned() if p.fragment.slot == "exp_avg_sq" and p.fragment.numel)
    with torch.no_grad():
        piece.tensor[0] = -1e-12


def hashes(pieces: Iterator[tuple[Piece, torch.Tensor]]) -> dict[str, str]:
    """A digest of every fragment."""
    return {
        f"{p.fragment.fqn}|{p.fragment.slot}|{p.fragment.start}|{p.fragment.numel}": xxhash.xxh3_128_hexdigest(
            values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        )
        for p, values in pieces
        if p.fragment.numel
    }


def evaluated(trainee: Trainee) -> float:
    """The loss of a fixed batch without dropout: a function of the working weights and of nothing else."""
    tokens = torch.randint(VOCABULARY, (BATCH, 9), generator=torch.Generator().manual_seed(11))
    model = trainee.target[0] if isinstance(trainee.target, tuple) else trainee.target
    model.eval()
    with torch.no_grad():
        loss = float(model(tokens))
    model.train()
    return loss


def weights(trainee: Trainee) -> dict[str, torch.Tensor]:
    """This rank's fragments of the master weights, by parameter."""
    return {
        p.fragment.fqn: p.tensor.detach().clone()
        for p in adapter_for(trainee.target).owned()
        if p.fragment.slot == WEIGHTS and p.fragment.numel
    }


def by_layer(moved: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Sums of squares; every block is a layer, and so is the embedding and the rest."""
    total: dict[str, float] = {}
    for fqn, delta in moved.items():
        layer = ".".join(fqn.split(".")[:2])
        total[layer] = total.get(layer, 0.0) + float(delta.double().square().sum())
    return total


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=True)
    torch.use_deterministic_algorithms(True)
    run, cases = Run(spec), spec["cases"]
    if "elsewhere" in spec:
        for case in cases:
            run.elsewhere(case)
    elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        for case in cases:
            run.straight(case)
        run.die(build(cases[0], seed=4))
    else:
        for case in cases:
            run.resumed(case)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
