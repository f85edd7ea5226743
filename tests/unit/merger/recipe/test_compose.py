"""Whole merges by recipe, of real stores: what is rebuilt, from where, what is told, and what falls back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.io.output_dir import CERTIFICATE
from merger.layouts.base import Target
from merger.merge import MergeResult, merge
from merger.plan import Request, draft_merge
from merger.recipe.model import Recipe
from merger.recipe.parse import recipe_from
from store.config_file import parse_yaml
from store.errors import ConfigError, MergeError, NoStoreError, NothingToResumeError, UsageError
from store.names import SaveId, Unit
from tests.support.plain_stores import PlainStore, digest_of, rebuilt, same
from tests.support.stores import FakeLayer, flip_byte


@pytest.fixture
def stores(tmp_path: Path) -> tuple[PlainStore, PlainStore]:
    """Two runs: ``a`` at steps 10 and 20, ``b`` at 15 and 25."""
    a, b = PlainStore(tmp_path / "a", layers=4), PlainStore(tmp_path / "b", layers=4)
    for step in (10, 20):
        a.save(step)
        b.save(step + 5)
    return a, b


def recipe(folder: Path, text: str) -> Recipe:
    return recipe_from(parse_yaml(text.replace("HERE", str(folder)), "r.yaml"))


def run(folder: Path, text: str, **given: Any) -> MergeResult:
    return merge(None, folder / "out", recipe=recipe(folder, text), **given)


def damage(store: PlainStore, save: SaveId, unit: Unit) -> None:
    from store.segment import read_part

    part = read_part(store.files, store.store_id, save, 0)
    entry = next(entry for entry in part.entries if entry.unit == unit)
    flip_byte(store.payload(save), part.header_bytes + entry.offset)


def expected(stores: Mapping[str, tuple[PlainStore, int]], layers: Mapping[str, str]) -> dict[str, Any]:
    """Values by fqn and slot; stores: (store, step) by source; layers: source by layer."""
    values = {name: store.expected(step) for name, (store, step) in stores.items()}
    return {f"{layer}.weight": values[name][f"{layer}.weight"] for layer, name in layers.items()}


HALVES = """
sources:
  early: {path: HERE/a, step: 10}
  late: HERE/b
take:
  - {layers: [embed_tokens, layers.0-1], from: early}
  - {blocks: 2-3, from: late}
rest: late
run_state: late
"""
IN_HALVES = {
    "embed_tokens": "early", "layers.0": "early", "layers.1": "early", "layers.2": "late", "layers.3": "late",
    "norm": "late", "lm_head": "late",
}  # fmt: skip


def test_two_runs(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    a, b = stores
    before = [digest_of(store.root) for store in stores]
    result = run(tmp_path, HALVES)
    assert same(rebuilt(result.out), expected({"early": (a, 10), "late": (b, 25)}, IN_HALVES))
    assert [digest_of(store.root) for store in stores] == before
    optimizer = torch.load(result.out / "optimizer.pt", weights_only=True)
    steps = [optimizer["state"][i]["step"].item() for i in range(7)]
    assert steps == [10, 10, 10, 25, 25, 25, 25]
    extra = torch.load(result.out / "extra.pt", weights_only=True)
    assert extra["step"] == 25
    certificate = result.certificate
    assert (certificate.exact, certificate.step, certificate.store_id) == (False, 25, "")
    assert certificate.save == "late:00000025-000001 + early:00000010-000001"
    found = {
        (unit.layer, unit.slot): (unit.source, unit.step, unit.staleness, unit.drift) for unit in certificate.units
    }
    assert found[("layers.0", "fp32")] == ("early", 10, 15, None)
    assert found[("norm", "exp_avg")] == ("late", 25, 0, 0.0)
    document = json.loads((result.out / CERTIFICATE).read_text())
    assert [(one["name"], one["kind"], one["step"], one["path"]) for one in document["sources"]] == [
        ("early", "store", 10, str(a.root)),
        ("late", "store", 25, str(b.root)),
    ]
    assert (document["max_staleness"], document["max_drift"]) == (15, None)


def test_the_run_state_of_the_older_one(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    result = run(tmp_path, HALVES.replace("run_state: late", "run_state: early"))
    assert result.certificate.step == 10
    assert {unit.staleness for unit in result.certificate.units if unit.source == "late"} == {-15}
    (note,) = result.notes
    assert note == (
        "layers.2, layers.3, norm and 1 more: up to 15 steps newer than the run state of 'early' (step 10): counters "
        "and schedule go on from the older step"
    )
    assert torch.load(result.out / "extra.pt", weights_only=True)["step"] == 10


def test_everything_from_one_of_two_is_that_one(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    a, _ = stores
    alone = merge(a.root, tmp_path / "alone", save=20)
    result = run(tmp_path, "sources: {x: {path: HERE/a, step: 20}, y: HERE/b}\nrest: x\nrun_state: x")
    assert result.certificate == alone.certificate and result.certificate.exact
    assert [source.name for source in result.sources] == ["x"]
    assert same(rebuilt(result.out), a.expected(20))


def test_two_steps_of_one_store(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    a, _ = stores
    text = "sources: {x: {step: 10}, y: {step: 20}}\nparity: [x, y]\nauxiliary: y\nrun_state: y"
    with pytest.raises(UsageError, match=r"source 'x' has no `path`: add one, or name SOURCE"):
        run(tmp_path, text)
    result = merge(a.root, tmp_path / "out", recipe=recipe(tmp_path, text))
    layers = {layer.name: "x" if layer.name in ("layers.0", "layers.2") else "y" for layer in a.layers}
    assert same(rebuilt(result.out), expected({"x": (a, 10), "y": (a, 20)}, layers))
    assert (result.certificate.exact, result.certificate.store_id) == (False, a.store_id)
    assert result.certificate.save == "y:00000020-000001 + x:00000010-000001"


def test_mergekit_s_form(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    a, b = stores
    text = """
