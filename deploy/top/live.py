"""The loop of ``driftpoint top``: draw, listen to keys, draw again. One thread draws and listens, another one looks."""

from __future__ import annotations

import time
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from deploy.safety.facts import Facts
from deploy.top.frame import Frame, View, frame
from deploy.top.keys import typed
from deploy.top.watch import Looker, Watch

_TICK = 0.2
"""Seconds to wait for a key."""


def run(console: Console, watch: Watch, interval: float) -> Facts | None:
    """Until ``q`` or Ctrl-C. Returns what was seen last; None where nothing ever was. Raises what looking raised."""
    looker = Looker(watch, interval)
    view, drawn, before = View(keys=True), None, None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live, typed() as keys:
            while True:
                seen = looker.seen
                if looker.error is not None:
                    raise looker.error
                patience = max(15.0, 3 * interval, 5 * seen.took)
                view = replace(view, trouble=seen.trouble, age=time.monotonic() - seen.at, patience=patience)
                state = (seen, view.first, view.sorted, console.size, view.old and int(view.age))
                if state != before:
                    drawn, before = _draw(live, console, seen.facts, view), state
                for key in keys(_TICK):
                    if key == "quit":
                        return seen.facts
                    view = _moved(view, key, drawn)
    except KeyboardInterrupt:
        return looker.seen.facts
    finally:
        looker.end()


def _draw(live: Live, console: Console, facts: Facts | None, view: View) -> Frame | None:
    width, height = console.size
    if facts is None:
        live.update(Text(view.trouble or "Looking …"), refresh=True)
        return None
    found = frame(console, facts, view, width, height)
    live.update(Group(*found.lines), refresh=True)
    return found


def _moved(view: View, key: str, drawn: Frame | None) -> View:
    if key == "sort":
        return replace(view, sorted=not view.sorted, first=0)
    if drawn is None:
        return view
    page = max(1, drawn.shown - 1)
    last = max(0, drawn.layers - drawn.shown)
    by = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -last, "end": last}.get(key, 0)
    return replace(view, first=max(0, min(last, min(view.first, last) + by)))
