"""Check settings, parameters and decisions of policies, and describe their failures in one line.

Settings may have any type: users type them. User code may raise any exception, so even ``str(error)`` may fail.
Messages name the setting or unit, the value seen and those allowed; ``where`` is a prefix such as ``policy parity``."""

import dataclasses
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.base import Choice, Decision, UnitStats
from store.errors import ConfigError, UsageError
from store.names import Unit
from store.text import suggestion


def check_integer(where: str, name: str, value: object, least: int) -> None:
    """Raise ConfigError unless ``value`` is an integer >= ``least``. Booleans do not count."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{where}: {name} must be an integer >= {least}, not {described(value)}")


def check_number(where: str, name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a finite number >= 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise ConfigError(f"{where}: {name} must be a finite number >= 0, not {described(value)}")


def check_one_of(where: str, name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ConfigError unless ``value`` is in ``allowed``."""
    words = tuple(allowed)
    if value not in words:
        raise ConfigError(f"{where}: {name} must be {' or '.join(map(repr, words))}, not {described(value)}")


def described(value: object) -> str:
    """Format a value for an error message; explain numbers that YAML reads as text."""
    if isinstance(value, str):
        with suppress(ValueError):
            float(value)
            return f"the text {value!r} (YAML takes 1e-3 for text: write 1.0e-3, without quotes)"
    return repr(value)


Refusal = Callable[[str, str], str | None]  # (slot, encoding) -> why it is not allowed, or None
_MAX_REASON = 1000  # characters of a reason: every manifest has one for each unit of its save
_MAX_FAILURE = 200


class PolicyError(UsageError):
    """Raised if a policy breaks its contract, or is shown a unit twice.

    unit: None if the error is not about a single unit. what: the message without policy and unit."""

    def __init__(self, policy: str, unit: Unit | None, what: str) -> None:
        super().__init__(f"policy {policy}: {what}" if unit is None else f"policy {policy}: {unit}: {what}")
        self.policy, self.unit, self.what = policy, unit, what


def check_shown(policy: str, stats: Sequence[UnitStats]) -> None:
    """Raise PolicyError if a unit is shown twice."""
    seen: set[Unit] = set()
    for one in stats if len({one.unit for one in stats}) < len(stats) else ():
        if one.unit in seen:
            raise PolicyError(policy, one.unit, "shown twice in one decision; sum it over ranks before deciding")
        seen.add(one.unit)


def checked_answer(policy: str, stats: Sequence[UnitStats], answer: object, refusal: Refusal | None) -> Decision:
    """Check a policy's return value, and copy it into a decision of plain values, in the order of ``stats``.

    A missing unit would silently grow stale; a lossy encoding under precision ``exact`` would change the state.
    Raises PolicyError unless exactly the units shown have a choice, or if a choice has no reason or an encoding that
    ``refusal`` refuses. With ``refusal`` None any name is allowed."""
    if not isinstance(answer, Decision):
        what = f"select returned {described(answer)[:80]}, not a Decision; return Decision({{unit: Choice(...), ...}})"
        raise PolicyError(policy, None, what)
    given: object = answer.choices
    if not isinstance(given, Mapping):
        raise PolicyError(policy, None, f"Decision.choices must map units to choices, not {described(given)[:80]}")
    choices: dict[object, object] = dict(given)
    shown = dict.fromkeys([one.unit for one in stats])
    for one in shown:
        if one not in choices:
            raise PolicyError(policy, one, "shown but not decided on; give it a choice, a skip at least")
    for unit in [one for one in choices if one not in shown]:
        if isinstance(unit, Unit):
            raise PolicyError(policy, unit, "decided on but never shown; choose among the units given to select")
        what = f"Decision.choices has the key {described(unit)[:80]}; keys are the units shown"
        raise PolicyError(policy, None, what)
    checked: dict[tuple[str, int], Choice] = {}  # policies give many units the same object
    for one in shown:
        if (key := (one.slot, id(choices[one]))) not in checked:
            checked[key] = _check_choice(policy, one, choices[one], refusal)
    return Decision({one: checked[one.slot, id(choices[one])] for one in shown})