slices:
  - sources: [{model: HERE/a@10, layer_range: [0, 2]}]
  - sources: [{model: HERE/b, layer_range: [2, 4]}]
merge_method: passthrough
dtype: bfloat16
"""
    result = run(tmp_path, text)
    layers = {**IN_HALVES, "embed_tokens": "late"}  # of one dimension here, so that it passes for a norm
    assert same(rebuilt(result.out), expected({"early": (a, 10), "late": (b, 25)}, layers))
    assert any("run state (counters, schedule, random generators) is of b, step 25" in n for n in result.notes)
    assert any("dtype (BF16) is for exported weights" in note for note in result.notes)
    tie = text.replace("@10", "@20").replace("HERE/b", "HERE/b@25").replace("b@25", "a@20")
    assert run(tmp_path / "second", tie.replace("HERE", str(tmp_path))).certificate.exact


def test_equal_newest_steps_leave_the_run_state_open(tmp_path: Path) -> None:
    for name in "ab":
        PlainStore(tmp_path / name, layers=4).save(10)
    slices = (
        "slices:\n- sources: [{model: HERE/a, layer_range: [0, 2]}]\n- sources: [{model: HERE/b, layer_range: [2, 4]}]"
    )
    with pytest.raises(ConfigError, match=r"are all at step 10, so the source of counters.*add `run_state:`"):
        run(tmp_path, slices)
    assert run(tmp_path, slices + "\nrun_state: HERE/b").certificate.exact is False  # the same step is not the same run


@pytest.mark.parametrize("save", ["newest", "named"])
def test_damage_in_both_stores(stores: tuple[PlainStore, PlainStore], tmp_path: Path, save: str) -> None:
    a, b = stores
    damage(a, SaveId(20, 1), Unit("layers.0", "exp_avg"))
    damage(b, SaveId(25, 1), Unit("layers.2", "fp32"))
    damage(b, SaveId(25, 1), Unit("layers.1", "fp32"))  # not taken from here
    text = HALVES.replace("step: 10", "step: 20") if save == "named" else HALVES.replace(", step: 10", "")
    plans: list[int] = []
    result = run(tmp_path, text, planned=lambda plan: plans.append(plan.bytes_to_read))
    wanted = expected({"early": (a, 20), "late": (b, 25)}, IN_HALVES)
    wanted["layers.0.weight"]["exp_avg"] = a.values(Unit("layers.0", "exp_avg"), 10)
    wanted["layers.2.weight"]["fp32"] = b.values(Unit("layers.2", "fp32"), 15)
    assert same(rebuilt(result.out), wanted)
    assert {(u.source, u.layer, u.slot, u.step) for u in result.certificate.units if u.fallback} == {
        ("early", "layers.0", "exp_avg", 10),
        ("late", "layers.2", "fp32", 15),
    }
    assert len(plans) == 2
    assert any("layers.0/exp_avg of save 00000020-000001" in problem for problem in result.problems)
    assert any(problem.startswith("late: layers.2/fp32") for problem in result.problems)
    assert not any("layers.1" in problem for problem in result.problems)


def test_damage_without_an_older_version(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    a, _ = stores
    damage(a, SaveId(10, 1), Unit("layers.0", "fp32"))
    with pytest.raises(
        MergeError, match=r"source 'early': commit 00000010-000001 cannot be rebuilt: layers.0/fp32 has"
    ):
        run(tmp_path, HALVES)
    assert not (tmp_path / "out").exists()
    bound = HALVES.replace("step: 10", "step: '<= 19'")
    with pytest.raises(MergeError, match=r"has no complete checkpoint at a step <= 19; step 10: commit 0"):
        run(tmp_path, bound)


def test_newest_within_a_bound(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    a, _ = stores
    for bound, step in (("<= 20", 20), ("< 20", 10), ("<= 19", 10)):
        out = tmp_path / f"out-{step}-{bound[1]}"
        text = f"sources: {{a: {{path: HERE/a, step: '{bound}'}}}}\nrest: a"
        result = merge(None, out, recipe=recipe(tmp_path, text))
        assert result.certificate.step == step and result.certificate.exact
        assert merge(a.root, tmp_path / f"again{bound}", save=bound).certificate == result.certificate
    with pytest.raises(UsageError, match=r"/a has no checkpoint at a step <= 9; there are steps 20, 10"):
        run(tmp_path, "sources: {a: {path: HERE/a, step: '<= 9'}}\nrest: a")


def test_a_bound_goes_on_to_the_next_older_one(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    a, _ = stores
    for save in (SaveId(10, 1), SaveId(20, 1)):
        damage(a, save, Unit("norm", "fp32"))
    a.save(30)
    damage(a, SaveId(30, 1), Unit("norm", "fp32"))
    a.save(40, layers=("layers.0",))
    newer = a.save(50)
    result = run(tmp_path, "sources: {a: {path: HERE/a, step: '<= 60'}}\nrest: a")
    assert result.certificate.save == newer.name
    with pytest.raises(MergeError, match=r"no complete checkpoint at a step <= 45; step 40: .*; step 30: .*; step 2"):
        merge(a.root, tmp_path / "older", save="<= 45")


def test_models_that_differ(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    other = PlainStore(tmp_path / "c", layers=[FakeLayer("embed_tokens", 9, block=False), *stores[0].layers[1:-1]])
    other.save(25)
    with pytest.raises(MergeError) as raised:
        run(tmp_path, HALVES.replace("HERE/b", "HERE/c"))
    told = str(raised.value)
    assert "lm_head.weight: in 'early' (commit 00000010-000001 of" in told and "but not in 'late'" in told
    assert "embed_tokens.weight: shape [9] in 'late'" in told and "[128] in 'early'" in told
    assert not (tmp_path / "out").exists()


def test_a_source_that_nothing_comes_from_need_not_fit(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    PlainStore(tmp_path / "c", layers=2).save(25)
    text = "sources: {x: HERE/a, y: HERE/c}\nrest: x\nrun_state: x"
    assert run(tmp_path, text).certificate.exact
    with pytest.raises(MergeError, match=r"layers.2.weight, layers.3.weight: in 'x' .*, but not in 'y'"):
        merge(None, tmp_path / "again", recipe=recipe(tmp_path, text.replace("run_state: x", "run_state: y")))


def test_weights_without_optimizer_state(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    bare = PlainStore(tmp_path / "c", layers=4, slots=("fp32",))
    bare.save(25)
    text = HALVES.replace("HERE/b", "HERE/c").replace("run_state: late", "run_state: early")
    with pytest.raises(
        MergeError, match=r"layers.2.weight, .* 'late' .* holds no exp_avg of it, which the optimizer of 'e"
    ):
        run(tmp_path, text)
    result = run(tmp_path, text, target=Target("hf", dtype="F32"))
    assert {unit.slot for unit in result.certificate.units} == {"fp32"}
    from safetensors.torch import load_file

    (file,) = result.out.glob("*.safetensors")
    weights = load_file(file)
    assert weights["layers.0.weight"].numpy().tobytes() == stores[0].values(Unit("layers.0", "fp32"), 10).tobytes()
    assert weights["layers.2.weight"].numpy().tobytes() == bare.values(Unit("layers.2", "fp32"), 25).tobytes()


def test_files_of_a_recipe(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`files: early` has no configuration and tokenizer files"):
        run(tmp_path, HALVES + "files: early")
    with pytest.raises(UsageError, match=r"`files: .*/none` is neither a source nor a directory"):
        run(tmp_path, HALVES + "files: HERE/none")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float32"}')
    assert (run(tmp_path, HALVES + "files: HERE/model", target=Target("hf")).out / "config.json").is_file()


def test_requests_that_contradict_themselves(tmp_path: Path) -> None:
    given = recipe(tmp_path, HALVES)
    with pytest.raises(UsageError, match=r"neither SOURCE nor a recipe is given"):
        Request(None)
    with pytest.raises(UsageError, match=r"--step and --recipe are both given"):
        Request(None, 3, recipe=given)
    with pytest.raises(UsageError, match=r"r.yaml names the path of every source, so SOURCE \(x\) would be unused"):
        Request(Path("x"), recipe=given)


def test_the_output_is_put_into_no_source(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    for store in stores:
        with pytest.raises(UsageError, match="inside"):
            merge(None, store.root / "out", recipe=recipe(tmp_path, HALVES))


def test_a_plan_tells_everything_that_is_in_the_way(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    PlainStore(tmp_path / "empty")
    before = digest_of(tmp_path)
    text = """
