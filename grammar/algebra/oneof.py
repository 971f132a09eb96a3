"""`oneOf`: exactly one holds. (A, and no other) or (B, and no other) or …; but branches that can't both hold need no "no other"."""

import json
from collections.abc import Hashable
from typing import Any, NamedTuple

from trunkline.grammar.algebra.cases import Case
from trunkline.grammar.algebra.expansion import Expansion, kinds_of, listed_values, present
from trunkline.grammar.algebra.nodes import Conjunction
from trunkline.grammar.interface import Unsupported
from trunkline.grammar.schema import values
from trunkline.grammar.schema.normalize import Schema


class Tags(NamedTuple):
    """By which a case is told from others at a glance.

    kinds   of its values
    lists   required property -> keys of the values that it may have, where they are listed
    listed  keys of its values, where they are listed
    """

    kinds: frozenset[str]
    lists: dict[str, frozenset[Hashable]]
    listed: frozenset[Hashable] | None = None


WORK_OF_A_PAIR = 2  # of branches: there are many pairs of them


def exactly_one(expansion: Expansion, content: dict[str, Any], pointer: str) -> list[Case]:
    """The alternatives of a `oneOf`. Raises Unsupported."""
    branches = content["oneOf"]
    cases_of = [expansion.of(branch) for branch in branches]
    try:
        return _each_without_others(expansion, branches, cases_of, pointer)
    except Unsupported:
        tagged = _told_by_a_property(expansion, cases_of, pointer)
        if tagged is None:
            raise
        return tagged


def _each_without_others(
    expansion: Expansion, branches: list[Schema], cases_of: list[list[Case]], pointer: str
) -> list[Case]:
    tags_of = [[_tags(expansion, case) for case in cases] for cases in cases_of]
    is_certain = _is_certain(expansion)  # else that two cases have nothing in common proves nothing
    kinds = [frozenset(values.KINDS) if isinstance(branch, bool) else kinds_of(branch) for branch in branches]
    meets: list[list[int]] = [[] for _ in branches]
    for one in range(len(branches)):
        for other in range(one):
            expansion.spend(WORK_OF_A_PAIR, pointer, "oneOf")
            if not kinds[one] & kinds[other]:
                continue
            if not is_certain or _may_meet(
                expansion, cases_of[one], tags_of[one], cases_of[other], tags_of[other], pointer
            ):
                meets[one].append(other)
                meets[other].append(one)
    result: list[Case] = []
    for one, cases in enumerate(cases_of):
        for other in meets[one]:
            if not cases:
                break
            cases = expansion.product(cases, expansion.of(branches[other], holds=False), pointer, "oneOf")
        result = expansion.bounded(expansion.union(result + cases), pointer, "oneOf")
    return result


def _told_by_a_property(expansion: Expansion, cases_of: list[list[Case]], pointer: str) -> list[Case] | None:
    """Where a property tells the branches from each other, but need not be there: the values in which it is. That is less than
    the schema allows, and what everyone writes who means it."""
    if not _is_certain(expansion):
        return None
    every = [case for cases in cases_of for case in cases]
    if any(case.values is not None or case.kinds != {values.OBJECT} for case in every):
        return None
    for name in dict.fromkeys(name for case in every for layer in case.object.layers for name in layer.properties):
        if any(_listed(expansion, expansion.patterns.under(case.object.layers, name)) is None for case in every):
            continue
        named = [expansion.product(cases, [present([name], pointer)], pointer, "oneOf") for cases in cases_of]
        if not any(
            expansion.both(case, other, pointer, "oneOf")
            for one, cases in enumerate(named)
            for case in cases
            for others in cases_of[:one] + cases_of[one + 1 :]
            for other in others
        ):
            return expansion.bounded(expansion.union(case for cases in named for case in cases), pointer, "oneOf")
    return None


def _is_certain(expansion: Expansion) -> bool:
    """Whether cases stand for all values of their branch. Where something was in doubt they may stand for less."""
    return not (expansion.nodes.has_unevaluated or expansion.patterns.doubted)


def _may_meet(
    expansion: Expansion,
    left: list[Case],
    left_tags: list[Tags],
    right: list[Case],
    right_tags: list[Tags],
    pointer: str,
) -> bool:
    return any(
        not _differ(tags, other_tags) and expansion.both(case, other, pointer, "oneOf") is not None
        for case, tags in zip(left, left_tags, strict=True)
        for other, other_tags in zip(right, right_tags, strict=True)
    )


def _differ(left: Tags, right: Tags) -> bool:
    common = left.kinds & right.kinds
    if not common:
        return True
    if left.listed is not None and right.listed is not None:
        return not left.listed & right.listed
    if common != {values.OBJECT}:
        return False
    return any(name in right.lists and not listed & right.lists[name] for name, listed in left.lists.items())


def _tags(expansion: Expansion, case: Case) -> Tags:
    if case.values is not None:
        own = [json.loads(text) for text in case.values]
        return Tags(frozenset(map(values.kind, own)), {}, frozenset(map(values.key, own)))
    lists = {}
    for name in case.object.required:
        listed = _listed(expansion, expansion.patterns.under(case.object.layers, name))
        if listed is not None:
            lists[name] = listed
    return Tags(case.kinds, lists)


def _listed(expansion: Expansion, conjunction: Conjunction) -> frozenset[Hashable] | None:
    for number, holds in conjunction:
        if holds and number >= 0 and (listed := listed_values(expansion.nodes.content(number))) is not None:
            return frozenset(values.key(value) for value in listed)
    return None
