"""Random schemas and values for property tests, and short ways from a schema to its forms. All keywords, few names, small numbers."""

import json
from typing import Any

from hypothesis import strategies as st

from trunkline.grammar.algebra.canonical import Canonical, canonicalize
from trunkline.grammar.schema import meta
from trunkline.grammar.schema.forms import ANY, NEVER, Arrays, Form, Forms, Objects, Values
from trunkline.grammar.schema.normalize import normalize
from trunkline.grammar.schema.values import key as json_key

NAMES = ("a", "b", "c", "ab")
TYPES = ("string", "integer", "number", "object", "array", "boolean", "null")


def canonical(schema: Any, *, lenient: bool = False) -> Canonical:
    return canonicalize(normalize(meta.check(json.dumps(schema))), lenient=lenient)


def forms_of(schema: Any) -> Forms:
    return canonical(schema).forms


def root_of(schema: Any) -> tuple[Form, ...]:
    """The alternatives of the whole schema."""
    forms = forms_of(schema)
    return forms.definitions[forms.root]


def only(schema: Any) -> Any:
    """The one alternative of the whole schema."""
    (form,) = root_of(schema)
    return form


def check_form(forms: Forms) -> None:
    """What forms.py promises of the shape of forms."""
    known = {ANY, NEVER, *forms.definitions}
    assert forms.root in known and not {ANY, NEVER} & forms.definitions.keys()
    for alternatives in forms.definitions.values():
        assert alternatives
        for form in alternatives:
            match form:
                case Values():
                    keys = [json_key(json.loads(text)) for text in form.values]
                    assert keys and len(set(keys)) == len(keys)
                case Arrays():
                    assert {*form.prefix, form.rest, *(one.item for one in form.contains)} <= known
                    assert NEVER not in form.prefix
                case Objects():
                    named = dict(form.properties)
                    assert len(named) == len(form.properties) and form.required <= named.keys()
                    assert {*named.values(), form.additional, *dict(form.patterns).values()} <= known
                    assert not any(named[name] == NEVER for name in form.required)


SCALARS = st.sampled_from([None, True, False, 0, 1, 2, 3, -1, 1.5, 1.0, "", "a", "b", "ab", "abc"])


def values(depth: int = 2) -> st.SearchStrategy[Any]:
    """JSON values that have a chance to be valid under `schemas`."""
    if not depth:
        return SCALARS
    inner = values(depth - 1)
    return st.one_of(
        SCALARS,
        SCALARS,
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    )


LEAVES: tuple[Any, ...] = (
    True,
    False,
    {},
    {"type": "string"},
    {"type": "null"},
    {"minimum": 2},
    {"const": "a"},
    {"enum": ["a", 1, [1]]},
    {"$ref": "#/$defs/d"},
    {"$ref": "#"},
)
# Of these the algebra knows the exact meaning and the exact opposite ("integer" has none).
EXACT = frozenset(
    (
        *("type", "const", "enum", "minLength", "maxLength", "pattern", "allOf", "anyOf", "not", "if", "then", "else"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "properties", "required"),
        *("minProperties", "maxProperties", "prefixItems", "minItems", "maxItems"),
    )
)


def schemas(depth: int = 3, *, exact: bool = False) -> st.SearchStrategy[Any]:
    """Schemas of every keyword but format, or of those in EXACT; `$ref` leads to "#/$defs/d", or back to "#"."""
    leaves: st.SearchStrategy[Any] = st.sampled_from(LEAVES)
    if not depth:
        return leaves
    inner = schemas(depth - 1, exact=exact)
    types = st.sampled_from([name for name in TYPES if not (exact and name == "integer")])
    names, several = st.sampled_from(NAMES), st.lists(inner, min_size=1, max_size=3)
    count, some = st.integers(0, 3), st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)
    bound = st.sampled_from([0, 1, 1.5, 2, 3])
    pattern = st.sampled_from(["^a", "b$", "^[ab]*$", "c", "^a$"])
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.one_of(types, st.lists(types, min_size=1, max_size=3, unique=True)),
        "const": values(),
        "enum": st.lists(values(), min_size=1, max_size=4),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), count),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), bound),
        "multipleOf": st.sampled_from([1, 2, 0.5, 3]),
        "pattern": pattern,
        "properties": st.dictionaries(names, inner, min_size=1, max_size=3),
        "patternProperties": st.dictionaries(pattern, inner, min_size=1, max_size=2),
        "additionalProperties": st.one_of(st.just(False), inner),
        "propertyNames": st.one_of(st.just({"pattern": "^a"}), st.just({"maxLength": 1}), inner),
        "unevaluatedProperties": st.one_of(st.just(False), inner),
        "required": some,
        "dependentRequired": st.dictionaries(names, some, min_size=1, max_size=2),
        "dependentSchemas": st.dictionaries(names, inner, min_size=1, max_size=2),
        "prefixItems": several,
        "items": inner,
        "unevaluatedItems": st.one_of(st.just(False), inner),
        "uniqueItems": st.just(True),
        "contains": inner,
        "minContains": count,
        "maxContains": count,
        "allOf": several,
        "anyOf": several,
        "oneOf": several,
        **dict.fromkeys(("not", "if", "then", "else"), inner),
    }
    names_of_keywords = sorted(EXACT if exact else keywords)
    chosen = st.lists(st.sampled_from(names_of_keywords), min_size=1, max_size=4, unique=True)
    made = chosen.flatmap(lambda some: st.fixed_dictionaries({name: keywords[name] for name in some}))
    return st.one_of(leaves, made, made, made, made)


def rooted(schema: Any, definition: Any) -> dict[str, Any]:
    """With what `$ref` leads to."""
    return (schema if isinstance(schema, dict) else {"allOf": [schema]}) | {"$defs": {"d": definition}}
