"""Certify foreign checkpoints, and read back the certificates of our own merged outputs: a composite stays one.

A merge leaves its certificate in the client state, which a run may pass on to its own checkpoints, and in a file beside
the output, which may get lost. Each counts only for the very step that it names, and can only make a checkpoint less
than exact. A source without a record of drift certifies everything at one step, as found: DeepSpeed's files hold no
hashes, so nothing proves that all of them are of one save."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from merger.checkpoint import Checkpoint, require_whole
from merger.io.blocks import Extent
from merger.io.output_dir import CERTIFICATE
from merger.layers import group_layers
from merger.sources.base import Nest, read_values
from merger.sources.deepspeed_files import RankFiles, step_of
from merger.sources.deepspeed_zero import OptimizerContents
from store.certificate import Certificate, CertifiedUnit, is_lossy
from store.errors import DamagedError, MissingError, StorageError
from store.fragments import FragmentIndex
from store.names import BUFFER, FROZEN, RAW, SaveId, group_by_key
from store.schema import LayerRecord, TensorRecord
from store.storage.local import LocalFiles

_LIMIT = 1 << 26
_TRAINER = re.compile(r"checkpoint-\d{1,18}")
_Step = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    layer: str
    slot: str
    step: _Step
    save: str
    encoding: str
    drift: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    moving: bool
    fallback: bool
    error: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class _Claim(BaseModel):
    """The certificate that a merge left for a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    step: _Step
    exact: bool
    as_found: bool = False
    unvouched: Annotated[int, Field(ge=0)] = 0
    units: list[_Row]

    @property
    def whole(self) -> bool:
        """Whether the checkpoint was neither a composite nor rounded or doubtful."""
        return self.exact or self.as_found


class _Document(_Claim):
    """The certificate in the file beside the output. ``tag``: the checkpoint that it is about."""

    tag: str


def apply_merge_certificates(checkpoint: Checkpoint, files: RankFiles) -> Checkpoint:
    """Return the checkpoint with the certificates of earlier merges applied. Never raises for their contents.

    Random states and objects of another step are dropped; a composite is not exact and has the staleness and drift of
    its rows. Each finding becomes a problem."""
    problems: list[str] = []
    rows: list[_Row] = []
    whole, unvouched = True, checkpoint.unvouched
    for claim in (*_in_client_state(checkpoint, files, problems), *_in_files(checkpoint, files.folder, problems)):
        if claim is None or not claim.whole:
            whole = False
            rows += [] if claim is None else claim.units
        if claim is not None and claim.unvouched:  # a merge does not make up for what its source does not prove
            unvouched = frozenset(checkpoint.index.names())
    states, stale = checkpoint.run_states, _stale(checkpoint, files)
    if stale is not None:
        states = {}
        problems.append(stale)
    certificate = replace(checkpoint.certificate, unvouched=len(unvouched))
    if not whole:
        units = tuple(_certified(unit, rows, checkpoint.step) for unit in certificate.units)
        problems_of_all = (*certificate.problems, *problems)
        certificate = replace(certificate, exact=False, as_found=False, units=units, problems=problems_of_all)
    every = (*checkpoint.problems, *problems)
    return replace(checkpoint, run_states=states, certificate=certificate, problems=every, unvouched=unvouched)


def _stale(checkpoint: Checkpoint, files: RankFiles) -> str | None:
    """Return the problem with random states and objects of another step in a client state that a run passed on."""
    for model in files.models:
        ours = model.get("driftpoint")
        if ours is not None and checkpoint.run_states and _step_of_client_state(ours) != checkpoint.step:
            step = _step_of_client_state(ours)
            return (
                f"{ours.where} is of {'another save' if step is None else f'step {step}'}, handed on by the run that "
                f"saved step {checkpoint.step}: its random states and the user's objects are left out and start afresh"
            )
    return None


def _step_of_client_state(ours: Nest) -> int | None:
    step, save = ours.mapping().get("step"), ours.mapping().get("save")
    if isinstance(step, int) and not isinstance(step, bool):
        return step
    if not isinstance(save, str):
        return None
    try:
        return SaveId.parse(save).step
    except ValueError:
        return step_of(save)


def _in_client_state(checkpoint: Checkpoint, files: RankFiles, problems: list[str]) -> Iterator[_Claim | None]:
    for model in files.models:
        ours = model.get("driftpoint")
        if ours is None or "exact" not in ours.mapping() or _step_of_client_state(ours) != checkpoint.step:
            continue
        try:
            claim = _Claim.model_validate(read_values(dict(ours.mapping())))
        except ValidationError:
            problems.append(f"{ours.where} does not say what it should: whether this is a composite is not known")
            yield None
            return
        if not claim.whole:
            problems.append(f"{checkpoint.origin} is not exact: the merge that wrote it says so in its client state")
        yield claim
        return  # the same on all ranks