def _check_choice(policy: str, unit: Unit, choice: object, refusal: Refusal | None) -> Choice:
    if not isinstance(choice, Choice):
        raise PolicyError(policy, unit, f"its choice is {described(choice)[:80]}; make it Choice(encoding, reason)")
    reason, encoding = _text(choice.reason), _text(choice.encoding)
    if not reason:
        raise PolicyError(policy, unit, "its choice has no reason; say why it is saved or skipped")
    if len(reason) > _MAX_REASON:
        raise PolicyError(policy, unit, f"its reason has {len(reason)} characters; at most {_MAX_REASON} are allowed")
    if choice.encoding is not None and not encoding:
        raise PolicyError(policy, unit, f"encoding {choice.encoding!r} is no name; use None to skip the unit")
    problem = None if encoding is None or refusal is None else refusal(unit.slot, encoding)
    if problem is not None:
        raise PolicyError(policy, unit, problem)
    return Choice(encoding, reason)


def _text(value: object) -> str | None:
    """Convert to a plain str that UTF-8 can encode; None if ``value`` is not a str."""
    if not isinstance(value, str):
        return None
    return str.__str__(value).encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True)
class Failure:
    """A policy's failure, for error messages, logs and manifests."""

    what: str  # ``raised ValueError('x')``, or the breach of contract
    place: str  # ``file:line`` where it was raised, or empty
    kind: str  # equal for repetitions of a failure, although texts may contain a step or a value

    @property
    def located(self) -> str:
        """``what``, and the place if it is known."""
        return f"{self.what} at {self.place}" if self.place else self.what


def failure_of(error: BaseException) -> Failure:
    """Describe an exception as a failure."""
    if isinstance(error, PolicyError):
        about = "" if error.unit is None else f"{error.unit}: "
        return Failure(f"broke its contract ({_line(about + error.what)})", "", error.what)
    place = _place(error)
    return Failure(f"raised {raised(error)}", place, f"{type(error).__name__} at {place}")


def raised(error: BaseException) -> str:
    """Format the class and text of an error as one printable line."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the edge to the user's exception class: its text is unavailable
        text = "?"
    return _line(f"{type(error).__name__}({text!r})" if text else f"{type(error).__name__}()")


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _line(text: str) -> str:
    flat = " ".join(text.encode("utf-8", "backslashreplace").decode("utf-8").split())
    return flat if len(flat) <= _MAX_FAILURE else flat[: _MAX_FAILURE - 1] + "…"


def check_parameters(policy: str, kind: type[Any], given: Mapping[str, Any]) -> None:
    """Check that a class can be called with the given parameters.

    A field of a dataclass whose metadata say ``setting: False`` cannot be given. Raises ConfigError if a parameter is
    unknown, or one without a default is missing."""
    try:
        signature = _signature(kind)
    except (TypeError, ValueError):  # a class written in C may have none
        return
    try:
        signature.bind(**given)
    except TypeError as error:
        named = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        raise ConfigError(f"policy {policy}{_reason(str(error), [one.name for one in named], given)}") from error


def _signature(kind: type[Any]) -> inspect.Signature:
    signature = inspect.signature(kind)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    fixed = {one.name for one in fields if not one.metadata.get("setting", True)}
    return signature.replace(parameters=[one for one in signature.parameters.values() if one.name not in fixed])


def _reason(error: str, known: list[str], given: Mapping[str, Any]) -> str:
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None and not known:
        return f" takes no parameters, and {unknown!r} was given; remove it"
    if unknown is not None and "unexpected" in error:
        return f": unknown parameter {unknown!r}: {suggestion(unknown, known)} Known: {', '.join(known)}"
    rename = "; `name:` in the settings is the policy's own name: rename the parameter" if "'name'" in error else ""
    return f": {error}{rename}"
