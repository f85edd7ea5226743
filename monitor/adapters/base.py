"""Define the interface to a training framework: where its state lives, as fragments, and how to restore it.

An adapter is used from the training thread only, between optimizer steps, while the state does not change.
It leaves the user's param groups as they are."""

import inspect
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from monitor.adapters.identity import Hook, Identity, OptimizerAttributes
from monitor.distributed import Group, run_on_all_ranks
from store.errors import UnsupportedError
from store.names import FROZEN, WEIGHTS, Fragment
from store.schema import digest


class Piece(NamedTuple):
    """A fragment and the live memory behind it."""

    fragment: Fragment
    tensor: torch.Tensor
    """1-d, contiguous, ``fragment.numel`` elements, a view on the framework's own storage: copying from it saves,
    copying into it loads."""
    target: torch.Tensor | None = None
    """The framework's tensor if ``tensor`` copies it in another memory order (channels-last): a load fills it, too."""


class Gradient(NamedTuple):
    """Memory for the gradient of a tensor that an optimizer updates, and the pieces of parameters in it."""

    owner: torch.Tensor
    memory: torch.Tensor
    pieces: Sequence[Piece]


Slots = Mapping[str, Mapping[str, str]]  # dtypes by fqn and slot
Groups = Sequence[Mapping[str, Any]]  # param groups as in a run state
Values = Mapping[str, Any]  # hyperparameters, scalars or a run state, by name
Action = Callable[[], None]
_SAMPLE = 8  # elements at each end of a piece


def weights_of(pieces: Iterable[Piece]) -> list[torch.Tensor]:
    """Return 1-d views of the framework's memory of trained and frozen weights. Elements are in memory order."""
    found = [one for one in pieces if one.fragment.slot in (WEIGHTS, FROZEN)]
    live = [(one.tensor if one.target is None else one.target.detach(), one.fragment.numel) for one in found]
    return [one if one.ndim == 1 else one.as_strided((numel,), (1,)) for one, numel in live]


