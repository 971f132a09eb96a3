"""`propertyNames` as layers: what names may be, said by patterns, and by properties that must not be there."""

import json

from trunkline.grammar.algebra.cases import Layer, StringCase
from trunkline.grammar.algebra.expansion import Expansion
from trunkline.grammar.algebra.nodes import ALWAYS, IMPOSSIBLE, Conjunction
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.regex import pattern
from trunkline.grammar.schema import values
from trunkline.grammar.schema.formats import KNOWN

KEYWORD = "propertyNames"
ANY_CHARACTER = pattern.normalize(r"[\s\S]")


def name_layers(expansion: Expansion, names: Conjunction, pointer: str) -> list[Layer]:
    """Layers that allow exactly the properties whose name satisfies `names`. Raises Unsupported."""
    listed: list[str] = []
    ways: list[StringCase] = []
    try:
        cases = expansion.cases(names)
    except InvalidSchema:  # names that are described by what describes them
        raise Unsupported(pointer, KEYWORD, "it leads back to itself") from None
    for case in cases:
        if case.values is not None:
            listed += [value for text in case.values if isinstance(value := json.loads(text), str)]
        elif values.STRING in case.kinds:
            expansion.refuse(*case.string.blocked)
            ways.append(case.string)
    if not ways:
        return [Layer(dict.fromkeys(listed, ALWAYS), additional=IMPOSSIBLE)]
    if len(ways) == 1 and not listed:
        return _layers(ways[0])
    # Several ways: each must be one expression, and none may forbid anything; then any of the expressions will do.
    sought = []
    for way in ways:
        found, forbidden = _expressions(way)
        if way.excluded or forbidden or len(found) > 1:
            raise Unsupported(pointer, KEYWORD, "names that are described in several ways can't be enforced")
        if not found:
            return []
        sought.append(found[0])
    return [Layer(dict.fromkeys(listed, ALWAYS), tuple((one, ALWAYS) for one in sought), IMPOSSIBLE)]


def _layers(way: StringCase) -> list[Layer]:
    found, forbidden = _expressions(way)
    layers = [Layer(patterns=((one, ALWAYS),), additional=IMPOSSIBLE) for one in found]
    layers += [Layer(patterns=((one, IMPOSSIBLE),)) for one in forbidden]
    return layers + ([Layer(dict.fromkeys(way.excluded, IMPOSSIBLE))] if way.excluded else [])


def _expressions(way: StringCase) -> tuple[list[str], list[str]]:
    """Expressions that must be found, and that must not be: lengths are expressions too."""
    found = [*way.patterns, *(KNOWN[name] for name in way.formats)]
    forbidden = list(way.not_patterns)
    least, most = way.min_length, way.max_length
    if found:  # one expression to look for is enough: what is too short or too long is forbidden
        forbidden += [f"^{ANY_CHARACTER}{{0,{least - 1}}}$"] if least else []
        forbidden += [f"^{ANY_CHARACTER}{{{most + 1},}}"] if most is not None else []
    elif least or most is not None:
        found = [f"^{ANY_CHARACTER}{{{least},{'' if most is None else most}}}$"]
    return found, forbidden
