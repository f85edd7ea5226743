"""What a merge wrote is a source again, in all that became of it since: converted, trained on, taken apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from merger.import_checkpoint import plan_import
from merger.io.output_dir import CERTIFICATE
from merger.layouts.base import Target
from merger.merge import merge
from merger.recipe.model import Recipe
from merger.recipe.parse import recipe_from
from merger.sources import open_source
from store.certificate import Certificate
from store.config_file import parse_yaml
from store.errors import MergeError, UsageError
from tests.support.foreign import convert, run, train_stock
from tests.support.launch import WORKERS, launcher

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASE = "zero2-fp32-round-robin"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 3 of two ranks, and step 3 merged into ``merged/saved``."""
    directory = tmp_path_factory.mktemp("merged")
    train_stock(directory, 2, [CASE])
    merge(directory / CASE / "saved", directory / "merged" / "saved")
    return directory


def test_what_the_converter_scrambled_is_refused_whoever_wrote_what_it_read(trained: Path, tmp_path: Path) -> None:
    convert(trained, ["merged"])
    with pytest.raises(MergeError, match="round_robin_gradients"):
        merge(trained / "merged" / "universal", tmp_path / "out")


def test_random_states_that_a_run_handed_on_are_not_taken_for_its_own(trained: Path, tmp_path: Path) -> None:
    state = {"rng": {"torch": 1}, "user": {"at": 3}}
    shutil.copytree(trained / "merged" / "saved", tmp_path / "given")
    (file,) = (tmp_path / "given").glob("*/mp_rank_00_model_states.pt")
    content = torch.load(file, weights_only=False)
    assert content["driftpoint"]["step"] == 3
    content["driftpoint"]["ranks"] = {0: state, 1: state}  # as a merge from a store has them
    torch.save(content, file)
    given = open_source(tmp_path / "given").checkpoint(None, frozenset())
    assert given.run_states[0].user == {"at": 3} and given.problems == ()
    worker = [str(WORKERS / "source_continue.py"), CASE, str(tmp_path / "given"), str(tmp_path / "later"), "2"]
    run([*launcher(2), *worker], tmp_path)
    later = open_source(tmp_path / "later").checkpoint(None, frozenset())
    assert (later.step, later.run_states, later.certificate.as_found) == (5, {}, True)
    assert any("of step 3, handed on by the run that saved step 5" in problem for problem in later.problems)


@pytest.fixture(scope="module")
def recipe(trained: Path) -> Recipe:
    """Layers of step 3 and of step 2 in turn."""
    saved = trained / CASE / "saved"
    text = f"sources:\n  a: {{path: {saved}, step: 3}}\n  b: {{path: {saved}, step: 2}}\n"
    return recipe_from(parse_yaml(f"{text}parity: [a, b]\nauxiliary: a\nrun_state: a\n", "recipe.yaml"))


@pytest.mark.parametrize("layout", ["deepspeed", "universal"])
@pytest.mark.parametrize("left", ["both", "client state", "certificate"])
def test_a_composite_stays_one(recipe: Recipe, tmp_path: Path, layout: str, left: str) -> None:
    first = merge(None, tmp_path / "first", recipe=recipe, target=Target(layout=layout))
    assert not first.certificate.whole
    if left == "client state":
        (first.out / CERTIFICATE).unlink()
    if left == "certificate":
        for file in first.out.glob("*/*_model_states.pt"):
            content = torch.load(file, weights_only=False)
            del content["driftpoint"]
            torch.save(content, file)
    again = merge(first.out, tmp_path / "again").certificate
    assert not again.whole and again.max_staleness == 1
    assert worst(again) == worst(first.certificate)
    with pytest.raises(UsageError, match="is a composite"):
        plan_import(first.out)


