"""What a save asks of a device: few launches, however many chunks, and no wait for each tensor."""

from __future__ import annotations

import pytest
import torch

from monitor.adapters.frozen import fingerprint
from monitor.adapters.optimizer_state import StackedScalars
from monitor.observe.sketch_meter import SketchMeter
from monitor.save import torch_codecs
from monitor.save.torch_codecs import EncodedCopy
from store.encoding import CHUNK, ENCODINGS, WRITABLE, encoding_named
from store.names import Unit
from tests.support.entries import iter_chunks
from tests.support.on_device import DEVICE, DeviceCalls
from tests.support.reference_encodings import encode_chunk

UNIT = Unit("blocks.0", "exp_avg")
LOSSY = [name for name in WRITABLE if not ENCODINGS[name].lossless]


def encoded_copy(source: torch.Tensor, name: str) -> EncodedCopy:
    numel = 0 if source.device == DEVICE else source.numel()
    size = encoding_named(name).stored_bytes(source.numel(), "F32")
    return EncodedCopy(source, name, torch.zeros(size, dtype=torch.uint8), torch.empty(numel))


def encoding_on_device(numel: int, name: str) -> DeviceCalls:
    copy = encoded_copy(torch.empty(numel, device=DEVICE), name)
    with DeviceCalls() as calls:
        copy.begin()
    assert not copy.no_memory
    return calls


@pytest.mark.parametrize("name", LOSSY)
def test_as_many_kernels_are_launched_for_sixty_chunks_as_for_two(name: str) -> None:
    two, sixty = encoding_on_device(2 * CHUNK, name), encoding_on_device(60 * CHUNK, name)
    assert sixty.launched == two.launched
    assert 0 < sixty.launched.total() < 80
    assert not sixty.waits


@pytest.mark.parametrize("name", LOSSY)
def test_as_many_as_memory_allows_are_encoded_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encoding_on_device(8 * CHUNK, name).launched.total()
    monkeypatch.setattr(torch_codecs, "chunks_at_once", lambda _: 4)
    assert whole < encoding_on_device(8 * CHUNK, name).launched.total() <= 2 * whole


@pytest.mark.parametrize(("free", "chunks"), [(80 << 30, 64), (4 << 30, 25), (1 << 20, 1), (0, 1)])
def test_a_quarter_of_the_free_memory_is_worked_in(free: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 << 30))
    assert torch_codecs.chunks_at_once(torch.empty(100 * CHUNK, device=DEVICE)) == chunks
    assert torch_codecs.chunks_at_once(torch.empty(CHUNK, device=DEVICE)) == 1


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("numel", [2 * CHUNK, 3 * CHUNK + 77, CHUNK + 1])
def test_chunks_that_are_encoded_at_once_have_the_bytes_of_each(
    name: str, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.rand(numel, generator=torch.Generator().manual_seed(0)).square()
    monkeypatch.setattr(torch_codecs, "chunks_at_once", lambda _: 2)
    copy = encoded_copy(values, name)
    copy.begin()
    copy.finish()
    assert copy.held
    expected = b"".join(encode_chunk(encoding_named(name), chunk).tobytes() for chunk in iter_chunks(values.numpy()))
    assert copy.encoded.numpy().tobytes() == expected
    monkeypatch.undo()
    alone = encoded_copy(values, name)
    alone.begin()
    alone.finish()
    assert copy.lost.error_sq == pytest.approx(alone.lost.error_sq, rel=1e-12)
    assert copy.lost.decoded_sq == pytest.approx(alone.lost.decoded_sq, rel=1e-12)


@pytest.mark.parametrize("numel", [50, 100_000])
def test_measuring_a_unit_waits_as_often_for_many_tensors_as_for_one(numel: int) -> None:
    waits = []
    for count in (1, 12):
        meter, pieces = SketchMeter(), [torch.empty(numel, device=DEVICE) for _ in range(count)]
        with DeviceCalls() as calls:
            meter.measure(UNIT, pieces)
        waits.append(calls.waits)
    host_only = DeviceCalls()
    with host_only:
        SketchMeter().measure(UNIT, [torch.zeros(numel)])
    assert waits[0] == waits[1] == host_only.waits + 2  # the signature, and a sample of the values


def test_step_counts_on_a_device_come_over_together() -> None:
    entries = [torch.zeros((), device=DEVICE) for _ in range(20)]
    stacks = StackedScalars.of({str(i): {"step": i} for i in range(20)}, entries)
    with DeviceCalls() as calls:
        found = stacks.capture(entries, lambda key, value, fqn: value)()
    assert len(found) == 20 and calls.waits == 1


def test_a_fingerprint_waits_once_for_all_chunks() -> None:
    values = torch.arange(3 << 22, dtype=torch.int32)
    with DeviceCalls() as calls:
        found = fingerprint(values, 5)
    assert calls.waits == 1
    parts = values.split(1 << 22)
    assert found == sum(fingerprint(part, 5 + (i << 22)) for i, part in enumerate(parts)) % (1 << 64)
