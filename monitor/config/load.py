"""Load, validate and write the configuration of a job. Errors name the key and the nearest known one.

Everything is checked once, when it is read; no store is opened. Settings are written as a commented YAML file and as a
JSON schema, for ``driftpoint init`` and the docs."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, LiteralString

import yaml
from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from monitor.config import schema as sections
from policies.base import Policy
from policies.bounds import Bounds, bound
from policies.budget import BudgetPolicy, spends
from policies.builtin import Observe
from policies.encodings import explosive
from policies.registry import anchored, policy_from, with_fixed_encoding
from store.config_file import read_yaml
from store.encoding import ENCODINGS, encoding_named
from store.errors import ConfigError
from store.location import beside, is_url, store_place
from store.metrics_server import LOOPBACK
from store.names import RAW, WEIGHTS
from store.retention import Retention, most_commits
from store.text import suggestion


def _union(text: LiteralString) -> WrapValidator:
    """Raise one message instead of one per member of the union."""

    def validate(value: Any, validated: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validated(value)
        except ValidationError as error:
            raise PydanticCustomError("union", text) from error

    return WrapValidator(validate)


_STEPS = _union("it must be a number of steps >= 1, or auto")
_STORE = _union("it must be a path, or a mapping: {path: DIR, create: false}")
_STAGING = _union("it must be auto, eager, lazy, or a mapping: {mode: auto, max_bytes: 8.0e+9}, at least 2.0e+7")


_CHAIN = 8  # commits that take about the bytes that differences keep from being pruned


class Config(sections.Settings):
    """All settings of a job: the YAML file that `monitor.attach` takes; see docs/configuration.md."""

    store: Annotated[Annotated[str, Field(min_length=1)] | sections.StoreSettings, _STORE] = "./driftpoint-checkpoints"
    """a directory on a disk of all nodes, or s3://, az://, gs://BUCKET/PREFIX; or {path: DIR, create: false}"""
    every: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], _STEPS] = "auto"
    """optimizer steps between decisions; auto: the interval that loses least, see docs/interval.md"""
    policy: str | dict[str, Any] = Field(default="full", json_schema_extra=sections.policies_schema)
    """a name, or a mapping: {name: threshold, threshold: 0.01}; see docs/policies.md"""
    staging: Annotated[Literal["auto", "eager", "lazy"] | sections.StagingSettings, _STAGING] = "auto"
    """eager: copy before step() returns. lazy: copy during the next forward and backward; or {max_bytes: 8.0e+9}"""
    encoding: str | dict[str, str] = Field(default="raw", json_schema_extra=sections.encodings_schema)
    """or compact, careful, or a mapping: {exp_avg: int8-block}; see docs/encodings.md"""
    encode: Literal["staging", "saving"] = "saving"
    """saving: in the background. staging: on the device while copying (a third to copy), unless staging.max_bytes"""
    packing: Literal["auto", "none"] | Annotated[int, Field(ge=1, le=19)] = "none"
    """zstd level 1 to 19 on byte planes; auto: the highest that fits between saves"""
    differences: bool = False
    """store the difference to an earlier save where that is smaller; needs packing"""
    frozen: Literal["save", "skip"] = "save"
    """skip: do not store frozen weights, if the script loads them itself; see docs/huggingface.md"""
    self_check: bool = True
    """compare the first save with the live state; what does not come back equal is logged, and not exact"""
    auto: sections.AutoSettings = sections.AutoSettings()
    bounds: sections.BoundSettings = sections.BoundSettings()
    budget: sections.BudgetSettings = sections.BudgetSettings()
    drift: sections.DriftSettings = sections.DriftSettings()
    layers: sections.LayerSettings = sections.LayerSettings()
    memory: sections.MemorySettings = sections.MemorySettings()
    journal: sections.JournalSettings = sections.JournalSettings()
    daemon: sections.DaemonSettings = sections.DaemonSettings()
    retention: sections.RetentionSettings = sections.RetentionSettings()
    resume: sections.ResumeSettings = sections.ResumeSettings()
    preemption: sections.PreemptionSettings = sections.PreemptionSettings()
    trace: sections.TraceSettings = sections.TraceSettings()
    s3: sections.S3Settings = sections.S3Settings()
    metrics: sections.MetricsSettings = sections.MetricsSettings()
    timeouts: sections.TimeoutSettings = sections.TimeoutSettings()

    @model_validator(mode="before")
    @classmethod
    def _default_policy(cls, values: Any) -> Any:
        """Take policy ``auto`` where none is named, encodings are, and a budget limits what may be spent."""
        if isinstance(values, dict) and "policy" not in values and isinstance(budget := values.get("budget"), dict):
            encoding = values.get("encoding", RAW)
            names = encoding.values() if isinstance(encoding, dict) else (encoding,)
            limited = any(limit is not None for key, limit in budget.items() if key != "burst_seconds")
            if limited and any(name != RAW for name in names):
                return {**values, "policy": "auto"}
        return values

    @property
    def store_path(self) -> str:
        return self.store if isinstance(self.store, str) else self.store.path

    @property
    def copies(self) -> sections.StagingSettings:
        """The settings in ``staging:``."""
        return sections.StagingSettings(mode=self.staging) if isinstance(self.staging, str) else self.staging

    @property
    def creates_store(self) -> bool:
        return isinstance(self.store, str) or self.store.create

    def bounded_policy(self) -> Policy:
        """Return the policy inside its bounds. Raise ConfigError if they are invalid or contradict each other."""
        policy = policy_from(self.policy)
        self._check_budget(policy)
        return self.in_bounds(policy)

    def in_bounds(self, policy: Policy) -> Policy:
        """Return ``policy`` inside the bounds, with the configured encodings. Raise ConfigError on contradictions."""
        encodings, bounds = self.encodings(), self.limits()
        _check_divisors(encodings)
        return with_fixed_encoding(bound(policy, bounds), encodings, bounds)

    def limits(self) -> Bounds:
        """Return the bounds. Raise ConfigError if they are invalid."""
        settings = self.bounds
        lossy = any(not encoding_named(name).lossless for name in self.encodings().values())
        precision = settings.precision or ("any" if lossy else "exact")
        # Under auto an interval is never longer than the bound: the most steps there can be between two decisions.
        longest = settings.max_staleness if self.every == "auto" else self.every
        return Bounds(settings.max_staleness, settings.max_drift, precision, longest, self.journal.enabled)

    def _check_budget(self, policy: Policy) -> None:
        limited = self.budget.limited
        inner = policy.inner if isinstance(policy, Observe) else policy
        if isinstance(inner, BudgetPolicy) and not limited:
            raise ConfigError(
                f"policy {inner.name} has no limit: set `budget: {{bytes_per_hour: 2.0e+10}}`, or stall_share, or "
                "storage_share"
            )
        if limited and self.journal.enabled:
            raise ConfigError("journal: it needs whole layers, and a budget is spent slot by slot: use another policy")
        if limited and not spends(policy):
            raise ConfigError(
                "budget: only a policy that spends (budget, auto, or your own with `spends = True`) uses it, and "
                f"the policy is {policy.name}: set `policy: budget`, or remove the section"
            )

    def encodings(self) -> Mapping[str, str]:
        """Return the encoding of each slot that is not raw. Raise ConfigError for an unknown name."""
        return _encodings("encoding", self.encoding)

    def memory_encodings(self) -> Mapping[str, str]:
        """Return the encodings of in-memory snapshots. Raise ConfigError if they are lossy and the bounds forbid it."""
        encodings = _encodings("memory.encoding", self.memory.encoding)
        _check_divisors(encodings)
        if self.bounds.precision == "exact":
            lossy = [name for name in encodings.values() if not encoding_named(name).lossless]
            if lossy:
                raise ConfigError(f"bounds.precision: exact forbids memory.encoding {lossy[0]}, which loses bits")
        return encodings

    def shares_memory(self) -> bool:
        """Return whether saves may be staged in the memory of snapshots. Else they need buffers of their own."""
        memory, raw = self.memory, not any((self.encodings(), self.memory_encodings()))
        return memory.enabled and memory.versions > 1 and not memory.peers and raw

    def trace_path(self) -> Path | None:
        """Return the absolute path of the drift trace, None if it is off. Raise ConfigError if it is in the store."""
        if not self.trace.enabled:
            return None
        store = store_place(self.store_path)
        if self.trace.path is None:
            return beside(store, ".trace.jsonl")
        path = Path(os.path.abspath(os.path.expanduser(self.trace.path)))  # noqa: PTH100, PTH111
        if path.is_relative_to(store):
            raise ConfigError(f"trace.path {path} is inside the store, which must hold nothing else: set another path")
        return path

    def retention_rule(self) -> Retention:
        """Return the retention rule. Raise ConfigError if it would keep nothing."""
        return Retention(**self.retention.model_dump())

    def most_commits(self) -> int:
        """Return the most commits that exist at a time in a long run, with the one being written.

        What differences need is counted as a chain of more."""
        kept = most_commits(self.retention_rule(), 100 if self.every == "auto" else self.every)
        return kept + _CHAIN * self.differences


