"""``driftpoint init`` and ``schema``: write a starting configuration and its JSON schema."""

import json as json_
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Option

from deploy import console as output
from deploy.cli.run import CONFIG, DEFAULT_STORE
from deploy.console import DebugOption, JsonOption
from store.config_file import parse_value
from store.errors import ConfigError, StorageError, UsageError
from store.location import place_of
from store.names import STORE


def init(
    *,
    out: Annotated[Path, Option("--out", "-o", metavar="FILE", help="File to write; it must not exist yet.")] = CONFIG,
    store: Annotated[str | None, Option(metavar="DIR", help="Store for the commits.")] = None,
    policy: Annotated[str | None, Option(metavar="POLICY", help="Policy, which decides what is saved.")] = None,
    set_: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Set a parameter of the policy; repeatable.")
    ] = None,
    every: Annotated[str | None, Option(metavar="STEPS", help="Steps between decisions, or auto.")] = None,
    encoding: Annotated[str | None, Option(metavar="NAME", help="Encoding preset: raw, compact or careful.")] = None,
    bytes_per_hour: Annotated[float | None, Option(metavar="N", help="Bytes an hour for policy budget.")] = None,
    schema: Annotated[
        bool, Option("--schema/--no-schema", help="Also write the JSON schema for editors and refer to it.")
    ] = True,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Write a starting configuration: common settings at the top, all others commented out with their defaults."""
    chosen = _policy(policy, set_ or ())
    steps = int(every) if every is not None and every.isascii() and every.isdigit() else every
    given = {"store": store, "every": steps, "policy": chosen, "encoding": encoding}
    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if bytes_per_hour is not None:
        values["budget"] = {"bytes_per_hour": bytes_per_hour}
    elif chosen in ("budget", "auto"):
        raise UsageError(f"policy {chosen} needs a limit: add --bytes-per-hour, such as 2e10")
    path = values.get("store", DEFAULT_STORE)
    if (place_of(path).expanduser() / STORE).is_file():  # after the first start
        values["store"] = {"path": path, "create": False}
    files = create(out, values, schema=schema)
    output.answer({"files": [str(path) for path in files]}, lambda console: _draw(console, files), as_json=json)


def schema(*, _json: JsonOption = True, _debug: DebugOption = False) -> None:
    """Print the JSON schema of a configuration, for editors and validators. Always JSON."""
    from monitor.config.load import config_schema

    output.answer(config_schema(), lambda _: None, as_json=True)


def create(out: Path, values: Mapping[str, Any], *, schema: bool) -> list[Path]:
    """Write the configuration and its schema beside it; return the paths written.

    Raises ConfigError, with nothing written, if the values are invalid or a file exists."""
    from monitor.config.load import SCHEMA_FILE, TITLE, config_schema, load_config, written

    try:
        load_config(values)
    except ConfigError as error:
        raise UsageError(str(error).removeprefix("the configuration: ")) from error
    beside = out.parent / SCHEMA_FILE
    if schema:
        _require_ours(beside, TITLE)
    _write(out, written(values, str(out), schema=schema), "x")
    if not schema:
        return [out]
    _write(beside, json_.dumps(config_schema(), indent=2) + "\n", "w")
    return [out, beside]


def _draw(console: Console, files: list[Path]) -> None:
    made, beside = files[0], f", and {files[1]} for editors" if len(files) > 1 else ""
    console.print(output.cell(f"Wrote {made}{beside}."))
    console.print(output.cell(f'Next: monitor.attach(..., "{made}") in the script; driftpoint doctor -c {made}'))
    console.print(output.cell("After the first start: set `create: false` of `store:`, as a comment there shows."))


def _policy(name: str | None, given: Sequence[str]) -> str | dict[str, Any] | None:
    if not given:
        return name
    if name is None:
        raise UsageError("--set sets a parameter of a policy: name the policy with --policy")
    values: dict[str, Any] = {"name": name}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals or not key or key in values:
            raise UsageError(f"--set takes each parameter once, as key=value, such as --set k=4, not {one!r}")
        values[key] = parse_value(value, f"--set {key}")
    return values


def _require_ours(beside: Path, title: str) -> None:
    try:
        found = json_.loads(beside.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("title") != title:
        raise UsageError(f"{beside} exists and is not a schema of driftpoint: move it away, or use --no-schema")


def _write(path: Path, text: str, mode: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} already exists and is not replaced: name another file with -o") from error
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