def worst(certificate: Certificate) -> dict[tuple[str, str], int]:
    return {
        (unit.layer, unit.slot): max(
            other.staleness for other in certificate.units if (other.layer, other.slot) == (unit.layer, unit.slot)
        )
        for unit in certificate.units
    }


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("{", False),
        ('{"tag": "global_step3", "step": 3, "exact": "yes", "units": []}', False),
        ('{"tag": "global_step3", "step": 2, "exact": true, "units": []}', False),
        ('{"tag": "global_step2", "step": 2, "exact": false, "units": []}', True),
        ('{"tag": "global_step3", "step": 3, "exact": true, "units": []}', True),
    ],
)
def test_a_certificate_is_believed_only_where_it_is_one_and_of_this_checkpoint(
    trained: Path, tmp_path: Path, text: str, exact: bool
) -> None:
    shutil.copytree(trained / CASE / "saved", tmp_path / "saved")
    (tmp_path / "saved" / CERTIFICATE).write_text(text)
    found = open_source(tmp_path / "saved").checkpoint(None, frozenset())
    assert (found.certificate.as_found, found.problems == ()) == (exact, exact)


LEFT_OUT = "blocks.0.down.weight"


def spoil(folder: Path, older: Path, how: str) -> str:
    zero, old = folder / "zero", older / "zero"
    if how == "no moments":
        for file in zero.glob("*/exp_avg*.pt"):
            file.unlink()
        return r"has no exp_avg\.pt, exp_avg_sq\.pt"
    if how == "no moments of one":
        for file in (zero / LEFT_OUT).glob("exp_avg*.pt"):
            file.unlink()
        return rf"{LEFT_OUT} has no exp_avg\.pt"
    if how == "surplus":
        shutil.copytree(zero / LEFT_OUT, zero / "other.weight")
        return r"other\.weight is not a parameter of"
    if how == "no step of one":
        (zero / LEFT_OUT / "step.pt").unlink()
        return LEFT_OUT
    name = LEFT_OUT if how == "one of another step" else ""
    shutil.rmtree(zero / name)
    shutil.copytree(old / name, zero / name)
    return "files of two saves are mixed"


@pytest.mark.parametrize(
    "how",
    ["no moments", "no moments of one", "surplus", "no step of one", "one of another step", "all of another step"],
)
def test_a_universal_checkpoint_with_files_missing_or_of_another_save_is_refused(
    trained: Path, tmp_path: Path, how: str
) -> None:
    universal = Target(layout="universal")
    new, old = (merge(trained / CASE / "saved", tmp_path / f"{i}", save=i, target=universal) for i in (3, 2))
    match = spoil(new.out / new.tag, old.out / old.tag, how)
    with pytest.raises(MergeError, match=match):
        open_source(new.out).checkpoint(None, frozenset())


@pytest.mark.parametrize("layout", ["deepspeed", "universal"])
def test_a_directory_called_after_another_step_is_refused(trained: Path, tmp_path: Path, layout: str) -> None:
    out = merge(trained / CASE / "saved", tmp_path / "out", save=2, target=Target(layout=layout))
    tag = out.tag.replace("2", "9")
    (out.out / out.tag).rename(out.out / tag)
    (latest,) = out.out.glob("latest*")
    latest.write_text(tag)
    source = open_source(out.out)
    for step in (9, "9", tag, None):
        with pytest.raises(MergeError, match=r"called after step 9 and holds step 2"):
            source.checkpoint(step, frozenset())
    alone = open_source(out.out / tag).checkpoint(None, frozenset())
    assert alone.step == 2 and any("called after step 9" in problem for problem in alone.problems)


def test_a_trainers_folder_called_after_another_step_is_refused(trained: Path, tmp_path: Path) -> None:
    for number in (2, 3, 9):
        shutil.copytree(
            trained / CASE / "saved" / f"global_step{min(number, 3)}",
            tmp_path / f"checkpoint-{number}" / f"global_step{min(number, 3)}",
        )
        (tmp_path / f"checkpoint-{number}" / "latest").write_text(f"global_step{min(number, 3)}")
    source = open_source(tmp_path)
    assert source.checkpoint(3, frozenset()).step == 3
    with pytest.raises(MergeError, match=r"checkpoint-9 holds .* of step 3"):
        source.checkpoint(9, frozenset())
    newest = source.checkpoint(None, frozenset())
    assert newest.step == 3 and any("checkpoint-9" in problem for problem in newest.problems)
