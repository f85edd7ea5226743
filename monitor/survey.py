"""Before each decision: is the job still what was attached, and which units does it have?

A parameter in the optimizer but not in the model, a module added later, an optimizer that was replaced: what is known
of such a job is not all of it, and a commit of a part would pass for the whole. So nothing is saved while it lasts,
the reason is told, and training goes on. Training thread; the ranks learn of each other's trouble from the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from monitor.adapters.base import Adapter, Trail
from monitor.units import LocalUnit, UnitTable
from store.errors import UnsupportedError, UsageError
from store.names import Unit

_log = logging.getLogger("driftpoint")


@dataclass(frozen=True)
class Survey:
    """What there is on this rank. trouble: why it cannot be saved; then ``local`` is empty."""

    local: Mapping[Unit, LocalUnit] = field(default_factory=dict)
    trouble: str | None = None


class Surveyor:
    """Looks at the job of one rank. Attach it before training, :meth:`mark` after weights were loaded."""

    def __init__(self, adapter: Adapter, table: UnitTable) -> None:
        self._adapter = adapter
        self._table = table
        self._updates = 0
        self._trail: Trail | None = None
        adapter.before_update(self._count)
        self.mark()

    def mark(self) -> None:
        """From now on weights change only by the optimizer."""
        self._trail, self._updates = self._adapter.trail(), 0

    def survey(self, stepped: bool) -> Survey:
        """Look. ``stepped``: the training loop says that it took optimizer steps since the last time."""
        try:
            self._adapter.check_attached()
            if stepped:
                self._require_in_use()
            local = self._table.local()
            self.mark()
        except UsageError as error:
            return Survey(trouble=str(error))
        except Exception as error:  # noqa: BLE001 - the edge to the user's own modules and optimizer: told as trouble
            _log.error("the model and the optimizer cannot be looked at", exc_info=error)
            return Survey(trouble=f"the model and the optimizer cannot be looked at: {error!r}")
        return Survey(local)

    def _require_in_use(self) -> None:
        """A heuristic: only seen from here, nobody tells that ``optimizer`` was bound to another object.

        That the attached one took no step is no proof (a gradient scaler leaves steps out), nor that weights changed
        (scripts clip them, average them). Both together, with a state that stood still, are another optimizer's work:
        its moments are nowhere, and a resume would go on with the old ones."""
        before = self._trail
        now = None if self._updates or before is None else self._adapter.trail()
        if before is None or now is None:
            return
        if now.weights != before.weights and now.state == before.state:
            self.mark()
            raise UnsupportedError(
                f"the attached {now.optimizer} took no step since the last decision, yet its parameters changed: was "
                "it replaced by another optimizer, whose state would be lost? close() and attach the one that trains"
            )

    def _count(self) -> None:
        self._updates += 1
