"""Objects of a case: many layers become one list of properties, patterns, and the rest. For `canonical`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from trunkline.grammar.algebra.cases import Layer, ObjectCase, Somewhere
from trunkline.grammar.algebra.expansion import Expansion
from trunkline.grammar.algebra.members import is_meant
from trunkline.grammar.algebra.nodes import ALWAYS, IMPOSSIBLE, Conjunction, conjoin
from trunkline.grammar.algebra.patterns import Patterns
from trunkline.grammar.interface import Finding

MOST_OUTSIDE = 3  # names whose every combination is followed to say "and one more"


@dataclass(frozen=True, slots=True)
class Flat:
    """What a case asks of its properties; as forms.Objects, with conjunctions."""

    properties: dict[str, Conjunction]
    patterns: tuple[tuple[str, Conjunction], ...]
    additional: Conjunction
    blocked: tuple[Finding, ...]


def flatten(case: ObjectCase, patterns: Patterns) -> Flat:
    """All layers in one. Properties keep the order in which the layers name them; those only required come last."""
    layers, blocked = case.layers, []
    names = dict.fromkeys(name for layer in layers for name in layer.properties)
    names.update(dict.fromkeys(case.required))
    properties = {name: patterns.under(layers, name) for name in names}
    matched: dict[str, Conjunction] = {}
    for source in dict.fromkeys(source for layer in layers for source, _ in layer.patterns):
        what = ALWAYS
        for layer in layers:
            asked, is_sure = _of_pattern(source, layer, patterns)
            what = conjoin(what, asked)
            if not is_sure and asked is IMPOSSIBLE:
                reason = f"which names are allowed depends on {source!r} and another pattern at once"
                blocked.append(Finding(case.pointer, "patternProperties", reason))
        matched[source] = what
    additional = ALWAYS
    for layer in layers:
        additional = conjoin(additional, layer.additional)
    if additional is ALWAYS or additional is IMPOSSIBLE:  # then a pattern that asks for just that says nothing
        alike = [source for source, what in matched.items() if what is additional]
        if additional is ALWAYS or len(alike) == len(matched):
            matched = {source: what for source, what in matched.items() if source not in alike}
    return Flat(properties, tuple(matched.items()), additional, tuple(blocked))


def _of_pattern(source: str, layer: Layer, patterns: Patterns) -> tuple[Conjunction, bool]:
    """What a layer asks of a property that is found by `source` and named nowhere, beyond what its own patterns ask; and whether
    it asks this of every such property, or perhaps only of some."""
    for own, what in layer.patterns:
        if own == source:
            return what, True
    if layer.additional is ALWAYS or any(patterns.is_within(source, own) for own, _ in layer.patterns):
        return ALWAYS, True
    return layer.additional, all(patterns.are_disjoint(source, own) for own, _ in layer.patterns)


def without_somewhere(case: ObjectCase, expansion: Expansion) -> Iterator[ObjectCase]:
    """The case as several that say which property it is that must be somewhere. What remains unsaid is blocked."""
    patterns, holds = expansion.patterns, expansion.evaluator.holds
    if not case.somewhere:
        yield case
        return
    one, rest = case.somewhere[0], replace(case, somewhere=case.somewhere[1:])
    flat = flatten(rest, patterns)
    is_closed = flat.additional is IMPOSSIBLE and all(what is IMPOSSIBLE for _, what in flat.patterns)
    possible = [name for name, what in flat.properties.items() if what is not IMPOSSIBLE]
    listed = expansion.listed(one.name)
    if listed is not None:
        is_closed, possible = True, [name for name in listed if isinstance(name, str)]
    ways = []
    if not is_closed and one.value is ALWAYS and _is_any_other(one):
        outside = [name for name in one.outside if patterns.under(rest.layers, name) is not IMPOSSIBLE]
        ways += list(_one_more(rest, outside))
    if not ways:
        ways += [
            rest & ObjectCase(layers=(Layer({name: one.value}),), required=(name,))
            for name in possible
            if is_meant(one, name, holds, patterns)
        ]
        if not is_closed:
            ways.append(replace(rest, blocked=(*rest.blocked, one.finding)))
    for way in ways:
        yield from without_somewhere(way, expansion)


def _is_any_other(one: Somewhere) -> bool:
    return one.pattern is None and not one.not_patterns and one.name is ALWAYS


def _one_more(case: ObjectCase, outside: list[str]) -> Iterator[ObjectCase]:
    """Some property that is not one of `outside`: whichever of those are there, there is at least one more."""
    if len(outside) > MOST_OUTSIDE:
        return
    for count in range(len(outside) + 1):
        for there in combinations(outside, count):
            not_there = {name: IMPOSSIBLE for name in outside if name not in there}
            if not_there.keys() & set(case.required):
                continue
            layers = (Layer(not_there),) if not_there else ()
            way = case & ObjectCase(layers=layers, required=there, min_properties=count + 1)
            if not way.is_empty:
                yield way
