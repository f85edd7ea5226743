"""Read a Driftpoint store: the newest version of every layer at a commit, an older one if bytes are damaged."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from merger.checkpoint import IMPORTED_WITH, Checkpoint, RunStates, read_run_states, require_whole, with_problems
from merger.io.blocks import Block, Damage, Extent, StoredFragment, put_together, xxh3
from merger.sources.journal import chain_to, records, replayed
from store.catalog import open_catalog
from store.certificate import CertifiedUnit, certify_stored, imported_as_found
from store.encoding import itemsize
from store.errors import DamagedError, MergeError, NoStoreError, StorageError
from store.fragments import FragmentIndex, Source
from store.journal import Chain, journal_catalog
from store.location import files_at
from store.names import BUFFER, FROZEN, JOURNAL, LEFT_OUT, RAW, WEIGHTS, SaveId, payload_path, weights_dir
from store.resolve import RejectedVersion, Resolution, newest_resumable, resolve
from store.schema import TensorRecord
from store.storage.local import Files
from store.text import listed
from store.weights import all_saves


class StoreSource:
    """A store. NoStoreError if there is none."""

    kind = "store"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.catalog = open_catalog(files_at(root))

    def steps(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(save.step for save in all_saves(self.catalog)))

    def checkpoint(self, step: int | str | None, flaws: Set[Damage]) -> Checkpoint:
        bad = {flaw.bad for flaw in flaws if flaw.store == self.root}
        torn = {flaw.bad.save for flaw in flaws if flaw.store == self.root / JOURNAL}
        while True:
            save, chain = (None, None) if step is None else self._meant(step, bad, torn)
            why = None if save is None else self.catalog.suspects().why.get(save)
            problems: tuple[str, ...] = (
                () if why is None else (f"{save} is suspect: jobs that resumed from it died ({why})",)
            )
            made = () if step is None or chain is not None else records(journal_catalog(self.catalog), step)
            if save is not None and any(one.epoch > save.epoch for one in made):
                problems += (f"the journal has step {save.step} of a newer branch, to which no whole records lead",)
            if save is not None and save not in self.catalog.saves():
                try:
                    weights = StoreSource(self.root / weights_dir(save)).checkpoint(save.name, flaws)
                except NoStoreError as error:
                    raise MergeError(f"commit {save} was deleted meanwhile: name another one") from error
                return replace(weights, problems=(*problems, *weights.problems))
            try:
                if save is None:
                    resolution, problems = newest_resumable(self.catalog, bad)
                else:
                    resolution = resolve(self.catalog, save, bad)
            except (DamagedError, StorageError) as error:
                if save is None:
                    raise
                raise MergeError(
                    f"commit {save} cannot be rebuilt: {error}; name no save to merge the newest one that can"
                ) from error
            if (states := read_run_states(self.catalog.files, resolution.run_parts)) is not None:
                break
            bad.add(RejectedVersion(resolution.manifest.save))
        base = self._checkpoint(resolution, states, problems)
        if chain is None:
            return base
        journal = journal_catalog(self.catalog)
        return replayed(base, chain, journal, partial(self._extent, files=journal.files, root=self.root / JOURNAL))

    def leads_to(self, step: int | str) -> bool:
        """Return whether the journal leads from a commit to a step, or to a record by its name."""
        journal = journal_catalog(self.catalog)
        return any(chain_to(self.catalog, journal, one, set(), set()) for one in records(journal, step))

    def _meant(self, step: int | str, bad: Set[RejectedVersion], torn: Set[SaveId]) -> tuple[SaveId, Chain | None]:
        """Return the commit of ``step``; if the journal has the step on a newer branch, a commit and records to it."""
        saves, journal = all_saves(self.catalog), journal_catalog(self.catalog)
        save = next((one for one in saves if step in (one.step, one.name, str(one.step))), None)
        for record in records(journal, step):
            newer = save is None or record.epoch > save.epoch
            if newer and (found := chain_to(self.catalog, journal, record, bad, torn)):
                return found[0].manifest.save, found[1]
        if save is None:
            newest = listed((one.name for one in saves), 5) or "none"
            raise MergeError(f"the store {self.root} has no commit {step}; the newest are: {newest}")
        return save, None

    def _checkpoint(self, resolution: Resolution, states: RunStates, passed_over: tuple[str, ...]) -> Checkpoint:
        manifest = resolution.manifest
        if left_out := resolution.run_parts[0].facts.get(LEFT_OUT):
            raise MergeError(
                f"commit {manifest.save} was saved with `frozen: skip`, so {len(left_out)} frozen parameters "
                f"({left_out[0]}, ...) are not in the store. Resume with the training script and save the model there, "
                "or train with `frozen: save`"
            )
        certificate = certify_stored(resolution)
        units = tuple(replace(unit, source=str(self.root)) for unit in certificate.units)
        stored = resolution.index.names().values()
        index = FragmentIndex(extent for sources in stored for extent in put_together([*map(self._extent, sources)]))
        unvouched = frozenset(index.names()) if imported_as_found(manifest) else frozenset()
        scalars = states.framework.get("scalars") or {}
        checkpoint = Checkpoint(
            origin=f"commit {manifest.save} of {self.root}",
            framework=manifest.framework,
            step=manifest.step,
            tensors=manifest.tensors,
            layers=manifest.layers,
            index=index,
            framework_state=states.framework,
            facts=resolution.run_parts[0].facts,
            run_states=states.ranks,
            client_state=states.client_state,
            certificate=replace(certificate, units=units, unvouched=len(unvouched)),
            problems=(*passed_over, *resolution.problems),
            unvouched=unvouched,
            stored_steps=_stored_steps(manifest.tensors, units, scalars),
            weights_only=manifest.weights_only,
        )
        require_whole(checkpoint)
        implausible = [
            f"layer {record.layer}: {record.reason.removeprefix(IMPORTED_WITH)} in {record.slot} when it was imported"
            for record in (version.record for version in resolution.versions.values())
            if record.reason.startswith(IMPORTED_WITH)
        ]
        return with_problems(checkpoint, [*implausible, *states.problems])

    def _extent(self, source: Source, files: Files | None = None, root: Path | None = None) -> Extent:
        files, root = files or self.catalog.files, root or self.root
        part, entry = source.part, source.entry
        plain = entry.encoding == RAW and entry.packing is None
        path, start = payload_path(part.save, part.rank), part.header_bytes + entry.offset
        name, damage = f"{entry.unit} of save {part.save}", Damage(root, RejectedVersion(part.save, entry.unit))
        nbytes, coded = entry.numel * itemsize(entry.dtype), None if plain else StoredFragment(files, source, root)
        block = Block(files, path, start, nbytes, xxh3, entry.xxh3_128, name, damage, coded)
        return Extent(entry.fqn, entry.slot, entry.start, entry.stop, entry.dtype, block, 0, entry.box)


def _stored_steps(
    tensors: Mapping[str, TensorRecord], units: Iterable[CertifiedUnit], scalars: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    """Estimate the optimizer's step of each parameter with old moments: that of the run state minus their staleness."""
    ages: dict[str, int] = {}
    for unit in units:
        if unit.slot not in (WEIGHTS, FROZEN, BUFFER) and unit.staleness > 0:
            ages[unit.layer] = max(unit.staleness, ages.get(unit.layer, 0))
    return {
        fqn: float(kept["step"]) - ages[tensors[fqn].layer]
        for fqn, kept in scalars.items()
        if "step" in kept and fqn in tensors and tensors[fqn].layer in ages
    }
