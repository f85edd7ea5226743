"""Which source every parameter of a model comes from, by a recipe: each exactly once, or an error that says which not.

Pure: names only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from merger.recipe.model import Model
from merger.recipe.recipe import Recipe, Rule
from merger.recipe.selections import minus
from store.errors import ConfigError
from store.text import counted, listed


@dataclass(frozen=True)
class Choice:
    """Source by fqn, in model order. errors: all that is wrong; then ``source_of`` is not complete."""

    source_of: Mapping[str, str]
    errors: tuple[ConfigError, ...]


def choose(recipe: Recipe, model: Model) -> Choice:
    """The choice that a recipe makes for a model."""
    claims, errors = _claims(recipe, model)
    aside = " leaving rules with mistakes aside," if errors else ""
    errors += _named_twice(recipe, model, claims)
    chosen = {fqn: rules[0].source for fqn, rules in claims.items() if rules}
    if recipe.rest is not None:
        chosen = {fqn: chosen.get(fqn, recipe.rest) for fqn in model.tensors}
    left = [fqn for fqn in model.tensors if fqn not in chosen]
    if left:
        errors.append(_left_open(recipe, model, left, aside))
    return Choice({fqn: chosen[fqn] for fqn in model.tensors if fqn in chosen}, tuple(errors))


def _claims(recipe: Recipe, model: Model) -> tuple[dict[str, list[Rule]], list[ConfigError]]:
    """The rules that name each parameter; and of each place in the recipe what is wrong, its rules all together."""
    claims: dict[str, list[Rule]] = {fqn: [] for fqn in model.tensors}
    wrong: dict[str, dict[str, None]] = {}
    for rule in recipe.rules:
        try:
            named = minus(rule.selection.fqns(model), rule.but, model)
        except ConfigError as error:
            wrong.setdefault(rule.where, {})[str(error)] = None
            continue
        for fqn in named:
            if all(other.where != rule.where for other in claims[fqn]):  # one entry may name it by two patterns
                claims[fqn].append(rule)
    return claims, [ConfigError(f"{where}: {listed(told, 2, '; ')}") for where, told in wrong.items()]


def _named_twice(recipe: Recipe, model: Model, claims: Mapping[str, list[Rule]]) -> list[ConfigError]:
    """One error for each pair of rules that meet."""
    by_pair: dict[tuple[str, str], list[str]] = {}
    sources: dict[tuple[str, str], tuple[str, str]] = {}
    for fqn, rules in claims.items():
        # A tied tensor has several names: naming each of them once is no mistake where they agree.
        if len(rules) < 2 or (model.tensors[fqn].aliases and len({rule.source for rule in rules}) == 1):
            continue
        pair = (rules[0].where, rules[1].where)
        by_pair.setdefault(pair, []).append(fqn)
        sources[pair] = (rules[0].source, rules[1].source)
    return [_twice(recipe, model, pair, sources[pair], fqns) for pair, fqns in by_pair.items()]


def _twice(
    recipe: Recipe, model: Model, pair: tuple[str, str], sources: tuple[str, str], fqns: list[str]
) -> ConfigError:
    tied = [fqn for fqn in fqns if model.tensors[fqn].aliases]
    why = f" ({tied[0]} is tied to {', '.join(model.tensors[tied[0]].aliases)}: one tensor)" if tied else ""
    return ConfigError(
        f"{recipe.where}: {listed(fqns)} {'is' if len(fqns) == 1 else 'are'} named twice{why}: by {pair[0]} from "
        f"{sources[0]!r} and by {pair[1]} from {sources[1]!r}; each parameter comes from one source: narrow one of the "
        "two, with `except:` for instance"
    )


def _left_open(recipe: Recipe, model: Model, left: list[str], aside: str) -> ConfigError:
    layers = listed(dict.fromkeys(model.tensors[fqn].layer for fqn in left))
    return ConfigError(
        f"{recipe.where}:{aside} it does not say where {listed(left)} {'comes' if len(left) == 1 else 'come'} from "
        f"({len(left)} of {counted(len(model.tensors), 'tensor')}, of {layers}); add a rule for it, or `rest:` with "
        "a source for all that is not named"
    )
