"""Large plain fragments are hashed first and read again into the live tensors; nothing that changed since gets in."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import asdict
from torch import nn

import monitor
import monitor.resume.read as read
from monitor.adapters.base import FragmentPlace, Piece
from monitor.adapters.module_tensors import torch_dtype
from monitor.adapters.pytorch import PyTorchAdapter
from store.catalog import open_catalog
from store.errors import ConfigError, DriftpointError, ModelMismatchError, NothingToResumeError, UsageError
from store.fragments import FragmentIndex, Source, byte_range
from store.location import Mount
from store.names import RAW, WEIGHTS, Fragment, SaveId, Unit, payload_path, segment_dir
from store.resolve import resolve
from store.schema import Entry
from store.segment import Item, write_payload
from store.storage.local import LocalFiles

LARGE = 300  # squared, in fp32, it is above the bytes of a small fragment


def job(
    store: Path, width: int = LARGE, state: Any = (), **settings: Any
) -> tuple[nn.Module, torch.optim.AdamW, monitor.Checkpointer]:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **settings}
    return model, optimizer, monitor.attach((model, optimizer), given, state=state)


def update(model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, model[0].in_features)).square().sum().backward()  # type: ignore[index, union-attr]
    optimizer.step()


def values(model: nn.Module, optimizer: torch.optim.AdamW) -> list[torch.Tensor]:
    slots = [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *slots)]


def saved(store: Path, steps: int = 1, width: int = LARGE) -> list[list[torch.Tensor]]:
    """What a job left in the store at each step."""
    model, optimizer, ckpt = job(store, width)
    found = []
    with ckpt:
        ckpt.resume()
        for _ in range(steps):
            update(model, optimizer)
            ckpt.step()
            ckpt.flush()
            found.append(values(model, optimizer))
    return found


def payload(store: Path, step: int = 1) -> Path:
    return next((store / "segments").glob(f"{step:08d}-*")) / "rank-00000.safetensors"


def once_checked(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Call ``action`` after all checks of a resume, right before the first tensor changes."""
    prepare = PyTorchAdapter.prepare_load

    def prepare_after(self: PyTorchAdapter, *given: Any) -> None:
        action()
        prepare(self, *given)

    monkeypatch.setattr(PyTorchAdapter, "prepare_load", prepare_after)


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("trained", [False, True])
def test_all_comes_back_and_counts_as_changed(tmp_path: Path, trained: bool) -> None:
    (expected,) = saved(tmp_path / "store")
    model, optimizer, ckpt = job(tmp_path / "store")
    if trained:
        update(model, optimizer)
    before = [parameter._version for parameter in model.parameters()]
    with ckpt:
        assert ckpt.resume() == 1
        assert same(values(model, optimizer), expected)
        assert all(p._version > version for p, version in zip(model.parameters(), before, strict=True))
        assert ckpt.certificate is not None and ckpt.certificate.exact
        update(model, optimizer)


def overwrite(store: Path) -> None:
    place = first_weights(store, 1) + 1000
    with payload(store).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("change", [overwrite, lambda store: os.truncate(payload(store), 5000)])
def test_bytes_that_change_after_the_check_end_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    store = tmp_path / "store"
    saved(store)
    _, _, ckpt = job(store)
    once_checked(monkeypatch, lambda: change(store))
    with pytest.raises(DriftpointError, match="failed midway"):
        ckpt.resume()
    assert gc.get_threshold()[0] > 0
    ckpt.close(save=False)


def test_a_payload_that_is_pruned_after_the_check_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    (expected,) = saved(store)
    model, optimizer, ckpt = job(store)
    once_checked(monkeypatch, payload(store).unlink)
    assert ckpt.resume() == 1
    assert same(values(model, optimizer), expected)
    ckpt.close(save=False)


