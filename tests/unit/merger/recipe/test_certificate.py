"""Certificates of composites: what they say of each part, and that nothing passes for exact that is not."""

from __future__ import annotations

from dataclasses import replace

from merger.recipe.certificate import Part, composite_certificate, held_slots
from store.certificate import Certificate
from tests.support.recipe_checkpoints import checkpoint, small_model


def certified(parts: dict[str, Part], source_of: dict[str, str], run_state: str = "a") -> Certificate:
    taken = {fqn: held_slots(parts[name].checkpoint, fqn) for fqn, name in source_of.items()}
    return composite_certificate(parts, source_of, taken, run_state, ())


def everything(name: str) -> dict[str, str]:
    return dict.fromkeys(small_model(), name)


A, B = checkpoint("run A", small_model(), step=10), checkpoint("run B", small_model(), step=20)


def test_a_mixed_layer_has_a_row_for_each_source() -> None:
    source_of = {**everything("a"), "layers.0.norm.weight": "b"}
    found = certified({"a": Part(A, "x"), "b": Part(B, "y")}, source_of)
    rows = [(unit.slot, unit.source, unit.step, unit.staleness, unit.drift, unit.nbytes) for unit in found.units
            if unit.layer == "layers.0"]  # fmt: skip
    assert rows == [
        ("fp32", "a", 10, 0, 0.0, 64),
        ("exp_avg", "a", 10, 0, 0.0, 64),
        ("exp_avg_sq", "a", 10, 0, 0.0, 64),
        ("fp32", "b", 20, -10, None, 16),
        ("exp_avg", "b", 20, -10, None, 16),
        ("exp_avg_sq", "b", 20, -10, None, 16),
    ]
    assert (found.exact, found.store_id, found.save, found.step) == (False, "", "a:save-10 + b:save-20", 10)
    assert [unit.layer for unit in found.units] == sorted(
        (unit.layer for unit in found.units), key=["embed", "layers.0", "layers.1", "head"].index
    )


def test_all_of_one_lineage_is_as_exact_as_it_was() -> None:
    parts = {"a": Part(A, "x"), "b": Part(replace(A, origin="again"), "x")}
    half = {**everything("a"), "layers.1.up.weight": "b"}
    assert certified(parts, half).exact
    stale = replace(A, certificate=replace(A.certificate, exact=False))
    assert not certified({"a": Part(stale, "x"), "b": Part(stale, "x")}, half).exact


def test_the_same_step_of_another_place_is_not_exact() -> None:
    half = {**everything("a"), "layers.1.up.weight": "b"}
    found = certified({"a": Part(A, "x"), "b": Part(A, "y")}, half)
    assert not found.exact and found.max_drift is None
    assert found.save == "a:save-10 + b:save-10"
    frozen = {**everything("a"), "head.weight": "b"}
    assert not certified({"a": Part(A, "x"), "b": Part(A, "y")}, frozen).exact


def test_what_does_not_move_within_a_run_is_stale_all_the_same_where_it_is_of_another_version() -> None:
    found = certified({"a": Part(A, "x"), "b": Part(B, "x")}, {**everything("b"), "head.weight": "a"}, "b")
    (head,) = [unit for unit in found.units if unit.layer == "head"]
    assert (head.moving, head.staleness, head.drift) == (True, 10, None)
    assert (found.max_staleness, found.max_drift, found.exact) == (10, None, False)


def test_older_and_newer_than_the_run_state() -> None:
    parts = {"a": Part(A, "x"), "b": Part(B, "x")}
    half = {**everything("a"), "layers.1.up.weight": "b"}
    ages = {name: {unit.staleness for unit in certified(parts, half, name).units} for name in parts}
    assert ages == {"a": {0, -10}, "b": {0, 10}}
    assert not certified(parts, half).exact


def test_a_version_that_the_run_state_s_own_checkpoint_has_keeps_its_drift() -> None:
    """A later commit of one store, in which the embedding was not saved again."""
    units = tuple(
        replace(unit, step=10, save="save-10", staleness=10, drift=0.5) if unit.layer == "embed" else unit
        for unit in B.certificate.units
    )
    late = replace(B, certificate=replace(B.certificate, units=units, exact=False))
    found = certified({"a": Part(A, "x"), "b": Part(late, "x")}, {**everything("b"), "embed.weight": "a"}, "b")
    assert {(u.staleness, u.drift, u.source) for u in found.units if u.layer == "embed"} == {(10, 0.5, "a")}


def test_the_right_version_beside_the_scalars_of_a_later_step_is_not_exact() -> None:
    """A later commit of one store in which nothing of a layer was saved again: its step counts are the later ones."""
    stale = tuple(replace(unit, step=10, save="save-10", staleness=10) for unit in B.certificate.units)
    late = replace(B, certificate=replace(B.certificate, units=stale, exact=False))
    parts = {"a": Part(A, "x"), "late": Part(late, "x")}
    moved = certified(parts, {**everything("a"), "embed.weight": "late"})
    assert {unit.drift for unit in moved.units} == {0.0} and not moved.exact
    assert certified(parts, {**everything("a"), "head.weight": "late"}).exact  # frozen: it has no scalars


def test_what_a_source_certifies_nothing_of_is_not_exact() -> None:
    bare = replace(A, certificate=replace(A.certificate, units=()))
    found = certified({"a": Part(bare, "x")}, everything("a"))
    assert not found.exact
    assert {unit.drift for unit in found.units} == {None}
    assert next(unit.nbytes for unit in found.units if (unit.layer, unit.slot) == ("layers.0", "fp32")) == 80