def bytes_each(encodings: Mapping[str, str]) -> float:
    """Return the bytes per parameter of weights and both moments of Adam in these encodings."""
    numel = 1 << 20
    slots = (WEIGHTS, "exp_avg", "exp_avg_sq")
    return sum(encoding_named(encodings.get(slot, RAW)).stored_bytes(numel, "F32") / numel for slot in slots)


ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config | None
"""The path of a YAML file, a mapping, or a configuration; None for the defaults."""


def read_config(source: ConfigSource) -> Config:
    """Read a configuration and check each setting by itself. Does not load the policy."""
    if isinstance(source, Config):
        config = source
    elif source is None or isinstance(source, Mapping):
        config = _validate(source or {}, "the configuration")
    else:
        values = dict(read_yaml(Path(source)).values)
        if "policy" in values:  # a policy file is named relative to the configuration's folder
            values["policy"] = anchored(values["policy"], Path(source).parent)
        config = _validate(values, str(source))
    security, metrics, daemon = config.metrics.security(), config.metrics, config.daemon
    security.check(metrics.host if metrics.enabled else LOOPBACK, "metrics.host")
    security.check(daemon.host if daemon.enabled else LOOPBACK, "daemon.host")
    _check_known("preemption.signals", config.preemption.signals, sections.SIGNALS)
    return config


