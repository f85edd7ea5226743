"""Events reach every listener of a job, in a fixed order."""

from __future__ import annotations

from typing import Any

import pytest

from monitor.events import Listeners, SaveListener

EVENTS = sorted(name for name in vars(SaveListener) if name.startswith("on_"))


class Recorder(SaveListener):
    """Notes the events of one kind."""

    def __init__(self, name: str, event: str, calls: list[tuple[str, tuple[Any, ...]]], fails: bool = False) -> None:
        def record(*values: Any) -> None:
            calls.append((name, values))
            if fails:
                raise OSError(name)

        setattr(self, event, record)


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_reaches_all_in_order_and_the_last_one_in_the_opposite_order(event: str) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []
    getattr(Listeners(*(Recorder(name, event, calls) for name in "abc")), event)(1, 2)
    assert calls == [(name, (1, 2)) for name in ("cba" if event == "on_close" else "abc")]


def test_what_a_listener_raises_is_not_swallowed() -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []
    made = [Recorder(name, "on_epoch", calls, fails=name == "b") for name in "abc"]
    with pytest.raises(OSError, match="b"):
        Listeners(*made).on_epoch(3)
    assert [name for name, _ in calls] == ["a", "b"]


def test_a_listener_that_follows_no_event_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.on_comit follows no event"):
        type("Wrong", (SaveListener,), {"on_comit": lambda self, event: None})