sources: {x: HERE/a, none: HERE/nowhere, empty: HERE/empty, y: {path: HERE/b, step: 7}}
take:
  - {layers: layers.7, from: x}
  - {layers: layers.0-1, from: x}
  - {parameters: "layers.1.*", from: y}
run_state: x
"""
    draft = draft_merge(Request(None, recipe=recipe(tmp_path, text)), tmp_path / "a")
    assert draft.plan is None
    assert [use.name for use in draft.sources] == ["x"]
    kinds = [type(error) for error in draft.errors]
    assert kinds == [NoStoreError, NothingToResumeError, UsageError, ConfigError, ConfigError, ConfigError, UsageError]
    told = " | ".join(map(str, draft.errors))
    for part in (
        "nowhere does not exist: name the directory of a store or of a checkpoint",
        "source 'empty': the store ",
        "source 'y': ",
        "has no checkpoint 7; there are steps 25, 15",
        "the model has no layer 'layers.7'",
        "layers.1.weight is named twice",
        "no rule names embed_tokens.weight",
        "/a already exists",
    ):
        assert part in told
    assert digest_of(tmp_path) == before
    with pytest.raises(NoStoreError):
        run(tmp_path, text)


def test_a_plan_is_what_is_done(stores: tuple[PlainStore, PlainStore], tmp_path: Path) -> None:
    before = digest_of(tmp_path)
    draft = draft_merge(Request(None, recipe=recipe(tmp_path, HALVES)), tmp_path / "deep" / "out")
    assert (draft.errors, digest_of(tmp_path)) == ((), before)
    plan = draft.plan
    assert plan is not None
    assert sum(plan.reads.values()) == plan.bytes_to_read == 12 * sum(layer.numel for layer in stores[0].layers)
    assert plan.reads["early"] == 12 * (128 + 64 + 64)
    read: list[int] = []
    result = run(tmp_path, HALVES, progress=read.append)
    assert sum(read) == plan.bytes_to_read
    assert {file.path for file in plan.files} == {path.name for path in result.out.iterdir()}
    assert result.bytes_written == pytest.approx(plan.bytes_to_write, rel=0.2)