@pytest.mark.parametrize("other", ["shared", "unknown", "too many"])
def test_what_may_have_to_be_fetched_again_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    store = tmp_path / "store"
    (expected,) = saved(store)
    model, optimizer, ckpt = job(store)
    update(model, optimizer)  # all memory is there
    if other == "too many":
        monkeypatch.setattr(read, "_MOST_OPEN", 0)
    else:
        mount = Mount("nfs4", "/") if other == "shared" else None
        monkeypatch.setattr(read, "mount_of", lambda _: mount)
    once_checked(monkeypatch, lambda: os.truncate(payload(store), 5000))
    assert ckpt.resume() == 1
    assert same(values(model, optimizer), expected)
    ckpt.close(save=False)


@pytest.mark.parametrize("width", [4, LARGE])
def test_damage_is_found_before_anything_changes_and_falls_back(tmp_path: Path, width: int) -> None:
    store = tmp_path / "store"
    one, two = saved(store, 2, width)
    damaged = first_weights(store, 2)
    data = bytearray(payload(store, 2).read_bytes())
    data[damaged] ^= 0x40
    payload(store, 2).write_bytes(data)
    model, optimizer, ckpt = job(store, width, resume={"at": "newest"})
    with ckpt:
        assert ckpt.resume() == 2
        found = values(model, optimizer)
        assert torch.equal(found[0], one[0]) and torch.equal(found[1], one[1])  # the layer's weights
        assert same(found[2:], two[2:])


def test_damaged_values_do_not_pass_for_a_dtype_that_cannot_hold_them(tmp_path: Path) -> None:
    """They fall back, as everywhere, though the damage made them too large for the live dtype."""
    store = tmp_path / "store"
    saved(store, 2, 4)
    start = first_weights(store, 2)
    data = bytearray(payload(store, 2).read_bytes())
    data[start : start + 4] = b"\x00\x00\x00\x7f"  # 1.7e38
    payload(store, 2).write_bytes(data)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).half()
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"store": str(store), "every": 1, "metrics": {"enabled": False}}
    with monitor.attach((model, optimizer), given) as ckpt:
        try:
            assert ckpt.resume() == 1  # the effective step
        except ModelMismatchError as error:
            pytest.fail(str(error))
        assert any("0/fp32" in problem for problem in ckpt.certificate.problems)  # type: ignore[union-attr]
        ckpt.close(save=False)


def first_weights(store: Path, step: int) -> int:
    """Where the weights of the first layer begin in the payload."""
    catalog = open_catalog(LocalFiles(store))
    save = next(one for one in catalog.saves() if one.step == step)
    sources = resolve(catalog, save).sources()
    return next(byte_range(source)[1] for source in sources if (source.fqn, source.slot) == ("0.weight", WEIGHTS))


def test_values_without_a_live_tensor_are_no_resume() -> None:
    there, missing = Fragment("a", WEIGHTS, 0, 2), Fragment("b", WEIGHTS, 0, 2)
    result = read.ReadResult({there: torch.ones(2), missing: torch.ones(2)}, frozenset(), (), ())
    with pytest.raises(RuntimeError, match="1 of 2 fragments have no live tensor"):
        result.load([Piece(there, torch.zeros(2))])


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_every_item_is_done_once_or_an_error_ends_it(count: int) -> None:
    done: list[int] = []
    read._in_threads(done.append, range(count))
    assert sorted(done) == list(range(count))

    def fail(item: int) -> None:
        if item == count // 2:
            raise KeyError(item)

    if count:
        with pytest.raises(KeyError):
            read._in_threads(fail, range(count))


def test_slots_that_no_value_fills_are_zeros() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    adapter = PyTorchAdapter(model, optimizer)
    slots = {"weight": {"exp_avg": "F32", "exp_avg_sq": "F32"}, "bias": {"exp_avg": "F32"}}
    host = torch.randn(16)
    adapter.prepare_load(slots, {Fragment("weight", "exp_avg", 0, 16): host})
    state = optimizer.state[model.weight]
    assert state["exp_avg"].data_ptr() == host.data_ptr() and state["exp_avg"].shape == (4, 4)
    assert not state["exp_avg_sq"].any() and not optimizer.state[model.bias]["exp_avg"].any()


