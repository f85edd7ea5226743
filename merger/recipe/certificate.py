"""Certify a composite of several checkpoints: step, staleness and drift of each (layer, slot, source).

Strict: ``exact`` only if the composite equals the run state's checkpoint, unit for unit, and that one is exact;
likewise ``as_found``. Records cannot prove that equal steps of different sources are one run. Staleness counts from the
run state's step, negative for newer units. Drift is known only for units of the run state's checkpoint. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from store.certificate import Certificate, CertifiedUnit
from store.encoding import itemsize
from store.names import FROZEN, RAW

Slots = Mapping[str, Sequence[str]]  # slots of each fqn


@dataclass(frozen=True)
class Part:
    """A checkpoint that a composite takes from."""

    checkpoint: Checkpoint
    lineage: str  # equal for two parts only if a version of the same name is the same version in both
    name: str = ""  # of its source in the recipe

    def __str__(self) -> str:
        return f"{self.name!r} ({self.checkpoint.origin})"


@dataclass
class _Row:
    """A row of the certificate being built: ``numel`` elements of a layer of the run state's model."""

    unit: CertifiedUnit  # the source's unit; the run state's unit if it has the very same version
    layer: str
    own: bool  # whether taking it from the run state's source would make no difference
    numel: int = 0
    nbytes: int = 0


def composite_certificate(
    parts: Mapping[str, Part], source_of: Mapping[str, str], taken: Slots, run_state: str, problems: tuple[str, ...]
) -> Certificate:
    """Build the certificate of a composite.

    A unit's ``source`` is its key in ``parts``. A mixture must not pass for a commit: unless all is of one commit,
    ``save`` is not a save's name, and ``store_id`` is empty unless all is of one store. ``parts``: checkpoints by
    source name; ``run_state`` names the reference. ``source_of`` and ``taken``: source and slots of each fqn."""
    reference = parts[run_state].checkpoint
    rows = _rows(parts, source_of, taken, run_state)
    used = {name: parts[name].checkpoint.certificate for name in dict.fromkeys([run_state, *source_of.values()])}
    ids = {certificate.store_id for certificate in used.values()}
    one = all(row.own for row in rows)
    mixture = " + ".join(f"{name}:{certificate.save}" for name, certificate in used.items())
    return Certificate(
        store_id=ids.pop() if len(ids) == 1 else "",
        save=reference.certificate.save if one else mixture,
        step=reference.step,
        exact=one and reference.certificate.exact,
        as_found=one and reference.certificate.as_found,
        unvouched=len(unvouched_tensors(parts, source_of, taken)),
        units=tuple(
            replace(
                row.unit, layer=row.layer, staleness=reference.step - row.unit.step, numel=row.numel, nbytes=row.nbytes
            )
            for row in rows
        ),
        problems=problems,
    )


def unvouched_tensors(
    parts: Mapping[str, Part], source_of: Mapping[str, str], taken: Slots
) -> frozenset[tuple[str, str]]:
    """Return the (fqn, slot) taken for whose origin nothing vouches. Arguments as of :func:`composite_certificate`."""
    named = ((fqn, slot, parts[name].checkpoint) for fqn, name in source_of.items() for slot in taken[fqn])
    return frozenset((fqn, slot) for fqn, slot, source in named if (fqn, slot) in source.unvouched)


def held_slots(checkpoint: Checkpoint, fqn: str) -> list[str]:
    """Return the stored slots of a tensor: the tensor itself, then the optimizer's."""
    slots = (checkpoint.framework_state.get("slots") or {}).get(fqn, ())
    return [slot for slot in (SLOT_OF_KIND[checkpoint.tensors[fqn].kind], *slots) if checkpoint.has(fqn, slot)]


def _rows(parts: Mapping[str, Part], source_of: Mapping[str, str], taken: Slots, run_state: str) -> list[_Row]:
    certificates = {name: part.checkpoint.certificate for name, part in parts.items()}
    known = {name: {(unit.layer, unit.slot): unit for unit in one.units} for name, one in certificates.items()}
    reference = parts[run_state].checkpoint
    rows: dict[tuple[str, str, str, str], _Row] = {}
    for fqn, name in source_of.items():
        source = parts[name].checkpoint
        theirs, ours = source.tensors[fqn].layer, reference.tensors[fqn].layer
        for slot in taken[fqn]:
            key = (ours, slot, name, theirs)
            if key not in rows:
                place = (theirs, slot, source.step, source.certificate.save)
                unit = known[name].get((theirs, slot)) or CertifiedUnit(  # of which it certifies nothing
                    *place, staleness=0, encoding=RAW, drift=None, moving=slot != FROZEN, fallback=False, nbytes=0
                )
                own = known[run_state].get((ours, slot)) if parts[name].lineage == parts[run_state].lineage else None
                if own is None or _version(own) != _version(unit):
                    # Equal names of frozen units in different versions do not make them equal.
                    rows[key] = _Row(replace(unit, source=name, drift=None, moving=True), ours, own=False)
                else:  # only within one commit do moving units have the same scalars (step counts)
                    together = (source.certificate.save, source.step) == (reference.certificate.save, reference.step)
                    rows[key] = _Row(replace(own, source=name), ours, own=together or not unit.moving)
            rows[key].numel += source.numel(fqn)
            rows[key].nbytes += source.numel(fqn) * itemsize(source.dtype(fqn, slot))
    places = {layer.name: place for place, layer in enumerate(reference.layers)}
    return sorted(rows.values(), key=lambda row: places.get(row.layer, len(places)))


def _version(unit: CertifiedUnit) -> tuple[str, int, str, bool]:
    return unit.save, unit.step, unit.encoding, unit.fallback
