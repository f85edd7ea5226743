"""Define the sections of a configuration as pydantic models: frozen, and an unknown key is an error.

Editors, ``driftpoint init`` and docs/configuration.md show the sections' docstrings and the fields' descriptions."""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from policies.accounting import BYTES, STALL, STORAGE, Account, TokenBucket
from policies.registry import POLICIES
from store.daemon_protocol import log_path
from store.encoding import BF16_INT8, INT8_BLOCK, INT8_LOG2, INT8_SHARED_EXPONENT_128, INT16_SHARED_EXPONENT, WRITABLE
from store.metrics_server import LOOPBACK, EndpointSecurity, Tls
from store.names import WEIGHTS
from store.storage.bucket import ObjectOptions

ENCODINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "raw": {},
    "compact": {WEIGHTS: INT16_SHARED_EXPONENT, "exp_avg": INT8_SHARED_EXPONENT_128, "exp_avg_sq": INT8_LOG2},
    "careful": {WEIGHTS: BF16_INT8, "exp_avg": INT8_BLOCK, "exp_avg_sq": INT8_LOG2},
}
"""Presets: the encoding of each slot. Slots that a preset does not name are raw."""

SIGNALS: Final = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGXCPU")
"""Signals that can announce the end of a job."""


def encodings_schema(schema: dict[str, Any]) -> None:
    """Add the names of presets and of encodings to a JSON schema."""
    schema["anyOf"] = [
        {"type": "string", "enum": list(ENCODINGS)},
        {"type": "object", "additionalProperties": {"type": "string", "enum": list(WRITABLE)}},
    ]


def policies_schema(schema: dict[str, Any]) -> None:
    """Add the names of built-in policies to a JSON schema. Other strings stay valid for the user's own policies."""
    name = {"anyOf": [{"enum": sorted(POLICIES)}, {"type": "string", "description": "my.py:Mine, or a registered one"}]}
    schema["anyOf"] = [name, {"type": "object", "properties": {"name": name}, "required": ["name"]}]


_LONGEST = 1e6  # seconds: the longest timeout. Threads cannot wait for arbitrarily long ones

_LEAST_1: Final[JsonDict] = {"minimum": 1}
"""Shown to editors only: the module that uses the setting checks it and raises a better message than pydantic."""