def test_memory_that_holds_more_than_the_slot_is_not_taken_over() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    part = torch.randn(32)[:16]
    fragment = Fragment("weight", "exp_avg", 0, 16)
    PyTorchAdapter(model, optimizer).prepare_load({"weight": {"exp_avg": "F32"}}, {fragment: part})
    assert optimizer.state[model.weight]["exp_avg"].data_ptr() != part.data_ptr()


# ---- a failure midway


def fails_midway(
    store: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] = OSError, state: Any = ()
) -> Any:
    """A job at step 3 that goes back to step 2, and ends up with a mixture of both."""
    model, optimizer, ckpt = job(store, every=2, state=state)
    ckpt.resume()
    for _ in range(3):
        update(model, optimizer)
        ckpt.step()
        ckpt.flush()
    load, loaded = read.ReadResult._load, []

    def load_some(self: read.ReadResult, pieces: Sequence[Piece]) -> None:
        if loaded:
            raise error("while it loads")
        loaded.append(pieces)
        load(self, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(read.ReadResult, "_load", load_some)
        patch.setattr(read, "_THREADS", 1)
        patch.setattr(read, "_LOADED_AT_ONCE", 1)
        with pytest.raises((DriftpointError, error)):
            ckpt.resume()
    return model, optimizer, ckpt


class Moody:
    """A user's object that raises when it loads its state, ``refuses`` times."""

    def __init__(self) -> None:
        self.refuses = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            self.refuses -= 1
            raise ValueError("not now")


def test_a_mixture_stays_one_where_the_next_resume_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moody = Moody()
    model, optimizer, ckpt = fails_midway(tmp_path / "store", monkeypatch, state=[moody])
    moody.refuses = 1
    with pytest.raises(UsageError, match="not now"):
        ckpt.resume()
    update(model, optimizer)
    with pytest.raises(ConfigError, match="failed midway"):
        ckpt.step()
    ckpt.close()
    assert [save.step for save in open_catalog(LocalFiles(tmp_path / "store")).saves()] == [2]


@pytest.mark.parametrize(("refusals", "mixed"), [(1, False), (2, True)])
def test_an_object_that_does_not_take_its_state_back_makes_a_mixture(
    tmp_path: Path, refusals: int, mixed: bool
) -> None:
    moody = Moody()
    model, optimizer, ckpt = job(tmp_path / "store", state=[moody])
    ckpt.resume()
    update(model, optimizer)
    ckpt.step()
    ckpt.flush()
    moody.refuses = refusals
    with pytest.raises(UsageError, match="not now"):
        ckpt.resume()
    update(model, optimizer)
    if mixed:
        with pytest.raises(ConfigError, match="failed midway"):
            ckpt.step()
    else:
        ckpt.step()
    ckpt.close()
    assert [save.step for save in open_catalog(LocalFiles(tmp_path / "store")).saves()] == ([1] if mixed else [2, 1])


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("end", ["close", "step", "save", "commit_last_step"])
def test_a_mixture_is_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, error: type[BaseException]
) -> None:
    model, optimizer, ckpt = fails_midway(tmp_path / "store", monkeypatch, error)
    update(model, optimizer)
    if end in ("step", "save"):
        with pytest.raises(ConfigError, match="failed midway"):
            getattr(ckpt, end)()
    else:
        getattr(ckpt, end)()
    ckpt.close()
    assert [save.step for save in open_catalog(LocalFiles(tmp_path / "store")).saves()] == [2]


def test_a_second_resume_mends_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, ckpt = fails_midway(tmp_path / "store", monkeypatch)
    with ckpt:
        assert ckpt.resume() == 2
        update(model, optimizer)
        ckpt.step()
    assert [save.step for save in open_catalog(LocalFiles(tmp_path / "store")).saves()] == [3, 2]


