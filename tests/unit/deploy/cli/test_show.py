from __future__ import annotations

import re
from pathlib import Path

import pytest

from store.names import Unit
from tests.support.cli import Here
from tests.support.stores import FakeLayer, How, StoreBuilder, flip_byte


@pytest.fixture
def builder(tmp_path: Path) -> StoreBuilder:
    return StoreBuilder(tmp_path / "store")


def test_every_unit_with_version_drift_and_reason(here: Here, builder: StoreBuilder) -> None:
    first = builder.save(10)
    second = builder.save(30, slots=("fp32",), drift=0.0125, reason="weights every time")
    shown = here("show", builder.root, "--json").json
    assert (shown["save"], shown["exact"], shown["resumable"]) == (second.name, False, True)
    assert (shown["max_staleness"], shown["max_drift"]) == (20, 0.0125)
    units = {Unit(unit["layer"], unit["slot"]): unit for unit in shown["units"]}
    assert tuple(units) == builder.units
    assert units[Unit("layers.1", "fp32")] == {
        "layer": "layers.1",
        "slot": "fp32",
        "step": 30,
        "save": second.name,
        "staleness": 0,
        "encoding": "raw",
        "drift": 0.0,
        "moving": True,
        "fallback": False,
        "nbytes": 256,
        "error": 0.0,
        "bases": [],
        "numel": 64,
        "reason": "weights every time",
    }
    moment = units[Unit("layers.1", "exp_avg")]
    assert (moment["step"], moment["save"], moment["staleness"], moment["drift"]) == (10, first.name, 20, 0.0125)
    assert shown["parameters"] == 456
    assert shown["bytes_per_parameter"] == 12.0
    assert shown["nbytes"] == 12 * 456


