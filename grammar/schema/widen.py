"""Making a schema's forms wider where a backend cannot enforce them, for the policy "validate".

Wider is safe here, and only here: forms hold no negation, so whatever a form allows more, the whole allows more. (In
the schema itself, taking a keyword out from under a `not` would forbid more.)
"""

from dataclasses import fields, replace
from itertools import count

from trunkline.grammar.interface import Finding
from trunkline.grammar.schema.forms import ANY, Arrays, Form, Forms, Numbers, Objects, Strings, Values

ANYTHING = Forms(definitions={}, root=ANY)
ANY_OBJECT = Forms(definitions={"root": (Objects(),)}, root="root")

# Keyword of a schema -> the fields of a form that it fills.
FIELDS = {
    "pattern": ("patterns", "not_patterns"),
    "format": ("formats",),
    "minLength": ("min_length",),
    "maxLength": ("max_length",),
    "minimum": ("minimum", "exclusive_minimum"),
    "exclusiveMinimum": ("minimum", "exclusive_minimum"),
    "maximum": ("maximum", "exclusive_maximum"),
    "exclusiveMaximum": ("maximum", "exclusive_maximum"),
    "multipleOf": ("multiple_of",),
    "uniqueItems": ("unique",),
    "contains": ("contains",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
    "minItems": ("min_items",),
    "maxItems": ("max_items",),
    "minProperties": ("min_properties",),
    "maxProperties": ("max_properties",),
}


def widen(forms: Forms, finding: Finding) -> Forms:
    """The forms without what a backend found at one place; `forms` themselves if nothing there can get wider.

    Only the fields that the keyword fills, where it is known and they hold anything; else whole forms.
    """
    place = _nearest(forms, finding.pointer)
    if place is None:
        return forms
    definitions = {
        name: tuple(_widened(form, finding.keyword) if form.pointer == place else form for form in alternatives)
        for name, alternatives in forms.definitions.items()
    }
    return Forms(definitions=definitions, root=forms.root)


def only_objects(forms: Forms) -> Forms | None:
    """The forms without the values that are no objects; None if they have no objects."""
    if forms.root == ANY:
        return ANY_OBJECT
    alternatives = tuple(form for form in map(_objects_of, forms.definitions[forms.root]) if form is not None)
    if not alternatives:
        return None
    if alternatives == forms.definitions[forms.root]:
        return forms
    root = next(name for number in count() if (name := f"object{number}") not in forms.definitions)
    return Forms(definitions={**forms.definitions, root: alternatives}, root=root)


def _objects_of(form: Form) -> Form | None:
    if isinstance(form, Values):
        values = tuple(value for value in form.values if value[:1] == "{")
        return replace(form, values=values) if values else None
    return form if isinstance(form, Objects) else None


def _nearest(forms: Forms, pointer: str) -> str | None:
    """The place of a form that is at `pointer`, or else closest above it."""
    places = {form.pointer for alternatives in forms.definitions.values() for form in alternatives}
    while pointer not in places:
        if not pointer:
            return None
        pointer = pointer.rpartition("/")[0]
    return pointer


def _widened(form: Form, keyword: str) -> Form:
    names = {field.name for field in fields(form)} & set(FIELDS.get(keyword, ()))
    if isinstance(form, Values) or not names:
        return _whole_type(form)
    wide = type(form)()
    changed = replace(form, **{name: getattr(wide, name) for name in names})
    return changed if changed != form else _whole_type(form)


def _whole_type(form: Form) -> Form:
    """The widest form of the same type."""
    if isinstance(form, Strings | Numbers | Arrays | Objects):
        return type(form)(pointer=form.pointer)
    return form
