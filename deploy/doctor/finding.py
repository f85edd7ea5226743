"""What a check found: how it stands, what was seen, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]
"""``warn``: a job runs, and something is lost, slow or off. ``fail``: it would not save, or
not survive what it must."""


@dataclass(frozen=True)
class Finding:
    """One check. seen: in words. todo: what to do next; nothing where all is well."""

    check: str
    state: State
    seen: str
    todo: str = ""


def healthy(findings: Iterable[Finding]) -> bool:
    """Nothing failed."""
    return all(one.state != "fail" for one in findings)