def test_one_row_per_layer(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    builder.save(30, slots=("fp32",), drift=0.0125)
    lines = here("show", builder.root).out.splitlines()
    assert [line for line in lines if line.startswith("layers.")] == [
        f"layers.{i}         0        0    20   0.0125    20   0.0125      768 B" for i in range(3)
    ]
    total = next(line for line in lines if line.startswith("all"))
    assert total.split() == ["all", "10", "30", "0.0125", "5.34", "KiB", "12.00"]


def test_long_has_a_row_per_unit_and_the_reasons(here: Here, builder: StoreBuilder) -> None:
    builder.save(10, reason="first save")
    answer = here("show", builder.root, "--long", columns=120)
    assert len(re.findall(r"^  (?:fp32|exp_avg|exp_avg_sq) .*first save$", answer.out, re.MULTILINE)) == 18


@pytest.mark.parametrize("columns", [80, 120])
def test_a_large_model_fits(here: Here, tmp_path: Path, columns: int) -> None:
    layers = [FakeLayer("model.embed_tokens", 320), *(FakeLayer(f"model.layers.{i}", 8) for i in range(126))]
    builder = StoreBuilder(tmp_path / "store", layers=layers, world_size=1)
    builder.save(123_400)
    builder.save(123_456, slots=("fp32",), drift=1.234e-05)
    for flags in ((), ("--long",)):
        lines = here("show", builder.root, *flags, columns=columns).out.splitlines()
        assert max(map(len, lines)) <= columns
    rows = [line for line in here("show", builder.root, columns=columns).out.splitlines() if "model.layers." in line]
    assert len(rows) == 126
    assert rows[125].split() == ["model.layers.125", "0", "0", "56", "1.23e-05", "56", "1.23e-05", "96", "B"]


def test_slots_that_do_not_fit_get_a_table_of_their_own(here: Here, tmp_path: Path) -> None:
    prefix = "base_model.model.model.language_model.layers"
    layers = [FakeLayer(f"{prefix}.{i}", 8, frozen=i % 2 == 0, buffer=True) for i in range(4)]
    builder = StoreBuilder(tmp_path / "store", layers=layers, slots=("fp32", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
    builder.save(10)
    builder.save(20, slots=("fp32",))
    for columns in (80, 120):
        lines = here("show", builder.root, columns=columns).out.splitlines()
        assert max(map(len, lines)) <= columns
        headings = " ".join(line for line in lines if not line.startswith((" ", "Slot")) or "exp_avg" in line)
        for slot in ("fp32", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert slot in headings
        for number in range(4):
            assert any(re.match(rf"\S*layers\.{number} ", line) for line in lines)


def test_frozen_layers_say_so(here: Here, tmp_path: Path) -> None:
    layers = [FakeLayer("embed", 64, block=False, frozen=True), FakeLayer("layers.0", 64)]
    builder = StoreBuilder(tmp_path / "store", layers=layers)
    builder.save(10)
    builder.save(20)
    shown = here("show", builder.root, "--json").json
    assert [unit["moving"] for unit in shown["units"] if unit["layer"] == "embed"] == [False]
    assert shown["exact"]
    assert re.search(r"^embed +fixed +256 B$", here("show", builder.root).out, re.MULTILINE)
    assert "fixed" in here("show", builder.root, "--long").out


def test_a_step_of_two_epochs_is_that_of_the_newer(here: Here, builder: StoreBuilder) -> None:
    old = builder.save(10)
    builder.save(20)
    builder.restart()
    new = builder.save(10)
    assert here("show", builder.root, "10", "--json").json["save"] == new.name
    assert here("show", builder.root, old.name, "--json").json["save"] == old.name
    assert here("show", builder.root, "00020", "--json").json["step"] == 20


@pytest.mark.parametrize("wanted", ["11", "-1", "10-1", "../10", "٣", "00000010-000009"])
def test_a_commit_that_is_not_there(here: Here, builder: StoreBuilder, wanted: str) -> None:
    save = builder.save(10)
    answer = here("show", builder.root, "--", wanted)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"error: there is no commit '{wanted}'; there is {save.name}\n"


def test_nothing_to_show(here: Here, builder: StoreBuilder) -> None:
    for args in ((), ("10",)):
        answer = here("show", builder.root, *args)
        assert (answer.code, answer.err) == (13, "error: the store holds no commit yet\n")


def test_fallbacks_are_marked(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    middle = builder.save(20, layers=("layers.0",))
    builder.save(30, layers=("norm",), drift=0.5)
    builder.payload(middle, 1).unlink()
    answer = here("show", builder.root)
    assert answer.code == 12
    row = next(line for line in answer.out.splitlines() if line.startswith("layers.0"))
    assert row.split() == ["layers.0", "20!", "?", "20!", "?", "20!", "?", "768", "B"]
    assert "the committed one is damaged" in answer.out
    assert "Problems" in answer.out


def test_a_damaged_commit_is_shown_as_it_was_committed(here: Here, builder: StoreBuilder) -> None:
    old, new = builder.save(10), builder.save(20)
    builder.payload(new, 0).unlink()
    answer = here("show", builder.root, "20", "--json")
    assert (answer.code, answer.json["resumable"], answer.json["exact"]) == (12, False, False)
    assert answer.json["problems"][0].startswith("cannot be resumed: ")
    assert "damaged: the tables show the commit as written" in here("show", builder.root, "20").out
    default = here("show", builder.root, "--json")
    assert (default.code, default.json["save"]) == (12, old.name)
    builder.payload(old, 0).unlink()
    assert here("show", builder.root, "20").code == 13


def test_a_manifest_that_cannot_be_read(here: Here, builder: StoreBuilder) -> None:
    builder.save(10)
    manifest = builder.manifest(builder.save(20))
    flip_byte(manifest, 100)
    answer = here("show", builder.root, "20")
    assert (answer.code, answer.out) == (12, "")
    assert manifest.name in answer.err


def test_names_from_a_store_cannot_drive_the_terminal(here: Here, tmp_path: Path) -> None:
    layers = [FakeLayer("evil\x1b[2J\x07[bold]", 8), FakeLayer("[red]layer[/red]", 8)]
    builder = StoreBuilder(tmp_path / "store", layers=layers, policy="\x1b]0;title\x07", world_size=1)
    builder.save(10, reason="\x1b[31m")
    for flags in ((), ("--long",)):
        answer = here("show", builder.root, *flags, columns=120)
        assert answer.code == 0
        assert not set(answer.out) & {"\x1b", "\x07"}
        assert "evil\\x1b[2J\\x07[bold]" in answer.out
        assert "[red]layer[/red]" in answer.out


LOSSY = {"fp32": How("bf16+int8", 1), "exp_avg": How("int8-block", 1), "exp_avg_sq": How("int8-log2", 1)}


@pytest.mark.parametrize("columns", [80, 120])
def test_what_encoding_lost_is_told_by_layer_and_slot(here: Here, tmp_path: Path, columns: int) -> None:
    layers = [FakeLayer(f"layers.{i}", 640) for i in range(3)]
    builder = StoreBuilder(tmp_path / "store", layers=layers)
    first = builder.save(10, how=LOSSY)
    based = {slot: How(how.encoding, 1, first) for slot, how in LOSSY.items()}
    second = builder.save(20, layers=("layers.0",), how=based, drift=0.0125)
    builder.save(30, layers=("layers.1",), slots=("fp32",), drift=0.025)
    shown = here("show", builder.root, "--json").json
    assert not shown["exact"]
    units = {Unit(unit["layer"], unit["slot"]): unit for unit in shown["units"]}
    assert shown["max_error"] == max(unit["error"] for unit in units.values()) > 0
    mine = units[Unit("layers.0", "exp_avg")]
    assert (mine["encoding"], mine["save"], mine["bases"]) == ("int8-block", second.name, [first.name])
    assert 0 < mine["error"] < 0.02
    raw = units[Unit("layers.1", "fp32")]
    assert (raw["encoding"], raw["error"], raw["bases"]) == ("raw", 0.0, [])
    for flags in ((), ("--long",)):
        lines = here("show", builder.root, *flags, columns=columns).out.splitlines()
        assert max(map(len, lines)) <= columns
    lines = here("show", builder.root, columns=columns).out.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("Layer"))
    assert lines[heading].split()[:4] == ["Layer", "age", "drift", "error"]
    rows = {line.split()[0]: line.split() for line in lines[heading : heading + 5] if line.startswith("layers.")}
    assert rows["layers.1"][1:3] == ["0", "0"]
    assert rows["layers.0"][1:3] == ["10", "0.0250"]
    assert "rounded to bf16+int8, int8-block, int8-log2" in " ".join(" ".join(lines).split())


def test_bytes_per_parameter_by_slot_and_encoding(here: Here, tmp_path: Path) -> None:
    builder = StoreBuilder(tmp_path / "store", layers=[FakeLayer("a", 640), FakeLayer("b", 640)], world_size=1)
    builder.save(10, how={slot: How(how.encoding) for slot, how in LOSSY.items()})
    builder.save(20, layers=("b",), slots=("fp32",), drift=0.0)
    lines = [line.split() for line in here("show", builder.root).out.splitlines()]
    table = lines[next(i for i, line in enumerate(lines) if line[:1] == ["Slot"]) :]
    shares = {line[0]: line[-1] for line in table if len(line) > 3}
    blocks = f"{(640 + 40) / 1280 * 2:.2f}"
    assert shares["bf16+int8"] == "1.50" and shares["raw"] == "2.00"
    assert (shares["int8-block"], shares["int8-log2"]) == (blocks, "1.00")
    assert float(shares["all"]) == pytest.approx(1.5 + 2 + (640 + 40) / 640 + 1, abs=0.006)
    assert here("show", builder.root, "--json").json["nbytes"] == 640 * 3 + 640 * 4 + 2 * (640 + 40) + 2 * 640


def test_rounded_is_not_exact_even_where_all_is_of_one_step(here: Here, builder: StoreBuilder) -> None:
    builder.save(10, how={"fp32": How("bf16")})
    for command in ("show", "status"):
        assert "not exact: rounded to bf16, drift up to 0.00" in " ".join(here(command, builder.root).out.split())
    assert here("status", builder.root, "--json").json["resume"]["lossy"] == ["bf16"]


def test_packing_alone_is_exact(here: Here, builder: StoreBuilder) -> None:
    first = builder.save(10, how=How(level=1))
    builder.save(20, how=How(level=1, base=first))
    shown = here("show", builder.root, "--json").json
    assert shown["exact"] and shown["max_error"] == 0
    assert {unit["encoding"] for unit in shown["units"]} == {"raw"}
    assert "error" not in here("show", builder.root).out
