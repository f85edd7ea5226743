from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import DamagedError
from store.schema import Entry, MeasureRecord, PartRecord, ReaderRecord, as_json, digest, from_bytes, seal, to_bytes
from tests.support.records import unseal

ROOT = Path(__file__).parents[3]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


TWO_THREADS = """
import os, sys, threading
import store.schema as schema, store.daemon_protocol, store.memory.layout, monitor.memory.transport
sys.setswitchinterval(1e-6)
kind, data = getattr(schema, sys.argv[1]), open(sys.argv[2], "rb").read()
for _ in range(150):
    if not (pid := os.fork()):
        barrier = threading.Barrier(2)
        def work():
            barrier.wait()
            schema.from_bytes(kind, data, "it")
        threads = [threading.Thread(target=work) for _ in range(2)]
        [one.start() for one in threads], [one.join() for one in threads]
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.parametrize(("kind", "pattern"), [("PartRecord", "segments/*/*.json"), ("ManifestRecord", "manifests/*")])
def test_two_threads_may_be_the_first_to_parse_a_kind(kind: str, pattern: str) -> None:
    """As the threads of a save and of the journal are in a new job. Msgspec by itself ended one in ten of these."""
    path = next((ROOT / "tests" / "golden" / "store-format-1-boxes").glob(pattern))
    words = [sys.executable, "-c", TWO_THREADS, kind, str(path)]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@given(JSON)
def test_round_trip(body: object) -> None:
    found = unseal(seal(body), "it")
    assert found == body
    assert repr(found) == repr(body)  # the order of keys, the sign of zero, int or float


@given(JSON, st.data())
def test_every_changed_byte_is_found(body: object, data: st.DataObject) -> None:
    sealed = bytearray(seal(body))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedError):
        unseal(bytes(sealed), "it")


@given(JSON, st.data())
def test_every_cut_and_every_addition_is_found(body: object, data: st.DataObject) -> None:
    sealed = seal(body)
    cut = data.draw(st.integers(0, len(sealed) - 1))
    for wrong in (sealed[:cut], sealed[cut + 1 :], sealed + b"\n", b" " + sealed, sealed + sealed, bytes(len(sealed))):
        with pytest.raises(DamagedError, match="it "):
            unseal(wrong, "it")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_json_has_not_is_refused_when_writing(number: float) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        seal({"a": [number]})


def sealed(text: bytes) -> bytes:
    return b'{"body":' + text + b',"xxh3_128":"' + digest(text).encode() + b'"}\n'


@pytest.mark.parametrize(
    "text",
    [
        b"x",
        b"{",
        b"{} {}",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b"\xff",
        b"9" * 5000,
    ],
    ids=["word", "half", "two", "deep list", "deep object", "no text", "long number"],
)
def test_a_right_checksum_over_what_is_no_json(text: bytes) -> None:
    with pytest.raises(DamagedError, match=r"it is (not JSON|no ReaderRecord)"):
        from_bytes(ReaderRecord, sealed(text), "it")


def part(**more: Any) -> PartRecord:
    known = {
        "store_id": "0" * 32,
        "step": 1,
        "epoch": 1,
        "rank": 0,
        "world_size": 1,
        "plan": "0" * 32,
        "payload_bytes": 0,
    }
    known |= {"header_bytes": 0, "header_xxh3_128": "0" * 32, "entries": (), "run_state": None, "run_tensors": ()}
    return PartRecord(**known | more)


ENTRY = Entry(
    layer="l",
    slot="fp32",
    fqn="w",
    start=0,
    numel=1,
    dtype="F32",
    encoding="raw",
    offset=0,
    nbytes=4,
    xxh3_128="0" * 32,
)
MEASURE = MeasureRecord(layer="l", slot="fp32", moved_sq=0.0, reference_sq=0.0, finite=True)


@given(JSON, st.dictionaries(st.text(), JSON, max_size=4))
def test_a_record_keeps_any_json_value(state: object, facts: dict[str, object]) -> None:
    record = part(run_state=state, facts=facts)
    assert repr(from_bytes(PartRecord, to_bytes(record), "it")) == repr(record)


@pytest.mark.parametrize("value", ["\ud800", "é", 1 << 90, -(1 << 70), [[]] * 3, {"a": None}], ids=ascii)
def test_a_record_keeps_what_few_parsers_know(value: object) -> None:
    """Half of a surrogate pair is in the name of a file that is not UTF-8, and a run state may hold such a name."""
    record = part(run_state={"a": value}, differs=(str(value),))
    written = to_bytes(record)
    assert written.isascii()
    assert from_bytes(PartRecord, written, "it") == record


def test_a_record_leaves_out_what_a_reader_takes_for_granted() -> None:
    assert set(unseal(to_bytes(ENTRY), "it")) == {
        *("layer", "slot", "fqn", "start", "numel", "dtype", "encoding", "offset", "nbytes", "xxh3_128")
    }
    nulls = {"packing": None, "base": None, "encoded_xxh3_128": None}  # as earlier releases wrote them
    assert from_bytes(Entry, seal({**unseal(to_bytes(ENTRY), "it"), **nulls}), "it") == ENTRY


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize("layer", ["l", "é"])
def test_a_record_takes_subclasses_for_what_they_are(layer: str) -> None:
    record = MEASURE.replace(layer=Text(layer), moved_sq=np.float64(1.5))
    assert from_bytes(MeasureRecord, to_bytes(record), "it") == MEASURE.replace(layer=layer, moved_sq=1.5)
    with pytest.raises((TypeError, ValueError)):
        to_bytes(MEASURE.replace(moved_sq=object()))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_record_does_not_hide_a_number_that_json_has_not(number: float) -> None:
    for wrong in (part(run_state={"a": [number]}), part(facts={"a": number}), MEASURE.replace(moved_sq=number)):
        with pytest.raises(ValueError, match=r"Out of range|moved_sq"):
            to_bytes(wrong)


@pytest.mark.parametrize(
    "change",
    [
        *({"start": -1}, {"start": 1.0}, {"start": "1"}, {"start": True}, {"numel": 1 << 62}, {"fqn": ""}),
        *({"fqn": "w" * 1025}, {"xxh3_128": "0" * 31}, {"xxh3_128": "0" * 32 + "\n"}, {"base": "0000001-000001"}),
    ],
    ids=repr,
)
def test_a_record_that_could_not_be_read_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a valid Entry"):
        to_bytes(ENTRY.replace(**change))
    with pytest.raises(DamagedError, match="it is no Entry"):
        from_bytes(Entry, seal({**unseal(to_bytes(ENTRY), "it"), **change}), "it")


@pytest.mark.parametrize(
    "text", [b"[" * 100_000 + b"]" * 100_000, b"9" * 5000, b"1e999", b"NaN"], ids=lambda one: str(one[:3])
)
def test_a_record_with_what_cannot_be_parsed_is_damaged(text: bytes) -> None:
    body = json.dumps(unseal(to_bytes(part(measures=(MEASURE,))), "it")).encode()
    assert b'"moved_sq": 0.0' in body
    with pytest.raises(DamagedError):
        from_bytes(PartRecord, sealed(body.replace(b'"moved_sq": 0.0', b'"moved_sq": ' + text)), "it")


def test_what_json_cannot_say_becomes_a_string() -> None:
    found = as_json({"inf": float("inf"), "minus": [-float("inf")], "nan": float("nan"), "path": Path("a"), "n": 1.5})
    assert found == {"inf": "inf", "minus": ["-inf"], "nan": "nan", "path": "a", "n": 1.5}
    seal(found)
