"""Leave parameters that are frozen when the job attaches out of the store (``frozen: skip``), except fingerprints.

For jobs whose script loads those weights itself, as in fine-tuning with adapters. A resume compares fingerprints and
refuses other weights by name. Parameters frozen later are saved, those unfrozen later refused. Training thread."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from monitor.adapters.base import Adapter, FragmentPlace, LiveValue, Piece, Slots, TensorInfo
from monitor.adapters.identity import version_of
from monitor.distributed import Group
from store.errors import ModelMismatchError, UnsupportedError
from store.names import FROZEN, LEFT_OUT, Box, Fragment, strides_of
from store.text import listed

_CHUNK = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # the odd constants of splitmix64, signed


class SkipFrozenAdapter:
    """An adapter without the parameters that ``inner`` calls frozen. Call :meth:`agree` on all ranks before use.

    Attributes that it does not define are those of ``inner``."""

    def __init__(self, inner: Adapter) -> None:
        self._inner = inner
        self._skipped = {fqn: 0 for fqn, info in inner.tensors().items() if info.kind == "frozen"}
        self._seen: dict[Fragment, tuple[int, tuple[int, int]]] = {}  # fingerprint, and address and version then
        for piece in inner.owned():
            if not self._is_saved(piece):
                value = fingerprint(piece.tensor, piece.fragment.start, piece.fragment.box)
                self._seen[piece.fragment] = value, _address_and_version(piece)
                self._skipped[piece.fragment.fqn] += value

    def agree(self, group: Group) -> None:
        """Add up the fingerprints of all ranks' pieces. Collective."""
        parts = group.all_gather(self._skipped)
        self._skipped = {fqn: sum(part.get(fqn, 0) for part in parts) % (1 << 64) for fqn in self._skipped}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def check_attached(self) -> None:
        self._inner.check_attached()
        for fqn, info in self._inner.tensors().items():
            if fqn in self._skipped and info.kind != "frozen":
                raise UnsupportedError(
                    f"{fqn} was frozen when the job attached, so `frozen: skip` left it out, and is trained now: "
                    "unfreeze it before monitor.attach, or set `frozen: save`"
                )

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {fqn: info for fqn, info in self._inner.tensors().items() if fqn not in self._skipped}

    def owned(self) -> list[Piece]:
        """Return the pieces that are saved. Raise UnsupportedError if a skipped one was changed since attaching."""
        pieces = self._inner.owned()
        for piece in pieces:
            if not self._is_saved(piece):
                self._require_unchanged(piece)
        return [piece for piece in pieces if self._is_saved(piece)]

    def held(self) -> list[Piece]:
        return [piece for piece in self._inner.held() if self._is_saved(piece)]

    def expected(self, slots: Slots) -> list[FragmentPlace]:
        return [place for place in self._inner.expected(slots) if self._is_saved(place)]

    def identity(self) -> None:
        return None  # so that pieces are listed at every decision, which checks the skipped ones for changes

    def run_state(self) -> dict[str, Any]:
        return self.capture_run_state()()

    def capture_run_state(self) -> Callable[[], dict[str, Any]]:
        captured, fingerprints = self._inner.capture_run_state(), self._fingerprints()
        return lambda: {**captured(), LEFT_OUT: fingerprints}

    def check_run_state(self, state: Mapping[str, Any]) -> None:
        self._inner.check_run_state(state)
        saved, live = state.get(LEFT_OUT) or {}, self._fingerprints()
        if differing := sorted(fqn for fqn in saved.keys() | live.keys() if saved.get(fqn) != live.get(fqn)):
            raise ModelMismatchError(
                "the store holds no frozen weights (`frozen: skip`), and those of this job differ from those it was "
                f"saved with: {listed(differing, 1)}. Load the same base model, in the same dtype, before "
                "monitor.attach"
            )

    def live_values(self) -> Iterable[LiveValue]:
        return (one for one in self._inner.live_values() if one.fqn not in self._skipped)

    def layout_facts(self) -> dict[str, Any]:
        return {**self._inner.layout_facts(), LEFT_OUT: sorted(self._skipped)}

    def _require_unchanged(self, piece: Piece) -> None:
        """Compare the values if autograd counted a change, or they moved. Writes through ``.data`` are not noticed."""
        seen, at = self._seen.get(piece.fragment, (None, None))
        if seen is None or at == _address_and_version(piece):
            return
        if fingerprint(piece.tensor, piece.fragment.start, piece.fragment.box) != seen:
            raise UnsupportedError(
                f"{piece.fragment.fqn} is frozen, left out (`frozen: skip`) and was changed since monitor.attach, so a "
                "resume would not restore it: set `frozen: save`, or change it before monitor.attach"
            )
        self._seen[piece.fragment] = seen, _address_and_version(piece)

    def _fingerprints(self) -> dict[str, str]:
        return {fqn: f"{value:016x}" for fqn, value in self._skipped.items()}

    def _is_saved(self, piece: Piece | FragmentPlace) -> bool:
        return piece.fragment.slot != FROZEN or piece.fragment.fqn not in self._skipped


def _address_and_version(piece: Piece) -> tuple[int, int]:
    return piece.tensor.data_ptr(), version_of(piece.tensor)


@torch.no_grad()
def fingerprint(values: torch.Tensor, start: int, box: Box | None = None) -> int:
    """Return a 64-bit sum over a 1-d contiguous tensor that begins at element ``start`` of its parameter, or is a box.

    Every element is mixed with its index, and the results are added modulo 2**64, so the fingerprints of pieces add up
    to that of the parameter at any world size. Different values have equal fingerprints once in 2**64. Bits count: 0.0
    is not -0.0. Not cryptographic. Reads the tensor on its device, in chunks."""
    words = values.view(_WORDS[values.element_size()]) if values.element_size() in _WORDS else values.view(torch.int64)
    per_element = words.numel() // max(1, values.numel())
    total = torch.zeros((), dtype=torch.int64, device=values.device)  # so that the device is waited for only once
    base = start * per_element if box is None else 0
    for at in range(0, words.numel(), _CHUNK):
        chunk, first = words[at : at + _CHUNK].to(torch.int64), base + at
        index = torch.arange(first, first + chunk.numel(), dtype=torch.int64, device=chunk.device)
        if box is not None:
            index = _flat_index(index // per_element, box) * per_element + index % per_element
        total += _mix(chunk + _mix(index * _FACTORS[0])).sum()
    return int(total) % (1 << 64)


def _flat_index(index: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the indices of a box's elements in the flattened tensor. ``index``: their indices in the box."""
    flat = torch.full_like(index, box.start)
    for size, box_stride, stride in zip(box.sizes, strides_of(box.sizes), strides_of(box.shape), strict=True):
        flat += index // box_stride % size * stride
    return flat


def _mix(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ (words >> 30)) * _FACTORS[1]
    words = (words ^ (words >> 27)) * _FACTORS[2]
    return words ^ (words >> 31)
