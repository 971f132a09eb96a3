"""What a JSON schema means, type by type: the form that `canonical` brings every schema into, and that backends emit from.

A schema with allOf, anyOf, oneOf, not, if, $ref and keywords of several types becomes definitions. Each is a list of
alternatives, and each alternative says all there is to say about values of one type:

    {"type": ["string", "null"], "maxLength": 5}  ──►  Strings(max_length=5) | Values(("null",))

A value is valid under a definition if one of its alternatives takes it. There is no negation, no conjunction and no
sibling left: what could not be said this way was refused, with its place (interface.Unsupported). So a backend has only to
say, for each field here, whether it enforces it; and nothing can be dropped in silence.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

Name = str  # of a definition
ANY: Name = "any"  # every JSON value; always defined, with no alternatives listed
NEVER: Name = "never"  # none


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """A finite list of JSON values, each as compact JSON text (keys in the schema's order), without duplicates."""

    values: tuple[str, ...]
    pointer: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Strings:
    """JSON strings.

    min_length, max_length  in Unicode code points
    patterns                regular expressions as pattern.normalize writes them (unanchored search unless they say ^ and $); all
                            must be found
    not_patterns            none may be found
    excluded                these strings are not allowed
    formats                 format names that all must hold; only such as `formats.KNOWN` lists
    """

    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    not_patterns: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    pointer: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """JSON numbers, or integers only.

    minimum, maximum   bounds; the exclusive flags say whether the bound itself is left out
    multiple_of        None, or a positive fraction
    excluded           numbers that are not allowed
    """

    integer: bool = False
    minimum: Fraction | None = None
    maximum: Fraction | None = None
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False
    multiple_of: Fraction | None = None
    excluded: tuple[Fraction, ...] = ()
    pointer: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contains:
    """Between `least` and `most` (None: any number) items are valid under `item`."""

    item: Name
    least: int = 1
    most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrays:
    """JSON arrays.

    prefix      definitions of the first items, one by one (there may be fewer items)
    rest        of all items after them; NEVER: there are none
    unique      no two items are equal
    contains    each must hold
    """

    prefix: tuple[Name, ...] = ()
    rest: Name = ANY
    min_items: int = 0
    max_items: int | None = None
    unique: bool = False
    contains: tuple[Contains, ...] = ()
    pointer: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objects:
    """JSON objects.

    properties    (key, definition), in the order in which they are written. NEVER: the key must not be there
    required      keys that must be there; each is also in `properties`
    patterns      (regular expression as in Strings, definition) for keys that are not in `properties`; where several match,
                  all hold. Disjointness is not promised
    additional    definition for keys that are in no property and match no pattern; NEVER: there are none
    min_properties, max_properties
    """

    properties: tuple[tuple[str, Name], ...] = ()
    required: frozenset[str] = frozenset()
    patterns: tuple[tuple[str, Name], ...] = ()
    additional: Name = ANY
    min_properties: int = 0
    max_properties: int | None = None
    pointer: str = field(default="", compare=False)


Form = Values | Strings | Numbers | Arrays | Objects
# What ANY stands for.
ANYTHING: tuple[Form, ...] = (Values(values=("null", "true", "false")), Strings(), Numbers(), Arrays(), Objects())


def longest(form: Arrays, has_values: Callable[[Name], bool]) -> int | None:
    """How many items such an array can have, where not every definition has values; None: any number."""
    ends = [index for index, name in enumerate((*form.prefix, form.rest)) if not has_values(name)]
    if form.max_items is not None:
        ends.append(form.max_items)
    return min(ends, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Forms:
    """A whole schema. Booleans and null are Values.

    definitions  name -> alternatives, in the order in which they are tried; ANY and NEVER are not among them. A definition
                 may lead to itself, but only through an array or an object
    root         where to begin
    """

    definitions: dict[Name, tuple[Form, ...]]
    root: Name
