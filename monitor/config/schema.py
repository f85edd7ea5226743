"""Settings models (pydantic).

Names that settings choose from, and how a JSON schema says so. Knows no settings.

The sections of a configuration: what each may hold. Frozen; an unknown key is an error.

The docstring of a section and the description of a field are what editors, ``driftpoint init`` and
docs/configuration.md show of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from policies.accounting import BYTES, STALL, STORAGE, Account, TokenBucket
from policies.registry import POLICIES
from store.encoding import BF16, BF16_INT8, INT8_BLOCK, INT8_SQRT_BLOCK
from store.encoding import ENCODINGS as BY_NAME
from store.metrics_server import LOOPBACK, EndpointSecurity, Tls
from store.names import WEIGHTS
from store.storage.bucket import ObjectOptions

ENCODINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "raw": {},
    "compact": {WEIGHTS: BF16, "exp_avg": INT8_BLOCK, "exp_avg_sq": INT8_SQRT_BLOCK},
    "careful": {WEIGHTS: BF16_INT8, "exp_avg": INT8_BLOCK, "exp_avg_sq": INT8_SQRT_BLOCK},
}
"""Names that stand for an encoding of each slot; slots that are not named are raw."""

SIGNALS: Final = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGXCPU")
"""Signals by which a job may be told of its end."""


def encodings_schema(schema: dict[str, Any]) -> None:
    """Have a JSON schema list the names of encodings, of all slots and of each."""
    schema["anyOf"] = [
        {"type": "string", "enum": list(ENCODINGS)},
        {"type": "object", "additionalProperties": {"type": "string", "enum": list(BY_NAME)}},
    ]


def policies_schema(schema: dict[str, Any]) -> None:
    """Have a JSON schema offer the policies by name, alone or with their parameters. Others are the user's."""
    name = {"anyOf": [{"enum": sorted(POLICIES)}, {"type": "string", "description": "my.py:Mine, or a registered one"}]}
    schema["anyOf"] = [name, {"type": "object", "properties": {"name": name}, "required": ["name"]}]


_LONGEST = 1e6
"""Seconds; threads cannot wait for ever longer ones."""


_LEAST_1: Final[JsonDict] = {"minimum": 1}
"""For editors, of settings whose own modules say better than pydantic what is wrong with them."""


class Settings(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML takes on, off, yes and no for true and false, which Python would let pass for 1 and 0."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool and bool not in get_args(field.annotation):
            raise PydanticCustomError("switch", "it must not be true or false, nor on, off, yes or no")
        return value


class BoundSettings(Settings):
    """Hold whatever the policy chooses; see docs/policies.md."""

    max_staleness: int | None = Field(
        default=None,
        description="steps a moving layer's newest version may lie back; at least `every`; `auto` keeps within it",
        json_schema_extra=_LEAST_1,
    )
    max_drift: float | None = Field(
        default=None,
        description="relative distance at which a layer is saved in any case",
        json_schema_extra={"minimum": 0},
    )
    precision: Literal["exact", "any"] | None = Field(
        default=None, description="exact: lossless encodings only. null: exact, unless `encoding` names another"
    )


class AutoSettings(Settings):
    """What ``every: auto`` weighs; see docs/interval.md."""

    gpu_hours_per_interruption: float = Field(
        default=50_000.0, gt=0, le=1e12, description="expected beforehand, and corrected by this job's own"
    )
    preemptions_per_hour: float = Field(default=0.0, ge=0, le=3600, description="of the whole job, besides")
    max_loss_minutes: float = Field(
        default=30.0,
        gt=0,
        le=_LONGEST,
        description="of training that one interruption may cost, restarting not counted",
    )


class BudgetSettings(Settings):
    """What policy budget may spend, of all that is set the tightest counts; see docs/budget.md."""

    bytes_per_hour: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="payload written, over all ranks"
    )
    stall_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="of wall time that training may wait for saves and decisions, such as 0.01",
    )
    storage_share: float | None = Field(
        default=None, gt=0, le=1, description="of wall time that saves may be written beside training, such as 0.5"
    )
    burst_seconds: float = Field(
        default=3600.0,
        gt=0,
        le=_LONGEST,
        description="what was not spent in so many seconds may gather; more than lies between decisions",
    )

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
    """How drift is measured."""

    method: Literal["sketch", "exact"] = Field(
        default="sketch",
        description="sketch: a few kilobytes a (layer, slot). exact: a copy of the state in host memory",
    )
    width: int = Field(
        default=4099, ge=64, le=1 << 20, description="of the sketch; the error shrinks with its square root"
    )
    seed: int = Field(default=0, description="of the sketch")


class LayerSettings(Settings):
    """How parameters are grouped."""

    experts: bool = Field(
        default=False,
        description="true: every MoE expert is decided on by itself, where the model keeps them apart",
    )
    patterns: dict[str, str] = Field(
        default={}, description="layer name -> regular expression on parameter names, over what structure says"
    )


class RetentionSettings(Settings):
    """Which commits stay; of them a resume takes the newest that is whole."""

    keep_last: int = Field(default=3, description="newest commits", json_schema_extra=_LEAST_1)
    keep_every: int | None = Field(
        default=None, description="and one in each stretch of so many steps", json_schema_extra=_LEAST_1
    )
    log_spaced: bool = Field(
        default=True, description="and ever sparser ones further back; the last proven one always stays"
    )


