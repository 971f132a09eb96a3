"""The parts of a schema, by number: what the algebra combines. What a keyword means is not known here.

A literal is a subschema that must hold, or must not. A conjunction is a set of literals: all of them must be so. A
definition of the canonical form is the meaning of one conjunction, and there are finitely many, since a schema has finitely
many parts. This is what ends the expansion of a schema that leads to itself:

    node 4 = {"properties": {"next": {"$ref": "#"}}, "not": {"required": ["x"]}}
    {(4, holds)}, {(7, does not hold)}, {(4, holds), (7, does not hold)}, …

Parts with the same content are one node, and whatever says nothing of its own is looked through: {"$ref": …} is its target,
{"not": …} the opposite literal, {"allOf": [A, B]} two literals.
"""

from collections.abc import Hashable, Iterator
from typing import Any

from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.schema.normalize import MAPS, ONE, SEVERAL, NormalSchema, Schema

Literal = tuple[int, bool]  # number of a node; True: it holds, False: it does not
Conjunction = frozenset[Literal]

ALWAYS: Conjunction = frozenset()
IMPOSSIBLE: Conjunction = frozenset({(-1, True)})

SINGLE = (*ONE, "items", "if", "then", "else")
PLAIN = (
    *("$ref", "type", "const", "enum"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minItems", "maxItems", "uniqueItems", "minContains", "maxContains"),
    *("minProperties", "maxProperties", "required", "dependentRequired"),
)
KEYWORDS = frozenset((*SINGLE, *SEVERAL, *MAPS, *PLAIN))

MOST_NESTED = 100  # allOf in allOf
MOST_HOPS = 200  # from a subschema that says nothing of its own to the next


def parts(node: dict[str, Any]) -> Iterator[Schema]:
    """The subschemas that stand directly in a subschema."""
    for keyword in SINGLE:
        if keyword in node:
            yield node[keyword]
    for keyword in SEVERAL:
        yield from node.get(keyword, ())
    for keyword in MAPS:
        yield from node.get(keyword, {}).values()


def conjoin(left: Conjunction, right: Conjunction) -> Conjunction:
    """Both; IMPOSSIBLE if one holds what the other denies."""
    if not left or not right or left == right:
        return left or right
    if left is IMPOSSIBLE or right is IMPOSSIBLE:
        return IMPOSSIBLE
    few, many = (left, right) if len(left) < len(right) else (right, left)
    if any((node, not holds) in many for node, holds in few):
        return IMPOSSIBLE
    return left | right


class Nodes:
    """The numbered parts of one schema.

    nodes = Nodes(normalize(schema))
    root = nodes.literal(nodes.schema.root)
    """

    def __init__(self, schema: NormalSchema) -> None:
        self.schema = schema
        self.has_unevaluated = _has_unevaluated(schema)
        self._depth = 0
        self._content: list[dict[str, Any]] = []
        self._pointers: list[str] = []
        self._number_of: dict[Hashable, int] = {}  # by content
        self._shapes: dict[Hashable, int] = {}  # content, one level deep -> its number
        self._known: dict[int, int] = {}  # id() of a list or a mapping -> the number of its content
        self._kept: list[Any] = []  # so that no id() above is used twice
        self._made: dict[int, str] = {}  # id() of a subschema that we made -> the pointer it stands for
        self._joined: dict[
            int, tuple[dict[str, Any], Conjunction]
        ] = {}  # id() of an allOf -> itself, and what it means

    def literal(self, schema: Schema, holds: bool = True) -> Conjunction:
        """What it takes for `schema` to hold, or not to."""
        last: dict[str, Any] = {}
        for _ in range(MOST_HOPS):
            if isinstance(schema, bool):
                return ALWAYS if schema == holds else IMPOSSIBLE
            last = schema
            said = [name for name in schema if name in KEYWORDS]
            if not said:
                return ALWAYS if holds else IMPOSSIBLE
            only = said[0] if len(said) == 1 else None
            if only == "$ref":
                schema = self.schema.resolve(schema["$ref"])
            elif only == "not" and not self.has_unevaluated:  # what is denied evaluates nothing, even denied twice
                schema, holds = schema["not"], not holds
            elif only in ("allOf", "anyOf", "oneOf") and len(schema[only]) == 1:
                schema = schema[only][0]
            elif only == "allOf" and holds:
                return self._all(schema)
            else:
                return frozenset({(self._number(schema), holds)})
        raise InvalidSchema(self.pointer(last), "$ref", "it leads on and on without saying anything")

    def _all(self, schema: dict[str, Any]) -> Conjunction:
        """Of an allOf. Each is looked at once: where two members lead to the next allOf, and so on, ways to it double."""
        known = self._joined.get(id(schema))
        if known is not None:
            return known[1]
        if self._depth >= MOST_NESTED:
            raise Unsupported(self.pointer(schema), "allOf", f"it is nested deeper than {MOST_NESTED} levels")
        self._depth += 1
        try:
            result = ALWAYS
            for member in schema["allOf"]:
                result = conjoin(result, self.literal(member))
            self._joined[id(schema)] = (schema, result)
            return result
        finally:
            self._depth -= 1

    def content(self, number: int) -> dict[str, Any]:
        """The subschema of that number. Only what is in KEYWORDS means anything."""
        return self._content[number]

    def where(self, number: int) -> str:
        """Its JSON pointer in the schema as it was sent; of the first one, if there are several alike."""
        return self._pointers[number]

    def pointer(self, schema: dict[str, Any]) -> str:
        """The same for a subschema."""
        made = self._made.get(id(schema))
        return made if made is not None else self.schema.pointer(schema)

    def make(self, schema: dict[str, Any], pointer: str) -> dict[str, Any]:
        """A subschema that was not sent, but follows from what stands at `pointer`."""
        self._kept.append(schema)
        self._made[id(schema)] = pointer
        return schema

    def schema_of(self, conjunction: Conjunction) -> Schema:
        """A subschema that means the same."""
        if not conjunction:
            return True
        pointer = self._pointers[min(conjunction)[0]]
        parts = [
            self._content[number] if holds else self.make({"not": self._content[number]}, pointer)
            for number, holds in sorted(conjunction)
        ]
        return self.make({"allOf": parts}, pointer)

    def _number(self, schema: dict[str, Any]) -> int:
        content = self._contents(schema)
        number = self._number_of.get(content)
        if number is None:
            number = self._number_of[content] = len(self._content)
            self._content.append(schema)
            self._pointers.append(self.pointer(schema))
        return number

    def _contents(self, value: Any) -> Hashable:
        """Equal for values that are spelled alike. Each is looked at once: what it holds is already a number."""
        if not isinstance(value, dict | list):
            return (type(value), value)
        found = self._known.get(id(value))
        if found is None:
            inner = (
                (list, *(self._contents(item) for item in value))
                if isinstance(value, list)
                else (dict, *((name, self._contents(member)) for name, member in value.items()))
            )
            found = self._known[id(value)] = self._shapes.setdefault(inner, len(self._shapes))
        return found


def _has_unevaluated(schema: NormalSchema) -> bool:
    """Whether unevaluatedProperties or unevaluatedItems is anywhere."""
    seen: set[int] = set()
    waiting = [schema.root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, bool) or id(node) in seen:
            continue
        seen.add(id(node))
        if "unevaluatedProperties" in node or "unevaluatedItems" in node:
            return True
        waiting.extend(parts(node))
        if "$ref" in node:
            waiting.append(schema.resolve(node["$ref"]))
    return False