def load_config(source: ConfigSource) -> Config:
    """Read a configuration from a YAML file, a mapping, or None (the defaults), and check all of it."""
    config = read_config(source)
    config.bounded_policy()
    config.retention_rule()
    _check_location(config)
    config.trace_path()
    config.memory_encodings()
    if config.every != "auto" and config.auto != sections.AutoSettings():
        raise ConfigError(
            f"auto: the section holds under `every: auto` only, and every is {config.every}: set `every: auto`, or "
            "remove it"
        )
    if config.memory.peers and not config.memory.enabled:
        raise ConfigError("memory.peers replicates the memory tier, which is off: set `memory: {enabled: true}`, too")
    if config.journal.enabled and any((config.encodings(), config.memory_encodings())):
        raise ConfigError("journal: steps continue what is stored without loss: set `encoding: raw`, also in memory:")
    if config.memory.enabled and config.copies.max_bytes is not None:
        raise ConfigError("staging.max_bytes: the memory tier keeps whole copies of the state: remove it, or memory:")
    if config.differences and config.packing == "none":
        raise ConfigError("differences: true saves bytes only where they are packed: set `packing: auto` or a level")
    return config


def _check_location(config: Config) -> None:
    """Raise ConfigError for an invalid store URL, and for a section that the kind of store does not support."""
    place = store_place(config.store_path)
    if is_url(place) and config.daemon.enabled:
        raise ConfigError(
            f"daemon: it can rescue snapshots into directories only, and the store is {place}: remove the section. "
            "With `memory: {enabled: true}` a job that restarts on this node resumes from memory itself"
        )
    if not is_url(place) and config.s3 != sections.S3Settings():
        raise ConfigError(f"s3: the section is for s3://, az:// and gs:// stores, and the store is {place}: remove it")


def _check_divisors(encodings: Mapping[str, str]) -> None:
    """Raise ConfigError for an encoding that rounds small values to zero in a slot that is a divisor of updates."""
    for slot, encoding in encodings.items():
        problem = explosive(slot, encoding)
        if problem is not None:
            raise ConfigError(f"encoding: {problem}")


