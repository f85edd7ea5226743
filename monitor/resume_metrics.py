"""Metrics of what a job went on from."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge


class ResumeMetrics:
    """Told by the training thread of rank 0, at a resume."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.epoch = Gauge("driftpoint_epoch", "Epoch of this incarnation of the job", registry=registry)
        self.attached = Gauge(
            "driftpoint_attached_timestamp_seconds", "When this incarnation attached to its store", registry=registry
        )
        self.step = Gauge("driftpoint_resumed_step", "Step that this job went on from", registry=registry)
        self.effective_step = Gauge(
            "driftpoint_effective_step",
            "Step that the resumed weights stand at, on average; that of the commit where none were stale",
            registry=registry,
        )
        self.fallbacks = Gauge(
            "driftpoint_resume_fallback_units",
            "Layer slots resumed from an older version than committed last",
            registry=registry,
        )
        self.passed_over = Gauge(
            "driftpoint_resume_passed_over_commits",
            "Commits newer than the one resumed from, passed over as damaged or suspect",
            registry=registry,
        )
        self.staleness = Gauge(
            "driftpoint_resumed_staleness_steps", "Staleness of the oldest moving layer slot resumed", registry=registry
        )
        self.exact = Gauge(
            "driftpoint_resumed_exact",
            "1 where what was resumed is one step's state to the last bit",
            registry=registry,
        )
        self.from_memory = Gauge(
            "driftpoint_resumed_from_memory",
            "1 where this job went on from memory, not from the store",
            registry=registry,
        )
        self.from_peers = Gauge(
            "driftpoint_resumed_from_peer_ranks",
            "Ranks whose memory this job went on from as another node had kept it",
            registry=registry,
        )
