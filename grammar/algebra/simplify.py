"""Takes out of forms what no value satisfies, what is said twice, and what says nothing. The meaning stays the same.

1. what has a value at all           a least fixed point: a list whose items must be lists of the same kind, never ending, has none
2. names of what has none            become NEVER; alternatives that need one go
3. alternatives covered by others    go; values listed in several places are listed once
4. definitions that say the same     become one; those that allow everything become ANY; unreachable ones go
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace

from trunkline.grammar.schema.accepts import form_accepts
from trunkline.grammar.schema.forms import (
    ANY,
    ANYTHING,
    NEVER,
    Arrays,
    Form,
    Forms,
    Name,
    Numbers,
    Objects,
    Strings,
    Values,
    longest,
)

Definitions = dict[Name, tuple[Form, ...]]


def simplify(forms: Forms) -> Forms:
    """The same in fewer words. The root may be ANY or NEVER then."""
    definitions = _possible(forms.definitions)
    root = forms.root if forms.root in definitions or forms.root == ANY else NEVER
    renamed: dict[Name, Name] = {}
    while True:
        definitions = {name: _shortened(alternatives, definitions) for name, alternatives in definitions.items()}
        same = _alike(definitions)
        if not same:
            break
        renamed = {name: same.get(to, to) for name, to in renamed.items()} | same
        definitions = _renamed({name: forms for name, forms in definitions.items() if name not in same}, same)
    return _reachable(definitions, renamed.get(root, root))


# --- 1 and 2


def _possible(definitions: Definitions) -> Definitions:
    """Without definitions and alternatives that no value satisfies."""
    have: set[Name] = {ANY}
    waiting = list(reversed(definitions))
    while True:
        missing = [name for name in waiting if not any(_has_values(form, have) for form in definitions[name])]
        have.update(set(waiting) - set(missing))
        if len(missing) == len(waiting):
            break
        waiting = missing
    return {
        name: tuple(_without(form, have) for form in alternatives if _has_values(form, have))
        for name, alternatives in definitions.items()
        if name in have
    }


def _has_values(form: Form, have: set[Name]) -> bool:
    """Whether some value satisfies it, of which all parts are among those that have values."""
    if isinstance(form, Arrays):
        if any(one.least and one.item not in have for one in form.contains):
            return False
        most = longest(form, have.__contains__)
        return most is None or form.min_items <= most
    if isinstance(form, Objects):
        named = dict(form.properties)
        if not all(named[name] in have for name in form.required):
            return False
        if form.additional in have or any(under in have for _, under in form.patterns):
            return True
        return form.min_properties <= sum(under in have for under in named.values())
    return True


def _without(form: Form, have: set[Name]) -> Form:
    """A form that has values, with NEVER for every part that has none."""
    if isinstance(form, Arrays):
        end = next((index for index, name in enumerate(form.prefix) if name not in have), len(form.prefix))
        contains = tuple(one for one in form.contains if one.item in have)
        if end < len(form.prefix) or form.rest not in have:
            most = form.max_items if form.max_items is not None and form.max_items < end else None
            return replace(form, prefix=form.prefix[:end], rest=NEVER, max_items=most, contains=contains)
        return replace(form, contains=contains)
    if isinstance(form, Objects):
        form = _with_names(form, lambda name: name if name in have else NEVER)
        assert isinstance(form, Objects)
        patterns = form.patterns
        if form.additional == NEVER:
            if all(under == NEVER for _, under in patterns):
                patterns = ()
            if not patterns:  # what is not named is not allowed anyway
                named = tuple((name, under) for name, under in form.properties if under != NEVER)
                return replace(form, properties=named, patterns=())
        return replace(form, patterns=patterns)
    return form


# --- 3


def _shortened(alternatives: tuple[Form, ...], definitions: Definitions) -> tuple[Form, ...]:
    """Without what other alternatives cover."""
    if len(alternatives) == 1:
        return alternatives
    kept: list[Form] = []
    for index, form in enumerate(alternatives):
        # Of two that cover each other the later is looked at with the earlier gone, so one stays.
        later = [other for other in alternatives[index + 1 :] if other != form]
        if not any(_covers(other, form) for other in kept + later):
            kept.append(form)
    others: list[Form] = [form for form in kept if not isinstance(form, Values)]
    if len(others) == len(kept):
        return tuple(kept)
    listed = [form for form in kept if isinstance(form, Values)]
    texts = dict.fromkeys(text for form in listed for text in form.values)
    unsaid = [text for text in texts if not any(form_accepts(definitions, one, json.loads(text)) for one in others)]
    if unsaid:
        others.insert(kept.index(listed[0]), replace(listed[0], values=tuple(unsaid)))
    return tuple(others)


def _covers(wide: Form, narrow: Form) -> bool:
    """Whether `wide` surely takes every value of `narrow`."""
    if type(wide) is not type(narrow):
        return False
    if wide == narrow:
        return True
    if isinstance(wide, Strings) and isinstance(narrow, Strings):
        return (
            _spans(wide.min_length, wide.max_length, narrow.min_length, narrow.max_length)
            and set(wide.patterns) <= set(narrow.patterns)
            and set(wide.not_patterns) <= set(narrow.not_patterns)
            and set(wide.excluded) <= set(narrow.excluded)
            and set(wide.formats) <= set(narrow.formats)
        )
    if isinstance(wide, Numbers) and isinstance(narrow, Numbers):
        return _covers_numbers(wide, narrow)
    if isinstance(wide, Arrays) and isinstance(narrow, Arrays):
        return (
            _spans(wide.min_items, wide.max_items, narrow.min_items, narrow.max_items)
            and narrow.unique >= wide.unique
            and set(wide.contains) <= set(narrow.contains)
            and (wide.rest == ANY or wide.rest == narrow.rest or narrow.rest == NEVER)
            and (wide.prefix == narrow.prefix or (not wide.prefix and wide.rest == ANY))
        )
    if isinstance(wide, Objects) and isinstance(narrow, Objects):
        return _covers_objects(wide, narrow)
    return False


def _spans(least: int, most: int | None, inner_least: int, inner_most: int | None) -> bool:
    return least <= inner_least and (most is None or (inner_most is not None and inner_most <= most))


def _covers_numbers(wide: Numbers, narrow: Numbers) -> bool:
    unit, inner = wide.multiple_of, narrow.multiple_of
    if unit is not None and (inner is None or (inner / unit).denominator != 1):
        return False
    if wide.integer and not narrow.integer:
        return False
    if wide.minimum is not None:
        if narrow.minimum is None or narrow.minimum < wide.minimum:
            return False
        if narrow.minimum == wide.minimum and wide.exclusive_minimum and not narrow.exclusive_minimum:
            return False
    if wide.maximum is not None:
        if narrow.maximum is None or narrow.maximum > wide.maximum:
            return False
        if narrow.maximum == wide.maximum and wide.exclusive_maximum and not narrow.exclusive_maximum:
            return False
    return set(wide.excluded) <= set(narrow.excluded)


def _covers_objects(wide: Objects, narrow: Objects) -> bool:
    if not _spans(
        wide.min_properties,
        wide.max_properties,
        max(narrow.min_properties, len(narrow.required)),
        narrow.max_properties,
    ):
        return False
    if not wide.required <= narrow.required:
        return False
    if wide.patterns != narrow.patterns:
        return False
    if wide.additional not in (ANY, narrow.additional) and narrow.additional != NEVER:
        return False
    named, inner = dict(wide.properties), dict(narrow.properties)
    if any(
        named.get(name, ANY if wide.additional == ANY and not wide.patterns else None) not in (ANY, under)
        and under != NEVER
        for name, under in inner.items()
    ):
        return False
    return all(
        name in inner or under == ANY or (narrow.additional == NEVER and not narrow.patterns)
        for name, under in named.items()
    )


# --- 4


def _alike(definitions: Definitions) -> dict[Name, Name]:
    """Of definitions that say the same, all but the first, and ANY for those that allow everything -> what to call them."""
    same: dict[Name, Name] = {}
    first: dict[tuple[Form, ...], Name] = {}
    for name, alternatives in definitions.items():
        if _is_anything(alternatives):
            same[name] = ANY
        elif alternatives in first:
            same[name] = first[alternatives]
        else:
            first[alternatives] = name
    return same


def _is_anything(alternatives: Iterable[Form]) -> bool:
    known = set(alternatives)
    return all(
        any(
            form == one
            or (isinstance(form, Values) and isinstance(one, Values) and set(one.values) <= set(form.values))
            for form in known
        )
        for one in ANYTHING
    )


def _renamed(definitions: Definitions, names: dict[Name, Name]) -> Definitions:
    return {
        name: tuple(_with_names(form, lambda one: names.get(one, one)) for form in alternatives)
        for name, alternatives in definitions.items()
    }


def _with_names(form: Form, rename: Callable[[Name], Name]) -> Form:
    if isinstance(form, Arrays):
        return replace(
            form,
            prefix=tuple(map(rename, form.prefix)),
            rest=rename(form.rest),
            contains=tuple(replace(one, item=rename(one.item)) for one in form.contains),
        )
    if isinstance(form, Objects):
        return replace(
            form,
            properties=tuple((name, rename(under)) for name, under in form.properties),
            patterns=tuple((pattern, rename(under)) for pattern, under in form.patterns),
            additional=rename(form.additional),
        )
    return form


def _reachable(definitions: Definitions, root: Name) -> Forms:
    """Only the definitions that the root leads to, nearest first."""
    found: Definitions = {}
    waiting = [root]
    for name in waiting:  # grows meanwhile
        if name in found or name in (ANY, NEVER):
            continue
        found[name] = definitions[name]
        for form in definitions[name]:
            if isinstance(form, Arrays):
                waiting += [*form.prefix, form.rest, *(one.item for one in form.contains)]
            elif isinstance(form, Objects):
                waiting += [under for _, under in (*form.properties, *form.patterns)] + [form.additional]
    return Forms(definitions=found, root=root)
