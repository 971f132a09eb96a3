"""Brings a checked schema of any draft into one vocabulary, with the order of its properties kept.

A node of a NormalSchema is true, false or a dict. A dict has only these keywords, with these values:

    type                                                  list of names, without duplicates
    enum                                                  list of values; not empty
    const                                                 value
    multipleOf                                            number > 0
    minimum, exclusiveMinimum, maximum, exclusiveMaximum  number (exclusive*: never true or false)
    minLength, maxLength, minItems, maxItems,
    minProperties, maxProperties                          int from 0 to LARGEST_COUNT: a larger maximum says nothing
    pattern                                               regular expression as it was sent; reads as `pattern.check` takes it
    format                                                a name in formats.KNOWN
    prefixItems                                           list of nodes; not empty
    items, contains, propertyNames, additionalProperties,
    unevaluatedItems, unevaluatedProperties, not          node
    minContains, maxContains                              the same; only beside `contains`
    uniqueItems                                           true
    required                                              list of names, without duplicates
    properties                                            name -> node, in order
    patternProperties                                     regular expression -> node
    dependentRequired                                     name -> list of names
    dependentSchemas                                      name -> node
    allOf, anyOf, oneOf                                   list of nodes; not empty
    if                                                    node; then, else only beside it
    then, else                                            node
    $ref                                                  "#" and a JSON pointer, for `NormalSchema.resolve`; what stands beside it
                                                          applies too

All of them mean what draft 2020-12 says. Everything else was an annotation, or unknown, or is not in the draft that the schema
states; assertions among the latter are listed in `NormalSchema.ignored`.
"""

from typing import Any

from trunkline.grammar.interface import Finding, Unsupported
from trunkline.grammar.schema import formats
from trunkline.grammar.schema.keywords import KEYWORDS, LARGEST_COUNT, Draft, known, token
from trunkline.grammar.schema.references import Document, Place

Schema = dict[str, Any] | bool

COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
AS_IT_IS = ("enum", "const", "multipleOf", "minimum", "maximum", "pattern")
# Keywords whose value is one schema, a list of schemas, or schemas by name, in every draft that has them.
ONE = ("contains", "propertyNames", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "not")
SEVERAL = ("prefixItems", "allOf", "anyOf", "oneOf")
MAPS = ("properties", "patternProperties", "dependentSchemas")