def test_a_refused_resume_leaves_a_job_that_saves(tmp_path: Path) -> None:
    model, optimizer, ckpt = job(tmp_path / "store")
    with ckpt:
        ckpt.resume()
        update(model, optimizer)
        ckpt.step()
        ckpt.flush()
        manifest = next((tmp_path / "store" / "manifests").iterdir())
        content = manifest.read_bytes()
        manifest.write_bytes(b"rubbish")
        with pytest.raises(NothingToResumeError):
            ckpt.resume()
        manifest.write_bytes(content)
        update(model, optimizer)
        ckpt.step()
    assert [save.step for save in open_catalog(LocalFiles(tmp_path / "store")).saves()] == [2, 1]


# ---- memory and dtypes


def test_parameters_on_one_memory_with_other_values_are_told(tmp_path: Path) -> None:
    def tied(share: bool) -> tuple[nn.Module, monitor.Checkpointer]:
        model = nn.Sequential(nn.Linear(LARGE, LARGE, bias=False), nn.Linear(LARGE, LARGE, bias=False))
        if share:
            model[1].weight.data = model[0].weight.data
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"store": str(tmp_path / "store"), "every": 1, "metrics": {"enabled": False}}
        ckpt = monitor.attach((model, optimizer), given)
        assert ckpt.resume() == (1 if share else 0)
        if not share:
            model(torch.randn(2, LARGE)).sum().backward()
            optimizer.step()
            ckpt.step()
        return model, ckpt

    one, ckpt = tied(share=False)
    ckpt.close()
    two, ckpt = tied(share=True)
    ckpt.close(save=False)
    assert torch.equal(two[1].weight, one[1].weight)  # type: ignore[index, union-attr]
    assert ckpt.certificate is not None and not ckpt.certificate.exact
    assert any("0.weight/fp32 shares memory" in text for text in ckpt.certificate.problems)


def test_parameters_on_one_memory_with_the_same_values_are_exact(tmp_path: Path) -> None:
    for step in (0, 1):
        model = nn.Sequential(nn.Linear(LARGE, LARGE, bias=False), nn.Linear(LARGE, LARGE, bias=False))
        model[1].weight.data = model[0].weight.data
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"store": str(tmp_path / "store"), "every": 1, "metrics": {"enabled": False}}
        with monitor.attach((model, optimizer), given) as ckpt:
            assert ckpt.resume() == step
            model(torch.randn(2, LARGE)).sum().backward()
            optimizer.step()
            ckpt.step()
    assert ckpt.certificate is not None and ckpt.certificate.exact and not ckpt.certificate.problems


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("dtypes", [("F32", "BF16"), ("BF16", "F32"), ("F32", "I32")])
def test_fragments_of_one_tensor_in_two_dtypes_are_damaged(tmp_path: Path, dtypes: tuple[str, str], new: bool) -> None:
    numel, save, files = 1 << 17, SaveId(1, 1), LocalFiles(tmp_path)
    (tmp_path / segment_dir(save)).mkdir(parents=True)
    sizes = [numel * torch_dtype(name).itemsize for name in dtypes]
    items = [Item(name, dtype, (numel,), bytes(size)) for name, dtype, size in zip("ab", dtypes, sizes, strict=True)]
    payload = write_payload(files, payload_path(save, 0), items)
    common: Any = {"layer": "l", "slot": WEIGHTS, "fqn": "w", "numel": numel, "encoding": RAW}
    entries = [
        Entry(**common, start=at * numel, dtype=dtypes[at], **asdict(one)) for at, one in enumerate(payload.placed)
    ]
    part: Any = SimpleNamespace(save=save, rank=0, header_bytes=payload.header_bytes)
    index = FragmentIndex(Source(part, entry) for entry in entries)
    live = FragmentPlace(Fragment("w", WEIGHTS, 0, 2 * numel), torch_dtype(dtypes[0]), new)
    with read.OpenPayloads(files) as payloads:
        found = read.read_fragments(payloads, index, [live])
    assert {one.unit for one in found.bad} == {Unit("l", WEIGHTS)}
