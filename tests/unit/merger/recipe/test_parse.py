"""Recipes in our own form: what a file may say, and what is said about one that makes no sense."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from merger.recipe.model import Auxiliary, Blocks, EveryKth, Layers, Parameters, Recipe, SourceRef
from merger.recipe.parse import read_recipe, recipe_from
from store.config_file import parse_yaml
from store.errors import ConfigError

SOURCES = "sources: {a: {path: run/a, step: 110}, b: run/b}\nrun_state: b\n"


def recipe(text: str) -> Recipe:
    return recipe_from(parse_yaml(text, "r.yaml"))


def test_everything_that_a_recipe_can_say() -> None:
    found = recipe(
        """
sources:
  early: {path: run/store, step: 00000110-000002}
  late: {path: ~/run/checkpoints, step: global_step120}
  near: {path: run/store, step: "<= 115"}
  same: {step: "120"}
take:
  - {layers: model.layers.0-15, from: early}
  - {layers: [model.norm, "model.l*"], except: "*.bias", from: late}
  - {blocks: [16-17, 19], from: late}
  - {parameters: "*.lora_A.*", from: near}
  - {regex: "(a|b).weight", from: near}
auxiliary: {embeddings: early, lm_head: late}
rest: late
run_state: late
files: early
dtype: bfloat16
"""
    )
    assert found.sources == {
        "early": SourceRef(Path("run/store"), "00000110-000002"),
        "late": SourceRef(Path("~/run/checkpoints").expanduser(), "global_step120"),
        "near": SourceRef(Path("run/store"), "<= 115"),
        "same": SourceRef(None, 120),
    }
    assert [(rule.source, rule.selection, rule.but) for rule in found.rules] == [
        ("early", Layers(("model.layers.0-15",)), ()),
        ("late", Layers(("model.norm", "model.l*")), ("*.bias",)),
        ("late", Blocks(16, 17), ()),
        ("late", Blocks(19, 19), ()),
        ("near", Parameters(("*.lora_A.*",)), ()),
        ("near", Parameters(("(a|b).weight",), regex=True), ()),
        ("early", Auxiliary("embeddings"), ()),
        ("late", Auxiliary("lm_head"), ()),
    ]
    assert (found.rest, found.run_state, found.files, found.dtype) == ("late", "late", "early", "BF16")
    assert found.rules[1].where == "take[1] (r.yaml:9)"
    assert found.rules[-1].where == "auxiliary.lm_head (r.yaml:13)"


def test_the_short_form() -> None:
    found = recipe(SOURCES + "parity: [b, a]\nauxiliary: b\n")
    assert [(rule.source, rule.selection) for rule in found.rules] == [
        ("b", EveryKth(2, 0)),
        ("a", EveryKth(2, 1)),
        ("b", Auxiliary(None)),
    ]


def test_one_source_is_the_run_state_as_well() -> None:
    assert recipe("sources: {only: here}\nrest: only").run_state == "only"


def test_files_are_a_source_or_a_directory() -> None:
    assert recipe(SOURCES + "rest: a\nfiles: b").files == "b"
    assert recipe(SOURCES + "rest: a\nfiles: some/where").files == Path("some/where")
    assert recipe(SOURCES + "rest: a").files is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "r.yaml must be a YAML mapping with `sources:`, or with `slices:` in MergeKit's form"),
        ("- a", "must be a YAML mapping"),
        ("a: [", "r.yaml is not YAML: "),
        ("rest: a\nrest: b", "r.yaml:2: 'rest' is written twice (first in line 1)"),
        ("sources: {a: x, b: y, a: z}", "r.yaml:1: 'sources.a' is written twice"),
        ("rest: a", "r.yaml: `sources` is missing; give each a name, a `path` and optionally a `step`"),
        (SOURCES, None),
        (SOURCES + "reste: a", "r.yaml:3: unknown key 'reste': did you mean 'rest'? Known here: auxiliary, dtype"),
        ("sources:\n  a:\n    pth: x", "r.yaml:3: unknown key 'pth': did you mean 'path'? Known here: path, step"),
        (SOURCES + "take:\n- {layer: x, from: a}", "r.yaml:4: unknown key 'layer': did you mean 'layers'?"),
        (SOURCES + "take:\n- {layers: x}", "r.yaml:4: take.0.from is missing"),
        (SOURCES + "take:\n- {from: a}", "take.0: an entry of `take` needs one of `layers`, `blocks`, `parameters`"),
        (SOURCES + "take:\n- {layers: x, regex: y, from: a}", "and has layers and regex: write an entry for each"),
        (SOURCES + "take:\n- {blocks: 3-1, from: a}", "r.yaml:4: blocks 3-1 end before they begin"),
        (SOURCES + "take:\n- {blocks: x, from: a}", "take.0.blocks.0: string should match pattern"),
        (SOURCES + "take:\n- {regex: '(', from: a}", "r.yaml:4: '(' is not a regular expression"),
        (SOURCES + "take:\n- {layers: [], from: a}", "take.0.layers: value should have at least 1 item"),
        (SOURCES + "take:\n\n- {layers: x, from: c}", "r.yaml:5: take.0.from names the source 'c', which is not among"),
        (SOURCES + "rest: c", "r.yaml:3: rest names the source 'c', which is not among `sources`: a, b"),
        (SOURCES + "auxiliary: c", "auxiliary names the source 'c'"),
        (SOURCES + "auxiliary: {norm: c}", "auxiliary.norm names the source 'c'"),
        (SOURCES + "auxiliary: 3", "r.yaml:3: auxiliary: input should be a valid mapping (it is 3)"),
        (SOURCES + "parity: [a, c]", "parity.1 names the source 'c'"),
        (SOURCES + "parity: [a, a]", "parity names the source 'a' twice"),
        (SOURCES + "parity: [a]", "parity: tuple should have at least 2 items"),
        ("sources: {a: x, b: y}\nrest: a", "the source of the run state (counters, schedule, random"),
        ("sources: {a: {step: true}}", "a step must be a number, a save's name, a tag or a bound such as"),
        ("sources: {a: {step: -3}}", "not -3"),
        ("sources: {a: {path: x, step: '>= 3'}}\nrest: a", "r.yaml:1: '>= 3' is not a bound on a step; write '<= 120'"),
        ("sources: {a: {path: x, step: '<= x'}}\nrest: a", "'<= x' is not a bound on a step"),
        (SOURCES + "dtype: int8", "r.yaml:3: dtype 'int8' is not supported; use float32, bfloat16 or float16"),
    ],
)  # fmt: skip
def test_what_makes_no_sense(text: str, told: str | None) -> None:
    if told is None:
        assert recipe(text).rules == ()  # what it leaves open is known with a model only
        return
    with pytest.raises(ConfigError) as raised:
        recipe(text)
    assert told in str(raised.value)


def test_several_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'rets'.*unknown key 'fiels'"):
        recipe(SOURCES + "rets: a\nfiels: b")


def test_objects_in_yaml_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not YAML: could not determine a constructor"):
        recipe("sources: !!python/object/apply:os.system ['touch /nowhere']")


MERGEKIT = "slices: [{sources: [{model: run/a, layer_range: [0, 2]}]}]\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sources:\n  a: {path: x, step: 00000120}\nrest: a", "r.yaml:2: YAML takes 00000120 for 80"),
        ("sources: {a: {path: x, step: 0120}}\nrest: a", "YAML takes 0120 for 80"),
        ("sources: {a: {path: x, step: 00000007}}\nrest: a", "YAML takes 00000007 for 7"),
        ("sources: {a: {path: x, step: 0_120}}\nrest: a", "YAML takes 0_120 for 80"),
        ("sources: {a: {path: x, step: 1:50}}\nrest: a", "YAML takes 1:50 for 110"),
        ("sources: {a: {path: x, step: !!int '0120'}}\nrest: a", "YAML takes 0120 for 80"),
        ("sources: {010: x}\nrest: a", "YAML takes 010 for 8"),
        (SOURCES + "take:\n- {blocks: 1:0, from: a}", "r.yaml:4: YAML takes 1:0 for 60"),
        (SOURCES + "take:\n- {blocks: [0, 010], from: a}", "YAML takes 010 for 8"),
        (MERGEKIT.replace("2]", "010]"), "r.yaml:1: YAML takes 010 for 8"),
        (MERGEKIT + "parameters: {weight: 0:01.0}", "r.yaml:2: YAML takes 0:01.0 for 1.0"),
    ],
)
def test_numbers_that_yaml_reads_as_others(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told) + ".*: write it "):
        recipe(text)


def test_numbers_that_everyone_reads_alike() -> None:
    text = "sources: {a: {path: x, step: 120}, b: {path: x, step: 0}, c: {path: x, step: '00000120'}}\nrun_state: a"
    assert [source.step for source in recipe(text).sources.values()] == [120, 0, 120]


def test_aliases_are_followed_so_far_and_no_further() -> None:
    assert recipe("sources: {a: &a {path: x}, b: *a}\nrun_state: a").sources["b"] == SourceRef(Path("x"), None)
    listed = ["files: &x0 [x]", *(f"k{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 12))]
    merged = ["files: &x0 {a: x}", *(f"k{i}: &x{i} {{{', '.join([f'<<: *x{i - 1}'] * 2)}}}" for i in range(1, 40))]
    for lines in (listed, merged):
        with pytest.raises(ConfigError, match=r"^r\.yaml:\d+: more than 100000 values.*write out"):
            recipe("\n".join(lines))
    with pytest.raises(ConfigError, match="is not YAML"):
        recipe("sources: &a [*a]")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the recipe .*: No such file"):
        read_recipe(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ConfigError, match="is not text"):
        read_recipe(tmp_path / "binary.yaml")
    (tmp_path / "good.yaml").write_text(SOURCES + "rest: a")
    assert read_recipe(tmp_path / "good.yaml").where == str(tmp_path / "good.yaml")


def test_the_published_recipes() -> None:
    text = (Path(__file__).resolve().parents[4] / "docs" / "recipes.md").read_text()
    found = [recipe(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.S)]
    assert [len(one.sources) for one in found] == [3, 2, 2]
    assert [one.run_state for one in found] == ["late", "odd", "checkpoint-200"]