class NormalSchema:
    """A schema in one vocabulary (see above).

    root      where to begin
    draft     of the schema as it was sent
    ignored   keywords that assert something in other drafts than the one that the schema states, and mean nothing in it
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self._nodes: dict[str, Schema] = {}  # by the pointer of what they were made of
        self._pointers: dict[int, str] = {}  # by id() of a dict; all dicts are kept alive by _kept
        self._kept: list[dict[str, Any]] = []
        self._ignored: dict[Finding, None] = {}
        self._has_unevaluated = any(
            isinstance(node, dict) and ("unevaluatedProperties" in node or "unevaluatedItems" in node)
            for node in document.schemas.values()
        )
        self.draft = document.draft
        self.root = self._normal("")
        self._follow_all()

    @property
    def ignored(self) -> tuple[Finding, ...]:
        return tuple(self._ignored)

    def resolve(self, ref: str) -> Schema:
        """The node that a `$ref` of a node means."""
        return self._nodes[ref[1:]]

    def pointer(self, node: dict[str, Any]) -> str:
        """Where a node was in the schema as it was sent. By identity: a node that is a boolean has none of its own."""
        return self._pointers[id(node)]

    # Making nodes

    def _follow_all(self) -> None:
        """Whatever is referred to is made now, so that `resolve` only looks it up, and errors come early."""
        at = 0
        while at < len(self._kept):
            ref = self._kept[at].get("$ref")
            if ref is not None and ref[1:] not in self._nodes:
                self._normal(ref[1:])
            at += 1

    def _normal(self, pointer: str) -> Schema:
        """The node for the schema at a place; each is made once."""
        if pointer in self._nodes:
            return self._nodes[pointer]
        schema = self._document.schemas[pointer]
        if isinstance(schema, bool):
            self._nodes[pointer] = schema
            return schema
        node = self._new_node(pointer)
        self._nodes[pointer] = node
        self._fill(node, schema, self._document.places[pointer])
        return node

    def _new_node(self, pointer: str) -> dict[str, Any]:
        node: dict[str, Any] = {}
        self._kept.append(node)
        self._pointers[id(node)] = pointer
        return node

    def _fill(self, node: dict[str, Any], schema: dict[str, Any], place: Place) -> None:
        pointer, draft = place.pointer, place.draft
        refs = [
            keyword
            for keyword in ("$ref", "$dynamicRef", "$recursiveRef")
            if (pointer, keyword) in self._document.targets
        ]
        targets = ["#" + self._document.static_target(pointer, keyword) for keyword in refs]
        if targets:
            node["$ref"] = targets[0]
        if draft.ignores_ref_siblings and refs:
            self._ignore(schema, place, beside_ref=True)
            return
        self._ignore(schema, place, beside_ref=False)
        schema = {name: value for name, value in schema.items() if known(name, draft)}
        for name, value in schema.items():
            step = pointer + token(name)
            if name in AS_IT_IS:
                node[name] = value
            elif name in COUNTS and value <= LARGEST_COUNT:
                node[name] = int(value)
            elif name in ONE:
                node[name] = self._normal(step)
            elif name in SEVERAL:
                node[name] = [self._normal(step + token(index)) for index in range(len(value))]
            elif name in MAPS:
                node[name] = {key: self._normal(step + token(key)) for key in value}
            elif name == "type":
                node["type"] = list(dict.fromkeys([value] if isinstance(value, str) else value))
            elif name == "required":
                node["required"] = list(dict.fromkeys(value))
            elif name == "dependentRequired":
                node["dependentRequired"] = {key: list(dict.fromkeys(names)) for key, names in value.items()}
            elif name == "format" and value in formats.KNOWN:
                node["format"] = value
            elif name == "uniqueItems" and value:
                node["uniqueItems"] = True
        self._fill_bounds(node, schema)
        self._fill_items(node, schema, place)
        self._fill_conditions(node, schema, pointer)
        if "dependencies" in schema:
            self._fill_dependencies(node, schema["dependencies"], pointer)
        for target in targets[1:]:
            inner = self._new_node(pointer)
            inner["$ref"] = target
            node.setdefault("allOf", []).append(inner)

    def _fill_bounds(self, node: dict[str, Any], schema: dict[str, Any]) -> None:
        """Draft 4 has flags that say whether `minimum` and `maximum` are themselves left out."""
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            value = schema.get(exclusive, False)
            if not isinstance(value, bool):
                node[exclusive] = value
            elif value and bound in node:
                node[exclusive] = node.pop(bound)

    def _fill_items(self, node: dict[str, Any], schema: dict[str, Any], place: Place) -> None:
        """Up to 2019-09 a list as `items` meant the first items, and `additionalItems` those after them."""
        step = place.pointer + token("items")
        items = schema.get("items")
        if isinstance(items, list):
            if items and "prefixItems" not in node:
                node["prefixItems"] = [self._normal(step + token(index)) for index in range(len(items))]
            if "additionalItems" in schema:
                node["items"] = self._normal(place.pointer + token("additionalItems"))
        elif items is not None:
            node["items"] = self._normal(step)
        if "contains" in node:
            for name in ("minContains", "maxContains"):
                if name in schema and schema[name] <= LARGEST_COUNT:
                    node[name] = int(schema[name])
        if place.draft is Draft.DRAFT_2019_09 and self._has_unevaluated and "contains" in node:
            reason = (
                "in draft 2019-09 it does not count for unevaluatedItems, as it does since 2020-12; state that draft"
            )
            raise Unsupported(place.pointer, "contains", reason)

    def _fill_conditions(self, node: dict[str, Any], schema: dict[str, Any], pointer: str) -> None:
        """`if` alone asserts nothing, but what it looks at counts as evaluated."""
        if "if" in schema and ("then" in schema or "else" in schema or self._has_unevaluated):
            for name in ("if", "then", "else"):
                if name in schema:
                    node[name] = self._normal(pointer + token(name))

    def _fill_dependencies(self, node: dict[str, Any], dependencies: dict[str, Any], pointer: str) -> None:
        """`dependencies` of drafts up to 7 became two keywords."""
        for key, value in dependencies.items():
            if isinstance(value, list):
                names = node.setdefault("dependentRequired", {}).get(key, [])
                node["dependentRequired"][key] = list(dict.fromkeys([*names, *value]))
                continue
            one = self._normal(pointer + token("dependencies") + token(key))
            schemas = node.setdefault("dependentSchemas", {})
            if key in schemas:
                both = self._new_node(pointer + token("dependencies") + token(key))
                both["allOf"] = [schemas[key], one]
                one = both
            schemas[key] = one

    def _ignore(self, schema: dict[str, Any], place: Place, *, beside_ref: bool) -> None:
        for name in schema:
            keyword = KEYWORDS.get(name)
            if keyword is None or not keyword.is_assertion:
                continue
            if beside_ref and name != "$ref":
                reason = "it means nothing beside $ref in the draft that the schema states"
            elif not known(name, place.draft):
                reason = "it is not in the draft that the schema states"
            else:
                continue
            self._ignored[Finding(place.pointer, name, reason)] = None


def normalize(schema: Schema) -> NormalSchema:
    """Of a schema that `meta.check` gave. Raises Unsupported for $dynamicRef and $recursiveRef that are truly dynamic."""
    return NormalSchema(Document(schema))