def sample(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the bytes of the first and last elements of each 1-d tensor that is on the first one's device."""
    ends = [end for one in tensors if one.device == tensors[0].device for end in (one[:_SAMPLE], one[-_SAMPLE:])]
    return torch.cat([end.view(torch.uint8) for end in ends] or [torch.empty(0, dtype=torch.uint8, device="cpu")])


@dataclass(frozen=True)
class FragmentPlace:
    """A fragment that a load will fill; its memory need not exist yet."""

    fragment: Fragment
    dtype: torch.dtype  # of the live tensor
    new: bool = field(default=False, compare=False)
    """The memory does not exist yet: a load may use the host memory that the values were read into."""
    memory: torch.Tensor | None = field(default=None, compare=False)  # 1-d, on the host, to read into if ``new``


@dataclass(frozen=True)
class TensorInfo:
    """One parameter or persistent buffer of the model."""

    shape: tuple[int, ...]  # global shape
    dtype: str  # dtype of the working copy, as safetensors names it (``BF16``, ``F32``, ...)
    kind: str  # ``trainable``, ``frozen`` or ``buffer``
    aliases: tuple[str, ...] = ()  # other names of the same tensor (tied weights) in the module tree
    special: str | None = None  # its subclass or layout, if it is not a plain tensor that the adapter can save

    def matches(self, other: "TensorInfo | None") -> bool:
        """Return whether both can be one tensor, which has other names on other ranks."""
        return other is not None and replace(other, aliases=self.aliases) == self


@dataclass(frozen=True)
class LiveValue:
    """A value in the framework's own state dicts, and where a save stores it."""

    name: str  # as a script reaches it
    value: Any
    fqn: str | None = None  # parameter or buffer of the model that it belongs to
    stored: tuple[Any, ...] | None = None  # path in the run state; None if it is the memory of a piece
    ownable: bool = False  # whether it counts as saved if it is an object in ``state=``, or an attribute of one


@dataclass(frozen=True)
class StateVersions:
    """Version counters of weights and optimizer state: equal if neither was changed. No value is read."""

    optimizer: str  # class name
    weights: Any
    state: Any


class Adapter(Protocol):
    """Access to the state of one training framework.

    The fragments that :meth:`owned` returns on all ranks together cover every (fqn, slot) exactly once. :meth:`held`
    returns all fragments on this rank, replicas included: a load fills them. The slot is :data:`store.names.WEIGHTS`
    for trainable weights (the fp32 master where there is one), ``FROZEN`` for parameters without gradient, ``BUFFER``
    for persistent buffers, and the optimizer's own key (``exp_avg``, ...) for state of the parameter's shape.

    A load is checked first, without changing anything: :meth:`expected`, :meth:`check_run_state`. Then follow, in this
    order: the states of :meth:`objects`, :meth:`prepare_load`, copying into the pieces of :meth:`held`,
    :meth:`load_run_state`, :meth:`finish_load`."""

    framework: str
    module: torch.nn.Module
    hooks: list[Hook]  # all that the framework was given
    state_is_private: bool
    """Whether weights, as saved, and optimizer state are copies that only the optimizer touches (ZeRO's master
    weights), so that nothing a training script does between two optimizer steps can change them."""
    leaders: tuple[int, ...] = (0,)  # lowest rank of each pipeline stage, which stores its run state
    local: Collection[str] | None = None  # fqns of :meth:`tensors` that are in this rank's module; None: all
    home: str = ""  # digest of what this rank holds, and of the ranks it shares tensors with; "": all hold the same

    @property
    def buffers_follow_rank0(self) -> bool:
        """Return whether the next forward overwrites the persistent buffers of all ranks with those of rank 0."""
        return False

    def probe(self, step: int, *, wait: bool) -> torch.Tensor | None:
        """Return a parameter that other ranks hold, too, another one at each step. wait: perhaps one on a device."""
        return None

    def completed_steps(self) -> int | None:
        """Return the number of optimizer steps taken, or None if the framework does not count them."""

    def cache_lookups(self) -> AbstractContextManager[None]:
        """Cache lookups inside the context. The job must not change in it."""

    def check_attached(self) -> None:
        """Raise UnsupportedError if the job is no longer the attached one.

        Cases: the optimizer holds a parameter that is not in the model; an engine has another optimizer or module."""

    def state_versions(self) -> StateVersions | None:
        """Return version counters of the optimizer's weights and state.

        None if a replaced optimizer is always detected without them."""

    def identity(self) -> Identity | None:
        """Return the job's present tensors. If the layout is the same as before, so are names and places of all pieces.

        None if that cannot be told; pieces are then listed anew each time."""

    def before_update(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` in the training thread whenever an optimizer step is about to change the state."""

    def before_change(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` before every optimizer step, and before other public calls that change the state in place.

        An example is loading the framework's own checkpoint. Changes through ``.data`` cannot be intercepted."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every parameter and persistent buffer by fqn, tied ones once, in model order. Same on all ranks."""

    def owned(self) -> list[Piece]:
        """Return the pieces that this rank saves, in a fixed order."""

    def held(self) -> list[Piece]:
        """Return all pieces on this rank, which a load has to fill."""

    def expected(self, slots: Slots) -> list[FragmentPlace]:
        """Return the places :meth:`held` will have after :meth:`prepare_load` with the same ``slots``.

        Changes nothing. Raises the errors that those two would raise."""

    def prepare_load(self, slots: Slots, values: Mapping[Fragment, Any] = MappingProxyType({})) -> None:
        """Create optimizer state before :meth:`held` is called; slots[fqn][slot] is its dtype.

        values: what the load will fill; new state may take over their host memory. What is not in it becomes zeros."""

    def finish_load(self) -> None:
        """Refresh everything derived from the loaded state (bf16 working weights, gathered parameters). Collective."""

    def run_state(self) -> dict[str, Any]:
        """Return counters, loss scaler, scheduler, hyperparameters per param group and scalars per parameter.

        Plain values and tensors only. Parameters are named by fqn, never by index, so that it fits any stage and world
        size. All are copies, which training does not change."""

    def capture_run_state(self) -> Callable[[], dict[str, Any]]:
        """Copy the parts of :meth:`run_state`. Return a function that assembles them, in any thread."""

    def rank_scalars(self, every: bool = False) -> Mapping[str, tuple[str, str, Any]]:
        """Return (fqn, key, number) of optimizer state that may differ between ranks, keyed by a name for messages.

        every: also those that differ only if a rank leaves out a step of the optimizer."""
        return {}

    def objects(self) -> Mapping[str, Any]:
        """Return the framework's objects that load their own state (schedules), keyed as in :meth:`run_state`."""

    def attributes(self) -> Mapping[str, OptimizerAttributes]:
        """Return the attributes of this rank's optimizers and of wrappers around them, by name."""

    def replicated_keys(self) -> str | None:
        """Return a hash of the keys of optimizer state that every rank must hold; None if ranks may differ."""
        return None

    def check_run_state(self, state: Mapping[str, Any]) -> None:
        """Raise the errors that :meth:`load_run_state` would raise. Changes nothing."""

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`run_state`, except :meth:`objects`; it may be of another stage, world size or framework."""

    def live_values(self) -> Iterable[LiveValue]:
        """Return all that the state dicts of model and optimizer hold on this rank. Nothing is gathered."""

    def unsaveable(self) -> Sequence[str]:
        """Return what the next steps depend on that no save can hold, as seen so far; on this rank."""

    def layout_facts(self) -> dict[str, Any]:
        """Return JSON values from which the merger rebuilds the framework's own checkpoint layout."""

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the optimizers whose steps change the state."""

    def step_inputs(self, number: int) -> tuple[list[dict[str, Any]], list[Piece], torch.Tensor | float]:
        """Return the inputs of a step of optimizer ``number``: (param groups as in :meth:`run_state`, gradients that
        this rank saves, factor that they were multiplied by after their reduction; 1.0 if unknown).

        Called by the pre-step hook: several times if the optimizer updates its parameters part by part (ZeRO-3)."""

    def new_gradients(self, number: int) -> list[Gradient]:
        """Return memory for the gradients of all that optimizer ``number`` updates; elements outside pieces are 0."""

    def repeat_step(self, number: int, groups: Groups, fqns: Set[str], gradients: Sequence[Gradient]) -> None:
        """Take a step of optimizer ``number`` with the hyperparameters of a recorded one.

        fqns: parameters that had a gradient. gradients: of :meth:`new_gradients`, with their values."""


class Home(NamedTuple):
    """How a rank holds a tensor: as one of ``ranks``, which together hold all of it, or whole on its own (None)."""

    kind: str
    ranks: tuple[int, ...] | None = None
    group: tuple[int, ...] | None = None  # ranks that DistributedDataParallel keeps equal; None: all of a stage

    def __str__(self) -> str:
        return self.kind if self.group is None else f"{self.kind} of {list(self.group)}"


Listing = Mapping[str, tuple[TensorInfo, Home]]  # what one rank holds, in its model's order


@dataclass(frozen=True)
class Stages:
    """Where the tensors of the whole model are. The same on all ranks, except ``places``."""

    tensors: Mapping[str, TensorInfo]  # in the order of the stages
    leaders: tuple[int, ...]  # lowest rank of each stage
    places: Mapping[str, tuple[int, int]]  # of this rank's tensors: number of its home, and how many homes there are


def agree_on_stages(group: Group, listing: Listing, hash_of: Callable[[str], int]) -> Stages | None:
    """Return where the tensors are; None if all ranks hold the same in the same way. Collective.

    hash_of: hashes this rank's values of a parameter. Raises UnsupportedError on all ranks if one name has different
    tensors, or different values in several stages or meshes, between which only the script keeps values equal.
    (Replicas within a stage are compared at the first save.)"""
    hashes = group.all_gather(digest(repr(listing).encode()))
    if len(set(hashes)) == 1:
        return None
    listings = group.all_gather(listing if hashes.index(hashes[group.rank]) == group.rank else None)
    tensors: dict[str, TensorInfo] = {}
    homes: dict[str, dict[Home, list[int]]] = {}  # fqn -> its homes, each with the ranks that hold it so
    stages: dict[str, dict[int, Home]] = {}  # fqn -> leader of each stage that has it -> its first home there
    leaders: dict[tuple[str, ...], int] = {}
    for distinct in dict.fromkeys(hashes):
        ranks = [rank for rank, one in enumerate(hashes) if one == distinct]
        leader = leaders.setdefault(tuple(listings[ranks[0]]), ranks[0])
        for fqn, (info, home) in listings[ranks[0]].items():
            known, fqn_homes = tensors.get(fqn, info), homes.setdefault(fqn, {})
            first = next(iter(fqn_homes), home)
            in_stage = stages.setdefault(fqn, {}).setdefault(leader, home)
            if not info.matches(known) or home.kind != first.kind or home.group != in_stage.group:
                raise UnsupportedError(
                    f"{fqn} is {known}, held as {first}, on rank {min(map(min, fqn_homes.values()), default=0)}, and "
                    f"on rank {ranks[0]} {info}, held as {home}: name the tensors of all stages as in the whole model, "
                    "and hold each in one way"
                )
            fqn_homes.setdefault(home, []).extend(ranks)
            tensors[fqn] = replace(known, aliases=tuple(dict.fromkeys((*known.aliases, *info.aliases))))
    shared = {fqn for fqn in tensors if tensors[fqn].kind != "buffer" and (len(homes[fqn]) > 1 or len(stages[fqn]) > 1)}
    values = group.all_gather(run_on_all_ranks(group, lambda: {fqn: hash_of(fqn) for fqn in listing if fqn in shared}))
    for fqn in (fqn for fqn in tensors if fqn in shared):
        replicas = [home.ranks or (rank,) for home, ranks in homes[fqn].items() for rank in ranks]
        if len({tuple(values[rank].get(fqn) for rank in replica) for replica in replicas}) > 1:
            raise UnsupportedError(
                f"{fqn} has different values on the ranks {list(dict.fromkeys(replicas))}, and a store holds one: "
                "name the tensors of all pipeline stages as in the whole model, and begin with equal replicas"
            )
    places = {fqn: _place(homes[fqn], home, group.rank) for fqn, (_, home) in listing.items()}
    return Stages(tensors, tuple(leaders.values()), places)


def _place(homes: Mapping[Home, list[int]], home: Home, rank: int) -> tuple[int, int]:
    holders = sorted(rank for ranks in homes.values() for rank in ranks)
    return (bisect_left(holders, rank), len(holders)) if home.ranks is None else (list(homes).index(home), len(homes))


def wrap_methods(target: Any, names: Sequence[str], hook: Action | None = None, *, then: Action | None = None) -> None:
    """Call ``hook`` before and ``then`` after each call of these methods, if present: DeepSpeed's releases differ."""
    for name in names:
        if (method := getattr(target, name, None)) is not None:
            if inspect.ismethod(method) and name not in vars(target):  # look it up at each call: it may be replaced
                method = partial(_call_method, target, name)
            setattr(target, name, _wrapped(method, hook, then))


def _call_method(target: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(type(target), name)(target, *args, **kwargs)


def _wrapped(method: Callable[..., Any], hook: Action | None, then: Action | None) -> Callable[..., Any]:
    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if hook is not None:
            hook()
        result = method(*args, **kwargs)
        if then is not None:
            then()
        return result

    return called
