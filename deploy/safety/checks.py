"""Every judgement of a run, most telling first. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.safety.check import Check
from deploy.safety.facts import Facts
from deploy.safety.job_checks import check_finite, check_job, check_loss, check_memory, check_saving
from deploy.safety.store_checks import check_bytes, check_commit, check_disk, check_kept, check_kind, check_proven


def checks(facts: Facts) -> Iterator[Check]:
    """All of them, most telling first."""
    if facts.status is None:
        yield Check("Store", "bad", "cannot be opened", facts.trouble)
    else:
        yield check_commit(facts)
        yield check_loss(facts)
        yield check_kind(facts)
        yield check_saving(facts)
        yield check_bytes(facts)
        yield check_proven(facts)
        yield check_memory(facts)
    yield check_disk(facts)
    if facts.status is not None:
        yield check_kept(facts)
        yield check_finite(facts)
    yield check_job(facts)
