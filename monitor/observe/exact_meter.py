"""Measure drift exactly, against a full copy of the committed state in host memory."""

import math
import threading
from collections.abc import Sequence

import torch

from monitor.observe.drift_meter import Measure, all_finite
from store.names import Unit

_CHUNK = 1 << 17
"""Elements compared at a time: two float64 buffers of 1 MiB fit in the cache."""


class ExactMeter:
    """Computes distances in float64 against a full copy, with a relative error below 1e-6.

    Pieces may have any real dtype and device; an accelerator's are copied to the host, which is slow: use the sketch
    there. Once a save is committed its staged tensors become the reference without a copy, and those of the old
    reference are returned: every tensor passed to :meth:`stage` is returned by :meth:`settle` exactly once, at this
    save or a later one, so staging memory does not grow. Thread-safe.
    """

    def __init__(self) -> None:
        self._references: dict[Unit, list[torch.Tensor]] = {}
        self._staged: dict[Unit, list[torch.Tensor]] = {}
        self._lock = threading.RLock()
        self._present = torch.empty(_CHUNK, dtype=torch.float64)
        self._past = torch.empty(_CHUNK, dtype=torch.float64)

    @property
    def memory_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for copies in self._references.values() for t in copies)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of working memory, independent of the number of units."""
        return 2 * _CHUNK * 8

    def has_reference(self, unit: Unit) -> bool:
        return unit in self._references

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        """Return the distance to the reference.

        If values are not finite and there is a reference, ``moved_sq`` is inf; if values of the reference are not
        finite, ``reference_sq`` is 0.0 as well. Raises ValueError if the sizes of the pieces changed.
        """
        with self._lock:
            references = self._references.get(unit)
            if references is None:
                return Measure(0.0, 0.0, all_finite(pieces))
            present, past = [p.numel() for p in pieces], [r.numel() for r in references]
            if present != past:
                raise ValueError(
                    f"the pieces of {unit} have {present} elements, its reference {past}; reset the unit first"
                )
            moved_sq, reference_sq = self._compare(pieces, references)
        # A non-finite value makes the sum non-finite; the reverse may be a float64 overflow.
        if math.isfinite(moved_sq + reference_sq):
            return Measure(moved_sq, reference_sq, True)
        return Measure(math.inf, reference_sq if math.isfinite(reference_sq) else 0.0, all_finite(pieces))

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        copies = [piece.detach().to("cpu", copy=True) for piece in pieces]
        with self._lock:
            self._references[unit] = copies

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        """Keep a save's copies until it is settled. Raises ValueError if an earlier save of the unit is unsettled."""
        with self._lock:
            if unit in self._staged:
                raise ValueError(f"{unit} is already staged; settle that save before staging another one")
            self._staged[unit] = list(copies)

    def settle(self, unit: Unit, committed: bool) -> list[torch.Tensor]:
        """Make the staged copies the reference if committed, and return the tensors that are free now.

        Raises ValueError if the unit is not staged.
        """
        with self._lock:
            if unit not in self._staged:
                raise ValueError(f"{unit} is not staged; call stage() before settle()")
            copies = self._staged.pop(unit)
            if not committed:
                return copies
            freed = self._references.get(unit, [])
            self._references[unit] = copies
            return freed

    def _compare(self, pieces: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> tuple[float, float]:
        """Return the squared distance and the squared norm of the reference."""
        moved_sq = reference_sq = 0.0
        with torch.no_grad():
            for piece, reference in zip(pieces, references, strict=True):
                for now, then in zip(torch.split(piece, _CHUNK), torch.split(reference, _CHUNK), strict=True):
                    present = self._present[: now.numel()].copy_(now)
                    past = self._past[: now.numel()].copy_(then)
                    reference_sq += float(torch.dot(past, past))
                    present.sub_(past)
                    moved_sq += float(torch.dot(present, present))
        return moved_sq, reference_sq
