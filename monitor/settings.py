"""The sections of a configuration: what each may hold. Frozen; an unknown key is an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from policies.account import BYTES, STALL, STORAGE, Account
from policies.bucket import TokenBucket
from store.endpoint.access import LOOPBACK, BasicAuth, Guards, Tls

_LONGEST = 1e6
"""Seconds; threads cannot wait for ever longer ones."""


class Settings(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BoundSettings(Settings):
    """What holds whatever the policy chooses; see :class:`policies.bounds.Bounds`."""

    max_staleness: int | None = None
    max_drift: float | None = None
    precision: Literal["exact", "any"] | None = None
    """None: ``exact`` unless ``encoding`` names what loses bits."""


class AutoSettings(Settings):
    """What ``every: auto`` weighs; see docs/interval.md.

    gpu_hours_per_interruption: expected beforehand, one in so many GPU-hours. preemptions_per_hour: of the whole job,
    besides. max_loss_minutes: of training that one interruption may cost; restarting is not counted."""

    gpu_hours_per_interruption: float = Field(default=50_000.0, gt=0, le=1e12)
    preemptions_per_hour: float = Field(default=0.0, ge=0, le=3600)
    max_loss_minutes: float = Field(default=30.0, gt=0, le=_LONGEST)


class BudgetSettings(Settings):
    """What policy ``budget`` may spend; of all that is set the tightest counts. burst_seconds: of what was not spent
    that may gather for one moment.

    bytes_per_hour: payload written, all ranks. stall_share: of wall time that training may wait for saves and
    decisions.
    storage_share: of wall time that saves may be written beside training.
    """

    bytes_per_hour: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    stall_share: float | None = Field(default=None, gt=0, le=1)
    storage_share: float | None = Field(default=None, gt=0, le=1)
    burst_seconds: float = Field(default=3600.0, gt=0, le=_LONGEST)

    @property
    def limited(self) -> bool:
        """Whether anything is."""
        return bool(self._rates())

    def account(self, clock: Callable[[], float] = time.monotonic) -> Account:
        """Empty, filling from now on."""
        return Account(
            {name: TokenBucket(rate, rate * self.burst_seconds, clock) for name, rate in self._rates().items()}
        )

    def _rates(self) -> dict[str, float]:
        bytes_per_second = None if self.bytes_per_hour is None else self.bytes_per_hour / 3600
        rates = {BYTES: bytes_per_second, STALL: self.stall_share, STORAGE: self.storage_share}
        return {name: rate for name, rate in rates.items() if rate is not None}


class DriftSettings(Settings):
    """How drift is measured. width and seed are the sketch's."""

    method: Literal["sketch", "exact"] = "sketch"
    width: int = Field(default=4099, ge=64, le=1 << 20)
    seed: int = 0


class LayerSettings(Settings):
    """How parameters are grouped. patterns: layer name -> regular expression on parameter names."""

    experts: bool = False
    patterns: dict[str, str] = {}


class RetentionSettings(Settings):
    """Which commits stay; see :class:`store.retention.Retention`."""

    keep_last: int = 3
    keep_every: int | None = None
    log_spaced: bool = True


class ResumeSettings(Settings):
    """Where a composite goes on. at: ``effective`` step (see docs/effective-step.md), or the ``newest``.

    data: what the order of data does when the effective step lies back: ``back`` repeats the batches since, ``on``
    takes those that come next."""

    at: Literal["effective", "newest"] = "effective"
    data: Literal["back", "on"] = "back"


class TraceSettings(Settings):
    """The drift trace of the job: what every decision saw and cost; see docs/trace.md. path: of the file, by default
    the store's with ``.trace.jsonl`` at its end. anchors: earlier decisions, about 1, 2, 4, 8... ago, that each one is
    compared with; it takes the memory of ``anchors`` + 2 sketches. 0: none."""

    enabled: bool = True
    path: str | None = Field(default=None, min_length=1)
    anchors: int = Field(default=6, ge=0, le=16)


class MemorySettings(Settings):
    """The memory tier: every rank's newest state in shared memory, exact, outliving the process; see docs/memory.md.

    every: steps between versions, or ``auto``: as often as training waits no more than ``stall_share`` of its time for
    them. path: where shared memory is. versions: kept side by side; with 1 there is none while it is being replaced.
    encoding: as for the store; what is not raw takes less memory, more time, and is not exact. peers: a replica of
    every version on another node, which takes as much memory again."""

    enabled: bool = False
    every: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    stall_share: float = Field(default=0.02, gt=0, le=1)
    path: str = Field(default="/dev/shm", min_length=1)
    versions: Literal[1, 2] = 2
    encoding: str | dict[str, str] = "raw"
    peers: bool = False


class PreemptionSettings(Settings):
    """What is done where a signal announces the end of the job; see docs/preemption.md.

    signals: their names; none: nothing is. grace_seconds: from the signal until the process is killed. exit: whether
    ``ckpt.step()`` raises SystemExit when all that time allows is saved."""

    signals: list[str] = ["SIGUSR1"]
    grace_seconds: float = Field(default=30.0, gt=0, le=_LONGEST)
    exit: bool = True


class DaemonSettings(Settings):
    """The daemon of each node, which writes out of memory what a job leaves there when it dies; see docs/daemon.md.

    start: one where there is none. host, port: of its metrics, which are guarded as ``metrics`` says.
    exit_idle_seconds: without a job until it ends by itself."""

    enabled: bool = False
    start: bool = True
    host: str = LOOPBACK
    port: int = Field(default=9465, ge=0, le=65535)
    exit_idle_seconds: float = Field(default=3600.0, gt=0, le=1e9)


class MetricsSettings(Settings):
    """The Prometheus endpoint of rank 0; see docs/metrics.md.

    layer_series: layer slots with time series of their own. tls, basic_auth: what guards the endpoint, and the daemon's
    too. insecure: let other machines read it without."""

    enabled: bool = True
    host: str = LOOPBACK
    port: int = Field(default=9464, ge=0, le=65535)
    layer_series: int = Field(default=512, ge=1, le=100_000)
    tls: Tls = Tls()
    basic_auth: BasicAuth = BasicAuth()
    insecure: bool = False

    def guards(self) -> Guards:
        """Of this endpoint and the daemon's."""
        return Guards(tls=self.tls, basic_auth=self.basic_auth, insecure=self.insecure)


class TimeoutSettings(Settings):
    """Seconds. commit: for all ranks' segments. close: for the save that still runs at the end. lock: for the store.
    peer: for a version in memory to be at its peer."""

    commit: float = Field(default=600.0, gt=0, le=_LONGEST)
    close: float = Field(default=600.0, ge=0, le=_LONGEST)
    lock: float = Field(default=15.0, ge=0, le=_LONGEST)
    peer: float = Field(default=60.0, gt=0, le=_LONGEST)