class Settings(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse booleans where a number is expected: YAML reads on, off, yes and no as booleans."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool and bool not in get_args(field.annotation):
            raise PydanticCustomError("switch", "it must not be true or false, nor on, off, yes or no")
        return value


class StoreSettings(Settings):
    """The store, where it is more than a path."""

    path: str = Field(min_length=1)
    """the directory, or a URL of s3://, az:// or gs://"""
    create: bool = True
    """false: refuse to start where there is no store, for example because a disk is not mounted"""


class StagingSettings(Settings):
    """The copies that saves are written from, where there is no room for all of them; see docs/operations.md."""

    mode: Literal["auto", "eager", "lazy"] = "auto"
    """when they are made"""
    max_bytes: int | None = Field(default=None, ge=20_000_000)
    """most bytes of them on a rank; for the rest training waits until they are written. null: no limit"""


class BoundSettings(Settings):
    """Limits that hold under every policy; see docs/policies.md."""

    max_staleness: int | None = Field(default=None, json_schema_extra=_LEAST_1)
    """most steps since a changing layer was saved; at least `every`; `every: auto` respects it"""
    max_drift: float | None = Field(default=None, json_schema_extra={"minimum": 0})
    """relative distance from the last save at which a layer is always saved"""
    precision: Literal["exact", "any"] | None = None
    """exact: lossless encodings only. null: exact, unless `encoding` is lossy"""
    nonfinite: Literal["hold", "raise"] = "hold"
    """layers with NaN or Inf are never saved. raise: step() then also raises, so that the job ends"""


class AutoSettings(Settings):
    """Assumptions behind ``every: auto``; see docs/interval.md."""

    gpu_hours_per_interruption: float = Field(default=50_000.0, gt=0, le=1e12)
    """GPU hours between failures; corrected by those observed"""
    preemptions_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """preemptions of the whole job, in addition to failures"""
    max_loss_minutes: float = Field(default=30.0, gt=0, le=_LONGEST)
    """most training time that one interruption may lose, without restart time"""


class BudgetSettings(Settings):
    """Limits for policies budget and auto; the tightest one counts; see docs/budget.md."""

    bytes_per_hour: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """payload bytes written per hour, over all ranks"""
    stall_share: float | None = Field(default=None, gt=0, le=1)
    """share of wall time that training may wait for saves and decisions, e.g. 0.01"""
    storage_share: float | None = Field(default=None, gt=0, le=1)
    """share of wall time that background writes may take, e.g. 0.5"""
    burst_seconds: float = Field(default=3600.0, gt=0, le=_LONGEST)
    """unspent budget accumulates for this long; set it longer than the time between decisions"""

    @property
    def limited(self) -> bool:
        return bool(self._rates())

    def account(self, clock: Callable[[], float] = time.monotonic) -> Account:
        """Return an empty account that fills from now on."""
        rates = self._rates().items()
        return Account({name: TokenBucket(rate, rate * self.burst_seconds, clock) for name, rate in rates})

    def _rates(self) -> dict[str, float]:
        bytes_per_second = None if self.bytes_per_hour is None else self.bytes_per_hour / 3600
        rates = {BYTES: bytes_per_second, STALL: self.stall_share, STORAGE: self.storage_share}
        return {name: rate for name, rate in rates.items() if rate is not None}


class DriftSettings(Settings):
    """How drift is measured."""

    width: int = Field(default=4099, ge=64, le=1 << 20)
    """values in a sketch; the error falls with the square root of it"""
    seed: int = 0
    """seed of the sketch"""


class LayerSettings(Settings):
    """How parameters are grouped into layers."""

    experts: bool = False
    """true: each MoE expert is a layer, if the model stores experts as separate modules"""
    patterns: dict[str, str] = {}
    """layer name -> regular expression on parameter names; overrides the detected layers"""


class RetentionSettings(Settings):
    """Which commits are kept; a resume uses the newest valid one. Without room for a save, fewer."""

    keep_last: int = Field(default=3, json_schema_extra=_LEAST_1)
    """number of newest commits to keep"""
    keep_every: int | None = Field(default=None, json_schema_extra=_LEAST_1)
    """also keep one commit per this many steps"""
    log_spaced: bool = True
    """also keep older ones, ever sparser; the last proven commit is always kept"""
    max_share: float | None = Field(default=0.8, gt=0, le=1)
    """share of the disk, without what others use, that commits and the next save may take; null: all"""
    weights_every: int | None = Field(default=None, json_schema_extra=_LEAST_1)
    """also keep the weights alone of one commit per this many steps, when the commit itself is deleted"""
    weights_last: int = Field(default=10, json_schema_extra=_LEAST_1)
    """number of newest such weights-only commits to keep"""


class ResumeSettings(Settings):
    """Where a composite with stale weights resumes; see docs/effective-step.md."""

    at: Literal["effective", "newest"] = "effective"
    """effective: the saved step closest to the weights' age. newest: the step of the commit"""
    data: Literal["back", "on"] = "back"
    """back: repeat the batches since that step. on: keep the newest random states and objects"""
    unused_state: Literal["refuse", "drop"] = "refuse"
    """optimizer state of parameters that the optimizer does not hold. drop: resume without it, not exact"""
    hyperparameters: Literal["store", "script"] = "store"
    """which to use where the script's differ from the store's; each difference is logged. script: then not exact"""


class TraceSettings(Settings):
    """Record of every decision and its cost, for `driftpoint simulate`; see docs/trace.md."""

    enabled: bool = True
    """write the trace"""
    path: str | None = Field(default=None, min_length=1)
    """trace file; null: the store's path with .trace.jsonl appended"""
    anchors: int = Field(default=6, ge=0, le=16)
    """number of earlier decisions to compare with, about 1, 2, 4... ago; 0: none"""
    max_mib: int = Field(default=512, ge=1)
    """size at which the file is renamed, with .1 appended, over the one before"""


class MemorySettings(Settings):
    """Snapshots of the newest state in shared memory that survive the process; see docs/memory.md."""

    enabled: bool = False
    """keep snapshots; takes twice the state's size of host memory"""
    every: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """steps between snapshots; auto: as often as stall_share allows"""
    stall_share: float = Field(default=0.02, gt=0, le=1)
    """share of time that training may wait for snapshots, under auto"""
    path: str = Field(default="/dev/shm", min_length=1)
    """directory of a file system in memory (tmpfs)"""
    versions: Literal[1, 2] = 2
    """snapshots kept; 1: half the memory, but no valid one while it is replaced"""
    encoding: str | dict[str, str] = Field(default="raw", json_schema_extra=encodings_schema)
    """or compact, careful, a mapping: a third or half of the memory, slower, not exact"""
    peers: bool = False
    """replicate each snapshot to another node; doubles the memory"""


class JournalSettings(Settings):
    """Record of each optimizer step, so that a resume loses none; see docs/journal.md."""

    enabled: bool = False
    """write gradients to the store at every step; a resume repeats the steps since the last save"""


class PreemptionSettings(Settings):
    """On a signal, save as much as the time allows and exit with 75; see docs/preemption.md."""

    signals: list[str] = Field(default=["SIGUSR1"], json_schema_extra={"items": {"enum": list(SIGNALS)}})
    """[]: none. Read docs/preemption.md before adding SIGTERM"""
    grace_seconds: float = Field(default=30.0, gt=0, le=_LONGEST)
    """seconds from the signal until the process is killed"""
    exit: bool = True
    """false: step() returns, and the loop must stop on ckpt.preempted"""


class DaemonSettings(Settings):
    """Process on each node that writes snapshots of dead jobs to the store; see docs/daemon.md."""

    enabled: bool = False
    """register this job with the daemon"""
    start: bool = True
    """start a daemon if none runs on the node"""
    host: str = LOOPBACK
    """address of its Prometheus endpoint; TLS as in `metrics`"""
    port: int = Field(default=9465, ge=0, le=65535)
    """port of its Prometheus endpoint; 0: any free port"""
    exit_idle_seconds: float = Field(default=3600.0, gt=0, le=1e9)
    """seconds without a job until the daemon exits"""

    def command(self, base: Path, security: EndpointSecurity) -> list[str]:
        """Return the command that starts the daemon for the jobs whose shared memory is in ``base``."""
        command = [sys.executable, "-m", "deploy.cli", "daemon", "run", "--memory", str(base)]
        command += ["--port", str(self.port), "--exit-idle", str(self.exit_idle_seconds)]
        return [*command, "--log", str(log_path(base)), "--host", self.host, *security.cli_options()]


class S3Settings(Settings):
    """Connection to a store in s3://, az:// or gs://, without credentials; see docs/object-stores.md."""

    endpoint: str | None = Field(default=None, min_length=1)
    """URL of a server other than Amazon's; null: AWS_ENDPOINT_URL, or the region's"""
    region: str | None = Field(default=None, min_length=1)
    """region of the bucket; null: AWS_REGION, or us-east-1"""
    allow_http: bool | None = None
    """allow an endpoint without https; null: AWS_ALLOW_HTTP, or false"""
    virtual_hosted: bool = False
    """the endpoint's host already contains the bucket's name"""
    request_seconds: float = Field(default=30.0, gt=0, le=3600)
    """timeout of one request and its response"""
    retry_seconds: float = Field(default=60.0, ge=0, le=_LONGEST)
    """seconds to retry an operation before it fails"""
    part_mib: int = Field(default=16, ge=5, le=5120)
    """part size of multipart uploads, in MiB"""
    connections: int = Field(default=8, ge=1, le=256)
    """parallel uploads or range reads; each holds one part in memory"""
    spool: str | None = Field(default=None, min_length=1)
    """directory for packed payloads until they are uploaded; null: the temporary directory"""

    def options(self) -> ObjectOptions:
        return ObjectOptions(**self.model_dump())


class MetricsSettings(Settings):
    """The Prometheus endpoint of rank 0; see docs/metrics.md."""

    enabled: bool = True
    """serve metrics, on rank 0 only"""
    host: str = LOOPBACK
    """address to listen on; any other than loopback needs tls, or insecure"""
    port: int = Field(default=9464, ge=0, le=65535)
    """0: any free port. If the port is taken, training runs without the endpoint"""
    layer_series: int = Field(default=512, ge=1, le=100_000)
    """most (layer, slot) pairs with their own series; see metrics.md"""
    tls: Tls = Tls()
    insecure: bool = False
    """let other machines read the metrics without tls"""

    def security(self) -> EndpointSecurity:
        """Return the TLS settings of this endpoint and the daemon's."""
        return EndpointSecurity(tls=self.tls, insecure=self.insecure)


class TimeoutSettings(Settings):
    """Timeouts in seconds."""

    commit: float = Field(default=600.0, gt=0, le=_LONGEST)
    """for the segments of all ranks in one save"""
    close: float = Field(default=600.0, ge=0, le=_LONGEST)
    """for the save in progress when training ends; without ckpt.close(), at most 30"""
    lock: float = Field(default=15.0, ge=0, le=_LONGEST)
    """for a store that another process on this machine has locked"""
    staging: float = Field(default=300.0, gt=0, le=_LONGEST)
    """for storage that training waits for under staging.max_bytes; then the save is given up"""
    peer: float = Field(default=60.0, gt=0, le=_LONGEST)
    """for a snapshot to arrive on its peer"""