class ResumeSettings(Settings):
    """Where a composite, whose weights are stale, goes on; see docs/effective-step.md."""

    at: Literal["effective", "newest"] = Field(
        default="effective",
        description="the saved step nearest to where its weights stand. newest: that of the commit",
    )
    data: Literal["back", "on"] = Field(
        default="back",
        description="repeat the batches since then. on: random states and objects stay the newest",
    )


class TraceSettings(Settings):
    """What every decision saw, chose and cost, for `driftpoint simulate`; see docs/trace.md."""

    enabled: bool = Field(default=True, description="write it")
    path: str | None = Field(
        default=None, min_length=1, description="of the file; null: the store's, with .trace.jsonl at its end"
    )
    anchors: int = Field(
        default=6,
        ge=0,
        le=16,
        description="earlier decisions that each one is compared with, about 1, 2, 4... ago; 0: none",
    )


class MemorySettings(Settings):
    """The newest state in shared memory, outliving the process; see docs/memory.md."""

    enabled: bool = Field(default=False, description="keep it; takes twice the state's bytes of host memory")
    every: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="steps between versions; auto: as often as stall_share allows"
    )
    stall_share: float = Field(
        default=0.02, gt=0, le=1, description="of its time that training may wait for them, under auto"
    )
    path: str = Field(default="/dev/shm", min_length=1, description="where shared memory is")
    versions: Literal[1, 2] = Field(
        default=2, description="side by side; 1: half the memory, and none while it is being replaced"
    )
    encoding: str | dict[str, str] = Field(
        default="raw",
        description="or compact, careful, a mapping: a third or half of the memory, more time, not exact",
        json_schema_extra=encodings_schema,
    )
    peers: bool = Field(default=False, description="a replica of each version on another node, as much memory again")


class PreemptionSettings(Settings):
    """A signal announces the end: save what time allows and exit 75; see docs/preemption.md."""

    signals: list[str] = Field(
        default=["SIGUSR1"],
        description="[]: none is heeded. SIGTERM: see there before you name it",
        json_schema_extra={"items": {"enum": list(SIGNALS)}},
    )
    grace_seconds: float = Field(
        default=30.0, gt=0, le=_LONGEST, description="from the signal until the process is killed"
    )
    exit: bool = Field(default=True, description="false: step() returns, and the loop ends by ckpt.preempted")


class DaemonSettings(Settings):
    """Beside the trainers of a node, for what is in memory when they die; see docs/daemon.md."""

    enabled: bool = Field(default=False, description="tell it of this job")
    start: bool = Field(default=True, description="one where there is none")
    host: str = Field(default=LOOPBACK, description="of its Prometheus endpoint; TLS as in `metrics`")
    port: int = Field(default=9465, ge=0, le=65535, description="of the same; 0 takes a free one")
    exit_idle_seconds: float = Field(default=3600.0, gt=0, le=1e9, description="without a job, until it ends by itself")


class S3Settings(Settings):
    """How a store in s3:// is reached; credentials are never here; see docs/object-stores.md."""

    endpoint: str | None = Field(
        default=None,
        min_length=1,
        description="of another server than Amazon's; null: AWS_ENDPOINT_URL, or the region's",
    )
    region: str | None = Field(default=None, min_length=1, description="of the bucket; null: AWS_REGION, or us-east-1")
    allow_http: bool | None = Field(
        default=None, description="an endpoint that is not https; null: AWS_ALLOW_HTTP, or false"
    )
    virtual_hosted: bool = Field(default=False, description="the endpoint's host has the bucket's name already")
    request_seconds: float = Field(default=30.0, gt=0, le=3600, description="for one request and its answer")
    retry_seconds: float = Field(
        default=60.0, ge=0, le=_LONGEST, description="from the first try of an operation until it fails"
    )
    part_mib: int = Field(default=16, ge=5, le=5120, description="size of the parts that large payloads go in")
    connections: int = Field(
        default=8, ge=1, le=256, description="parts, or ranges, on their way at once; so many are in memory"
    )
    spool: str | None = Field(
        default=None,
        min_length=1,
        description="directory for packed payloads until they are uploaded; null: that for temporary files",
    )

    def options(self) -> ObjectOptions:
        """As the store takes them."""
        return ObjectOptions(**self.model_dump())


class MetricsSettings(Settings):
    """The Prometheus endpoint of rank 0; see docs/metrics.md."""

    enabled: bool = Field(default=True, description="serve them, from rank 0 only")
    host: str = Field(
        default=LOOPBACK, description="address to listen on; any other than loopback needs tls, or insecure"
    )
    port: int = Field(
        default=9464,
        ge=0,
        le=65535,
        description="0 takes a free one; a port that is taken costs the endpoint, not the training",
    )
    layer_series: int = Field(
        default=512, ge=1, le=100_000, description="layer slots with time series of their own; see metrics.md"
    )
    tls: Tls = Tls()
    insecure: bool = Field(default=False, description="let other machines read the metrics without tls")

    def security(self) -> EndpointSecurity:
        """Return the TLS settings of this endpoint and the daemon's."""
        return EndpointSecurity(tls=self.tls, insecure=self.insecure)


class TimeoutSettings(Settings):
    """Seconds."""

    commit: float = Field(default=600.0, gt=0, le=_LONGEST, description="for all ranks' segments of one save")
    close: float = Field(default=600.0, ge=0, le=_LONGEST, description="for the save still under way at the end")
    lock: float = Field(
        default=15.0, ge=0, le=_LONGEST, description="for a store that another process on this machine holds"
    )
    peer: float = Field(default=60.0, gt=0, le=_LONGEST, description="for a version in memory to be at its peer")
