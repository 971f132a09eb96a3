"""Whether a value is valid under forms: what the forms mean, said a second time, as plainly as possible.

For tests, for what covers what in `simplify`, and for whoever wants to know how much a backend leaves out. And `in_order`: a
value as it would be written.
"""

import json
from fractions import Fraction
from typing import Any

from trunkline.grammar.regex.automaton import matches
from trunkline.grammar.schema import values
from trunkline.grammar.schema.formats import KNOWN
from trunkline.grammar.schema.forms import ANY, NEVER, Arrays, Form, Forms, Name, Numbers, Objects, Strings, Values


def accepts(forms: Forms, value: Any) -> bool:
    """Whether a JSON value, as json.loads gives it, is valid. Raises RecursionError for values of absurd depth."""
    return _is_valid(forms.definitions, forms.root, value)


def in_order(forms: Forms, value: Any) -> Any:
    """The same value with its keys in the order in which backends write them: those of `properties` first, then the others.

    Of several alternatives the first counts that takes the value, or else the first of its type.
    """
    return _in_order(forms.definitions, forms.root, value)


def _in_order(definitions: dict[Name, tuple[Form, ...]], name: Name, value: Any) -> Any:
    if not isinstance(value, dict | list):
        return value
    forms = definitions.get(name, ())
    of_type = (form for form in forms if isinstance(form, Objects if isinstance(value, dict) else Arrays))
    match next((form for form in forms if form_accepts(definitions, form, value)), next(of_type, None)):
        case Values() as form:
            key = values.key(value)
            return next(_as_listed(one, value) for text in form.values if values.key(one := json.loads(text)) == key)
        case Arrays() as form:
            names = [*form.prefix, *[form.rest] * len(value)]
            return [_in_order(definitions, one, item) for one, item in zip(names, value, strict=False)]
        case Objects() as form:
            named = dict(form.properties)
            keys = [*(key for key in named if key in value), *(key for key in value if key not in named)]
            return {key: _in_order(definitions, _under(form, named, key)[0], value[key]) for key in keys}
    return value


def _as_listed(listed: Any, value: Any) -> Any:
    """A value with its keys in the order of an equal one."""
    match listed:
        case dict():
            return {key: _as_listed(one, value[key]) for key, one in listed.items()}
        case list():
            return [_as_listed(one, item) for one, item in zip(listed, value, strict=True)]
    return value


def _under(form: Objects, properties: dict[str, Name], key: str) -> list[Name]:
    """Definitions that the value of this key must satisfy. There is at least one."""
    if key in properties:
        return [properties[key]]
    return [under for pattern, under in form.patterns if matches(pattern, key)] or [form.additional]


def _is_valid(definitions: dict[Name, tuple[Form, ...]], name: Name, value: Any) -> bool:
    if name in (ANY, NEVER):
        return name == ANY
    return any(form_accepts(definitions, form, value) for form in definitions[name])


def form_accepts(definitions: dict[Name, tuple[Form, ...]], form: Form, value: Any) -> bool:
    """The same for one alternative."""
    match form:
        case Values():
            return values.key(value) in {values.key(json.loads(text)) for text in form.values}
        case Strings():
            return isinstance(value, str) and _string(form, value)
        case Numbers():
            return values.kind(value) == values.NUMBER and _number(form, values.fraction(value))
        case Arrays():
            return isinstance(value, list) and _array(definitions, form, value)
        case Objects():
            return isinstance(value, dict) and _object(definitions, form, value)


def _within(least: int, count: int, most: int | None) -> bool:
    return least <= count and (most is None or count <= most)


def _string(form: Strings, value: str) -> bool:
    return (
        _within(form.min_length, len(value), form.max_length)
        and value not in form.excluded
        and all(matches(pattern, value) for pattern in form.patterns)
        and not any(matches(pattern, value) for pattern in form.not_patterns)
        and all(matches(KNOWN[name], value) for name in form.formats)
    )


def _number(form: Numbers, value: Fraction) -> bool:
    if form.minimum is not None and (value < form.minimum or (form.exclusive_minimum and value == form.minimum)):
        return False
    if form.maximum is not None and (value > form.maximum or (form.exclusive_maximum and value == form.maximum)):
        return False
    if form.integer and value.denominator != 1:
        return False
    return value not in form.excluded and (form.multiple_of is None or (value / form.multiple_of).denominator == 1)


def _array(definitions: dict[Name, tuple[Form, ...]], form: Arrays, value: list[Any]) -> bool:
    if not _within(form.min_items, len(value), form.max_items):
        return False
    if form.unique and len(values.distinct(value)) < len(value):
        return False
    if not all(
        _is_valid(definitions, form.prefix[index] if index < len(form.prefix) else form.rest, item)
        for index, item in enumerate(value)
    ):
        return False
    return all(
        _within(one.least, sum(_is_valid(definitions, one.item, item) for item in value), one.most)
        for one in form.contains
    )


def _object(definitions: dict[Name, tuple[Form, ...]], form: Objects, value: dict[str, Any]) -> bool:
    if not _within(form.min_properties, len(value), form.max_properties) or not form.required <= value.keys():
        return False
    properties = dict(form.properties)
    for name, member in value.items():
        if not all(_is_valid(definitions, under, member) for under in _under(form, properties, name)):
            return False
    return True