def _in_files(checkpoint: Checkpoint, folder: Path, problems: list[str]) -> Iterator[_Claim | None]:
    places: list[tuple[Path, str | None]] = [(folder.parent, folder.name), (folder, None)]
    if _TRAINER.fullmatch(folder.parent.name):
        places.append((folder.parent.parent, folder.parent.name))
    for place, tag in places:
        try:
            found = _Document.model_validate_json(LocalFiles(place).read(CERTIFICATE, _LIMIT))
        except MissingError:
            continue
        except (ValidationError, DamagedError, StorageError):
            problems.append(
                f"{place / CERTIFICATE} cannot be read, so whether {checkpoint.origin} is a composite is not known; "
                "merge what it was made from, or remove that file if you know that it is none"
            )
            yield None
            continue
        if tag not in (found.tag, None):
            continue
        if found.step != checkpoint.step:
            problems.append(
                f"{place / CERTIFICATE} is of step {found.step}, and {checkpoint.origin} of step {checkpoint.step}: "
                "one of them was replaced"
            )
            yield None
            continue
        if not found.whole:
            problems.append(f"{checkpoint.origin} is not exact: see {place / CERTIFICATE}")
        yield found


def _certified(unit: CertifiedUnit, rows: Sequence[_Row], step: int) -> CertifiedUnit:
    """Return a unit with the values of its worst row; with unknown drift if it has no row."""
    matching = [row for row in rows if (row.layer, row.slot) == (unit.layer, unit.slot)]
    if not matching:
        return replace(unit, drift=None)
    worst = max(matching, key=lambda row: (abs(step - row.step), row.drift is None, row.drift or 0.0))
    return replace(
        unit,
        step=worst.step,
        save=worst.save,
        staleness=step - worst.step,
        encoding=next((row.encoding for row in matching if is_lossy(row.encoding)), worst.encoding),
        error=max(row.error for row in matching),
        drift=None if any(row.drift is None for row in matching) else worst.drift,
        moving=unit.moving or any(row.moving for row in matching),
        fallback=any(row.fallback for row in matching),
    )


@dataclass(frozen=True)
class NamedTensor:
    """A parameter or buffer. ``dtype``: safetensors name of the working copy. ``kind``: as in TensorRecord."""

    shape: tuple[int, ...]
    dtype: str
    kind: str
    aliases: tuple[str, ...] = ()


def assemble_checkpoint(
    place: Path, step: int, named: Mapping[str, NamedTensor], optimized: OptimizerContents, **known: Any
) -> Checkpoint:
    """Assemble a checkpoint of foreign files, all of one step. MergeError if elements are missing.

    ``place``: the file or directory. ``named``: all tensors, in model order. ``optimized``: has the extents of all
    tensors and all problems. ``known``: other fields; its ``framework_state`` lacks the keys of the optimizer."""
    layers, index = group_layers({fqn: tensor.shape for fqn, tensor in named.items()}), FragmentIndex(optimized.extents)
    home = {fqn: layer.name for layer in layers for fqn in layer.fqns}
    unvouched, problems = frozenset(index.names().keys() - optimized.vouched), tuple(optimized.problems)
    optimizer = {"param_groups": optimized.groups, "scalars": optimized.scalars, "slots": optimized.slots}
    known["framework_state"] = {**known["framework_state"], **optimizer}
    checkpoint = Checkpoint(
        origin=str(place),
        step=step,
        tensors={fqn: TensorRecord(layer=home[fqn], **vars(tensor)) for fqn, tensor in named.items()},
        layers=tuple(LayerRecord(name=layer.name, block=layer.block) for layer in layers),
        index=index,
        certificate=Certificate(
            store_id="",
            save=place.name,
            step=step,
            exact=False,
            units=units_of_one_step(place, step, home, index),
            problems=problems,
            as_found=not problems,
            unvouched=len(unvouched),
        ),
        problems=problems,
        unvouched=unvouched,
        **known,
    )
    require_whole(checkpoint)
    return checkpoint


def units_of_one_step(
    place: Path, step: int, home: Mapping[str, str], index: FragmentIndex[Extent]
) -> tuple[CertifiedUnit, ...]:
    """Certify that every (layer, slot) is of ``step`` and not encoded. ``home``: layer of each tensor."""
    stored = index.names().items()
    held = group_by_key(((home[fqn], slot), extent) for (fqn, slot), extents in stored for extent in extents)
    order = {layer: position for position, layer in enumerate(dict.fromkeys(home.values()))}
    return tuple(
        CertifiedUnit(
            layer=layer,
            slot=slot,
            step=step,
            save=place.name,
            staleness=0,
            encoding=RAW,
            drift=0.0,
            moving=slot not in (FROZEN, BUFFER),
            fallback=False,
            nbytes=sum(extent.nbytes for extent in held[layer, slot]),
            source=str(place),
            numel=sum(extent.stop - extent.start for extent in held[layer, slot]),
        )
        for layer, slot in sorted(held, key=lambda unit: (order[unit[0]], unit[1]))
    )