def _encodings(key: str, value: str | dict[str, str]) -> Mapping[str, str]:
    if isinstance(value, dict):
        _check_known(key, value.values(), ENCODINGS)
        return value
    _check_known(key, [value], sections.ENCODINGS)
    return sections.ENCODINGS[value]


def _check_known(key: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{key}: unknown {name!r}: {suggestion(name, known)} Known: {', '.join(known)}")


def _validate(values: Mapping[str, Any], where: str) -> Config:
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(_explain(item) for item in error.errors())) from error


_REMOVED = {"metrics.basic_auth": "there is no login any more: set metrics.tls.client_ca instead"}


def _explain(item: Any) -> str:
    path = [str(step) for step in item["loc"]]
    if item["type"] != "extra_forbidden":
        return f"{'.'.join(path)}: {item['msg'].lower()} (it is {item['input']!r})"
    if ".".join(path) in _REMOVED:
        return f"{'.'.join(path)}: {_REMOVED['.'.join(path)]}"
    known = _known_keys(path[:-1])
    return f"unknown key {'.'.join(path)!r}: {suggestion(path[-1], known)} Known here: {', '.join(sorted(known))}"


def _known_keys(path: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for step in path:
        kind = model.model_fields[step].annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        model = kind
    return list(model.model_fields)


SCHEMA_FILE: Final = "driftpoint.schema.json"
TITLE: Final = "Driftpoint configuration"

_COLUMN = 34  # column at which comments begin

COMMON: Final = ("store", "every", "policy", "encoding", "staging", "memory", "metrics", "retention")
"""Settings that most jobs use, in the order in which they are shown."""

ADVANCED: Final = tuple(key for key in Config.model_fields if key not in COMMON)

_WRITTEN = ("store", "every", "policy")  # settings that a new file sets even if they have their default values

_HEAD = """\
# Settings of Driftpoint. `driftpoint doctor -c {name}` tries them on this machine.
# Lines that begin with # show defaults. To change one, remove its #, and that of its section.
"""

_LATER = "# After the first start, which makes the store, refuse to begin without it: store: {store}"


def written(values: Mapping[str, Any], name: str, *, schema: bool) -> str:
    """Return a configuration file: the common settings, then the advanced ones; defaults are commented out.

    values: settings that the file sets. schema: whether it refers to a JSON schema in the same directory."""
    active = {key: getattr(Config(), key) for key in _WRITTEN} | dict(values)
    text = f"# yaml-language-server: $schema=./{SCHEMA_FILE}\n" if schema else ""
    text += _HEAD.format(name=name) + "\n"
    common = [line for key in COMMON for line in _lines(key, active)]
    if isinstance(active["store"], str):
        common.insert(1, _LATER.format(store=_yaml({"path": active["store"], "create": False})))
    text += "".join(f"{line}\n" for line in common)
    return text + "\n# Advanced\n\n" + "".join(f"{line}\n" for key in ADVANCED for line in _lines(key, active))


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file (draft 2020-12)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema(), "title": TITLE}


def _lines(key: str, active: Mapping[str, Any]) -> Iterator[str]:
    field = Config.model_fields[key]
    if isinstance(field.default, BaseModel):
        yield ""
    yield from setting_lines(key, field, active, "")


def setting_lines(key: str, field: FieldInfo, active: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of a setting or section. Settings outside ``active`` are commented out."""
    mark = "" if key in active else "#"
    if not isinstance(field.default, BaseModel):
        value = _yaml(active.get(key, field.default))
        yield f"{f'{mark}{indent}{key}: {value}':<{_COLUMN - 1}} # {field.description}"
        return
    section = type(field.default)
    summary = " ".join((section.__doc__ or "").replace("``", "`").split()).removesuffix(".")
    yield f"{f'{mark}{indent}{key}:':<{_COLUMN - 1}} # {summary[0].lower()}{summary[1:]}"
    for name, inner in section.model_fields.items():
        yield from setting_lines(name, inner, active.get(key, {}), f"{indent}  ")


def _yaml(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    dumped: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return dumped.removesuffix("\n").removesuffix("\n...")
