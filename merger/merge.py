"""Rebuilding a checkpoint: plan, read and write, verify, rename; and again where bytes turn out to be damaged.

Changes nothing in the store. One process, one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from merger.layouts.base import Layout, Written
from merger.output import Output
from merger.plan import MergePlan, plan_merge
from merger.read import DamagedVersionError, Reader, find_damage
from merger.report import write_certificate
from store.catalog import Catalog, open_catalog
from store.certificate import Certificate, certify
from store.errors import UnsupportedError
from store.files import LocalFiles
from store.names import SaveId
from store.versions import Bad


@dataclass(frozen=True)
class MergeResult:
    """A rebuilt checkpoint. problems: what was damaged in the store, and so was taken from an older version."""

    certificate: Certificate
    out: Path
    tag: str
    bytes_written: int
    problems: tuple[str, ...]


def merge(
    store_root: Path, out: Path, *, save: SaveId | None = None, progress: Callable[[int], None] = lambda _: None
) -> MergeResult:
    """Rebuild the newest commit that can be (or ``save``) as a checkpoint of the framework that was training.

    out: must not exist; it appears when all of it is durable and was read back. progress: told the stored
    bytes just read; ``MergePlan.bytes_to_read`` is their sum. Where bytes turn out to be damaged, writing starts
    again with the versions before, and so does the count.

    Raises NoStoreError, NothingToResumeError, MergeError (a hole; a commit that is not there), UsageError
    (``out`` is taken), UnsupportedError (a framework without a layout), StorageError (full, read-only).
    """
    catalog = open_catalog(LocalFiles(store_root))
    layout_for(plan_merge(catalog, save))  # refuse before anything is written
    output = Output(out, store_root)
    try:
        plan, written, damage = _write_clean(catalog, save, output, progress)
        certificate = certify(plan.resolution)
        extra = write_certificate(output.folder, certificate, written.tag)
        output.finish()
    finally:
        output.abandon()
    problems = tuple(dict.fromkeys((*damage, *plan.problems)))
    return MergeResult(certificate, output.out, written.tag, written.bytes_written + extra, problems)


def layout_for(plan: MergePlan) -> Layout:
    """The layout of the framework that wrote the store. UnsupportedError, naming it, where there is none."""
    framework = plan.manifest.framework
    if framework == "deepspeed":
        return _deepspeed_layout(plan)
    if framework == "torch":
        from merger.layouts.plain import PlainLayout

        return PlainLayout()
    raise UnsupportedError(
        f"the store was written by framework {framework!r}, for which there is no layout; there is one for "
        "'deepspeed' and one for 'torch'"
    )


def _deepspeed_layout(plan: MergePlan) -> Layout:
    try:
        from merger.layouts.deepspeed import DeepSpeedLayout
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the store was written by DeepSpeed, whose classes its files need, and {error.name} is not installed: "
            "run `pip install 'driftpoint[deepspeed]'`"
        ) from error
    return DeepSpeedLayout(plan)


def _write_clean(
    catalog: Catalog, save: SaveId | None, output: Output, progress: Callable[[int], None]
) -> tuple[MergePlan, Written, list[str]]:
    bad: set[Bad] = set()
    damage: list[str] = []
    while True:
        plan = plan_merge(catalog, save, bad)
        try:
            written = layout_for(plan).write(plan, Reader(catalog.files, plan, progress), output.folder)
        except DamagedVersionError:
            # A unit's version is spread over many files: none of them may keep a part of the damaged one.
            # All damage is looked for at once, so that a store with much of it is not written many times.
            found = find_damage(catalog.files, plan)
            if not found or bad >= found.keys():
                raise  # a read that fails now and then: the storage, not the store
            bad |= found.keys()
            damage += found.values()
            output.clear()
        else:
            return plan, written, damage
