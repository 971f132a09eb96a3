"""The keywords of JSON Schema: in which drafts there are, what their values must be, and where schemas stand inside of them.

Draft 4 to 2020-12, as json-schema.org's meta-schemas say. A schema that does not state its draft (`$schema`) is read as 2020-12 with
what older drafts had and 2020-12 has not: lists as `items`, true and false as `exclusiveMinimum`, `dependencies`. Nothing of
a value's meaning is known here.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple


class Draft(IntEnum):
    """In order of age; UNSTATED is after all."""

    DRAFT_4 = 4
    DRAFT_6 = 6
    DRAFT_7 = 7
    DRAFT_2019_09 = 8
    DRAFT_2020_12 = 9
    UNSTATED = 10

    @property
    def ignores_ref_siblings(self) -> bool:
        """Whether nothing beside `$ref` counts."""
        return self <= Draft.DRAFT_7

    @property
    def id_keyword(self) -> str:
        """What gives a schema its URI."""
        return "id" if self is Draft.DRAFT_4 else "$id"


URIS = {
    "json-schema.org/draft-04/schema": Draft.DRAFT_4,
    "json-schema.org/draft-06/schema": Draft.DRAFT_6,
    "json-schema.org/draft-07/schema": Draft.DRAFT_7,
    "json-schema.org/draft/2019-09/schema": Draft.DRAFT_2019_09,
    "json-schema.org/draft/2020-12/schema": Draft.DRAFT_2020_12,
}
TOO_OLD = tuple(f"json-schema.org/draft-0{number}/" for number in (0, 1, 2, 3))


def draft_of(schema: Any, inherited: Draft = Draft.UNSTATED) -> Draft:
    """What `$schema` says. Other URIs than the known ones are read as 2020-12; without one, what is inherited."""
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(uri, str):
        return inherited
    return URIS.get(uri.removesuffix("#").partition("://")[2], Draft.DRAFT_2020_12)


LARGEST_COUNT = 2**30  # of characters, items, properties: no text has so many, and libraries count in 32 bits


class Keyword(NamedTuple):
    """value: one of the kinds that `meta` checks. since, until: drafts that have it."""

    value: str
    since: Draft = Draft.DRAFT_4
    until: Draft = Draft.UNSTATED
    is_assertion: bool = True


_4, _6, _7, _2019, _2020 = Draft.DRAFT_4, Draft.DRAFT_6, Draft.DRAFT_7, Draft.DRAFT_2019_09, Draft.DRAFT_2020_12

KEYWORDS: dict[str, Keyword] = {
    "$schema": Keyword("uri", is_assertion=False),
    "$id": Keyword("uri", since=_6, is_assertion=False),
    "$anchor": Keyword("name", since=_2019, is_assertion=False),
    "$dynamicAnchor": Keyword("name", since=_2020, is_assertion=False),
    "$ref": Keyword("uri"),
    "$dynamicRef": Keyword("uri", since=_2020),
    "$recursiveRef": Keyword("uri", since=_2019),
    "$recursiveAnchor": Keyword("boolean", since=_2019, is_assertion=False),
    "$defs": Keyword("schema map", since=_2019, is_assertion=False),
    "definitions": Keyword("schema map", is_assertion=False),
    "type": Keyword("types"),
    "enum": Keyword("values"),
    "const": Keyword("value", since=_6),
    "multipleOf": Keyword("positive number"),
    "maximum": Keyword("number"),
    "exclusiveMaximum": Keyword("bound"),
    "minimum": Keyword("number"),
    "exclusiveMinimum": Keyword("bound"),
    "maxLength": Keyword("count"),
    "minLength": Keyword("count"),
    "pattern": Keyword("pattern"),
    "format": Keyword("text"),
    "prefixItems": Keyword("schemas", since=_2020),
    "items": Keyword("items"),
    "additionalItems": Keyword("schema"),
    "contains": Keyword("schema", since=_6),
    "maxContains": Keyword("count", since=_2019),
    "minContains": Keyword("count", since=_2019),
    "maxItems": Keyword("count"),
    "minItems": Keyword("count"),
    "uniqueItems": Keyword("boolean"),
    "unevaluatedItems": Keyword("schema", since=_2019),
    "maxProperties": Keyword("count"),
    "minProperties": Keyword("count"),
    "required": Keyword("names"),
    "properties": Keyword("schema map"),
    "patternProperties": Keyword("pattern map"),
    "additionalProperties": Keyword("schema"),
    "propertyNames": Keyword("schema", since=_6),
    "dependencies": Keyword("dependencies"),
    "dependentRequired": Keyword("names map", since=_2019),
    "dependentSchemas": Keyword("schema map", since=_2019),
    "unevaluatedProperties": Keyword("schema", since=_2019),
    "allOf": Keyword("schemas"),
    "anyOf": Keyword("schemas"),
    "oneOf": Keyword("schemas"),
    "not": Keyword("schema"),
    "if": Keyword("schema", since=_7),
    "then": Keyword("schema", since=_7),
    "else": Keyword("schema", since=_7),
}
# Gone from later drafts. (That `dependencies` is still in the meta-schema of 2019-09 is for tools; it means nothing there.)
GONE: dict[str, tuple[Draft, ...]] = {
    "additionalItems": (_2020,),
    "dependencies": (_2019, _2020),
    "$recursiveRef": (_2020,),
    "$recursiveAnchor": (_2020,),
}
# Applied to the same value as the schema they stand in.
IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")


def known(name: str, draft: Draft) -> Keyword | None:
    """The keyword, if that draft has it."""
    keyword = KEYWORDS.get(name)
    if keyword is None or not keyword.since <= draft <= keyword.until or draft in GONE.get(name, ()):
        return None
    return keyword


def token(part: str | int) -> str:
    """A step of a JSON pointer (RFC 6901)."""
    return "/" + str(part).replace("~", "~0").replace("/", "~1")


def beside_ref(node: dict[str, Any], draft: Draft) -> tuple[str, ...] | None:
    """The keywords that count in a schema with `$ref`; None if all do. Definitions assert nothing, and are often meant by it."""
    return ("$ref", "definitions") if draft.ignores_ref_siblings and "$ref" in node else None


def subschemas(node: dict[str, Any], draft: Draft) -> Iterator[tuple[str, str, Any]]:
    """(keyword, pointer from the node, schema) for each schema right inside of a node whose keywords have proper values."""
    names = beside_ref(node, draft)
    for name, value in node.items():
        keyword = known(name, draft) if names is None or name in names else None
        kind = keyword.value if keyword else ""
        if kind == "schema" or (kind == "items" and not isinstance(value, list)):
            yield name, token(name), value
        elif kind in ("schemas", "items"):
            for index, item in enumerate(value):
                yield name, token(name) + token(index), item
        elif kind in ("schema map", "pattern map", "dependencies"):
            for key, item in value.items():
                if kind != "dependencies" or not isinstance(item, list):
                    yield name, token(name) + token(key), item
