"""frozen: skip.

What tells one tensor's values from another's, whoever holds which part of it: a sum over elements.

Every element is mixed with its index into 64 bits, and those are added up modulo 2**64; so fingerprints of pieces add
up to that of the whole, at any world size. Values that differ have equal ones once in 2**64. Bits count: 0.0 is not
-0.0. No guard against malice. Reads tensors where they are, in chunks.

``frozen: skip``: parameters that were frozen when the job attached stay out of the store, but for fingerprints.

For jobs whose script brings those weights itself, as in fine-tuning with adapters. A resume compares the fingerprints
and refuses other weights by name. What is frozen later is saved as ever; what is unfrozen later is refused.
Wraps any adapter; all but what is said of frozen parameters is that one's. Training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from monitor.adapters.base import Adapter, FragmentPlace, Piece, TensorInfo, StateVersions
from monitor.distributed import Group
from store.errors import ModelMismatchError, UnsupportedError
from store.names import FROZEN, LEFT_OUT
from store.text import listed

_CHUNK = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd 64-bit numbers without pattern: those of splitmix64, signed."""


@torch.no_grad()
def fingerprint(values: torch.Tensor, start: int) -> int:
    """Of a 1-d contiguous tensor that begins at element ``start`` of its parameter; 0 <= it < 2**64."""
    words = values.view(_WORDS[values.element_size()]) if values.element_size() in _WORDS else values.view(torch.int64)
    per_element = words.numel() // max(1, values.numel())
    total = 0
    for at in range(0, words.numel(), _CHUNK):
        chunk = words[at : at + _CHUNK].to(torch.int64)
        first = start * per_element + at
        index = torch.arange(first, first + chunk.numel(), dtype=torch.int64, device=chunk.device)
        total += int(_mixed(chunk + _mixed(index * _FACTORS[0])).sum())
    return total % (1 << 64)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ (words >> 30)) * _FACTORS[1]
    words = (words ^ (words >> 27)) * _FACTORS[2]
    return words ^ (words >> 31)


class WithoutFrozen:
    """An adapter without what another one calls frozen. Call :meth:`agree`, on all ranks, before it is used."""

    def __init__(self, inner: Adapter) -> None:
        self._inner = inner
        self.framework = inner.framework
        self.module = inner.module
        self.state_is_private = inner.state_is_private
        self._left_out = {fqn: 0 for fqn, info in inner.tensors().items() if info.kind == "frozen"}
        for piece in inner.owned():
            if not self._kept(piece):
                self._left_out[piece.fragment.fqn] += fingerprint(piece.tensor, piece.fragment.start)

    def agree(self, group: Group) -> None:
        """Every rank has looked at its own pieces. Collective."""
        told = group.all_gather(self._left_out)
        self._left_out = {fqn: sum(one.get(fqn, 0) for one in told) % (1 << 64) for fqn in self._left_out}

    def completed_steps(self) -> int | None:
        """The inner one's."""
        return self._inner.completed_steps()

    def cache_lookups(self) -> AbstractContextManager[None]:
        """The inner one's."""
        return self._inner.cache_lookups()

    def check_attached(self) -> None:
        """The inner one's; and UnsupportedError where something is trained that is left out."""
        self._inner.check_attached()
        for fqn, info in self._inner.tensors().items():
            if fqn in self._left_out and info.kind != "frozen":
                raise UnsupportedError(
                    f"{fqn} was frozen when the job attached, so `frozen: skip` left it out, and is trained now: "
                    "unfreeze it before monitor.attach, or set `frozen: save`"
                )

    def state_versions(self) -> StateVersions | None:
        """The inner one's."""
        return self._inner.state_versions()

    def before_update(self, hook: Callable[[], None]) -> None:
        """The inner one's."""
        self._inner.before_update(hook)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All but those that are left out."""
        return {fqn: info for fqn, info in self._inner.tensors().items() if fqn not in self._left_out}

    def owned(self) -> list[Piece]:
        """All but those that are left out."""
        return [piece for piece in self._inner.owned() if self._kept(piece)]

    def held(self) -> list[Piece]:
        """All but those that are left out."""
        return [piece for piece in self._inner.held() if self._kept(piece)]

    def expected(self, slots: Mapping[str, Mapping[str, str]]) -> list[FragmentPlace]:
        """All but those that are left out."""
        return [place for place in self._inner.expected(slots) if self._kept(place)]

    def prepare_load(self, slots: Mapping[str, Mapping[str, str]]) -> None:
        """The inner one's."""
        self._inner.prepare_load(slots)

    def finish_load(self) -> None:
        """The inner one's."""
        self._inner.finish_load()

    def run_state(self) -> dict[str, Any]:
        """The inner one's, and the fingerprints of what is left out."""
        return {**self._inner.run_state(), LEFT_OUT: {fqn: f"{value:016x}" for fqn, value in self._left_out.items()}}

    def objects(self) -> Mapping[str, Any]:
        """The inner one's."""
        return self._inner.objects()

    def check_run_state(self, state: Mapping[str, Any]) -> None:
        """The inner one's; and ModelMismatchError where what the store leaves out is not what is here."""
        self._inner.check_run_state(state)
        require_same_frozen(state, {fqn: f"{value:016x}" for fqn, value in self._left_out.items()})

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """The inner one's."""
        self._inner.load_run_state(state)

    def layout_facts(self) -> dict[str, Any]:
        """The inner one's, and what is not in the store."""
        return {**self._inner.layout_facts(), LEFT_OUT: sorted(self._left_out)}

    def _kept(self, piece: Piece | FragmentPlace) -> bool:
        return piece.fragment.slot != FROZEN or piece.fragment.fqn not in self._left_out


def require_same_frozen(state: Mapping[str, Any], live: Mapping[str, str]) -> None:
    """ModelMismatchError, by name, unless the frozen weights here are those of the job that saved ``state``."""
    saved = state.get(LEFT_OUT) or {}
    differing = sorted(fqn for fqn in saved.keys() | live.keys() if saved.get(fqn) != live.get(fqn))
    if differing:
        raise ModelMismatchError(
            f"the store holds no frozen weights (`frozen: skip`), and those of this job are others than when it was "
            f"saved: {listed(differing, 1)}. Load the same base model, in the same dtype, before monitor.attach"
        )
