"""Forms as rules of a Lark grammar: one rule for each definition, in one style of writing JSON.

    writer = JsonWriter(lark, leaves, forms, SPACED)
    writer.reference(forms.root)        name of the rule for the root

A style says what stands after a comma and a colon, all through a text: nothing, or one space. No other whitespace is written,
so once a text has shown its style, everything between two values is forced.
Keys come in the order of `properties`, the others after them; or, if that is asked for, in any order: not in listed values, and not
where more than llguidance_any_order.MOST_PARTS are declared, which keep the order.
What the forms ask for is written exactly, or something narrower:
  names that match several patterns with different definitions are not written; names that match none, or one, may come twice,
  but then count once for min_properties
Raises Unsupported, with pointer and keyword, for what cannot be written.
"""

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import NamedTuple, TypeVar

from trunkline.grammar.backends.llguidance.any_order import MOST_PARTS, any_order
from trunkline.grammar.backends.llguidance.lark import LarkWriter, quote
from trunkline.grammar.backends.llguidance.leaves import Leaves, json_string
from trunkline.grammar.backends.llguidance.sequences import (
    Count,
    Kind,
    Part,
    TooMany,
    containing,
    counted,
    different,
    repeated,
    row,
    some_of,
)
from trunkline.grammar.interface import Unsupported
from trunkline.grammar.regex import automaton
from trunkline.grammar.schema import values
from trunkline.grammar.schema.forms import ANY, ANYTHING, NEVER, Arrays, Form, Forms, Name, Objects, Values, longest

MANY_DEFINITIONS = 50

JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*":?|[\[\]{},]|[^\[\]{},"]+')

T = TypeVar("T")


class Style(NamedTuple):
    """How JSON is written. `prefix` begins the names of its rules."""

    prefix: str
    comma: str
    colon: str


COMPACT = Style("c", ",", ":")
SPACED = Style("s", ", ", ": ")


class JsonWriter:
    """Writes the rules of all definitions that the root leads to, in one style."""

    def __init__(self, lark: LarkWriter, leaves: Leaves, forms: Forms, style: Style, key_order: str = "schema") -> None:
        self._lark, self._leaves, self._style, self._key_order = lark, leaves, style, key_order
        self._definitions: dict[Name, tuple[Form, ...]] = {**forms.definitions, ANY: ANYTHING, NEVER: ()}
        self._numbers = {name: number for number, name in enumerate(self._definitions)}
        self._finite: dict[Name, tuple[str, ...] | None] = {}
        self._possible = self._find_possible()
        self._defined: set[Name] = set()

    def is_possible(self, name: Name) -> bool:
        """Whether a value of a definition can be written at all."""
        return name in self._possible

    def reference(self, name: Name) -> str:
        """The rule of a definition, for whose values there must be a way to be written."""
        return f"{self._style.prefix}{self._numbers[name]}"

    def define(self, root: Name) -> list[str]:
        """Write the rules of a definition and of all that it leads to; the names of the rules, each after those it leads to."""
        order: list[str] = []
        stack: list[tuple[Name, Iterator[Name]]] = []

        def enter(name: Name) -> None:
            self._defined.add(name)
            stack.append((name, self._leads_to(name)))

        if root not in self._defined:
            enter(root)
        while stack:
            name, names = stack[-1]
            following = next((one for one in names if one not in self._defined and one in self._possible), None)
            if following is not None:
                enter(following)
                continue
            stack.pop()
            self._lark.rule(self.reference(name), self._alternatives(name) or ["NOTHING"])
            order.append(self.reference(name))
        return order

    # what can be written

    def _find_possible(self) -> set[Name]:
        """A least fixed point: begins with nothing, and adds definitions of which a value can be written."""
        possible: set[Name] = set()
        waiting = list(reversed(self._definitions))
        while True:
            found = [
                name for name in waiting if any(self._can_write(form, possible) for form in self._definitions[name])
            ]
            possible.update(found)
            waiting = [name for name in waiting if name not in possible]
            if not found:
                return possible

    def _can_write(self, form: Form, possible: set[Name]) -> bool:
        match form:
            case Values():
                return bool(form.values)
            case Arrays():
                most = longest(form, possible.__contains__)
                listed = self.finite(form.rest) if form.unique and not form.prefix else None
                if listed is not None:
                    most = len(listed) if most is None else min(len(listed), most)
                if any(one.least and one.item not in possible for one in form.contains):
                    return False
                return most is None or max(form.min_items, *(one.least for one in form.contains), 0) <= most
            case Objects():
                named = dict(form.properties)
                if not all(named[name] in possible for name in form.required):
                    return False
                if form.max_properties is not None and form.max_properties < max(
                    form.min_properties, len(form.required)
                ):
                    return False
                extras = form.additional in possible or any(name in possible for _, name in form.patterns)
                return extras or form.min_properties <= sum(name in possible for name in named.values())
        return bool(self._leaves.write(form))

    def _leads_to(self, name: Name) -> Iterator[Name]:
        for form in self._definitions[name]:
            if isinstance(form, Arrays):
                yield from form.prefix
                yield form.rest
                yield from (one.item for one in form.contains)
            elif isinstance(form, Objects):
                yield from (value for _, value in form.properties)
                yield from (value for _, value in form.patterns)
                yield form.additional

    def finite(self, name: Name) -> tuple[str, ...] | None:
        """All values of a definition as compact JSON, or None if they are not listed."""
        if name not in self._finite:
            forms = self._definitions[name]
            listed = [value for form in forms if isinstance(form, Values) for value in form.values]
            self._finite[name] = tuple(listed) if all(isinstance(form, Values) for form in forms) else None
        return self._finite[name]

    # alternatives of a rule

    def _alternatives(self, name: Name) -> list[str]:
        alternatives: list[str] = []
        for form in self._definitions[name]:
            if self._can_write(form, self._possible):
                match form:
                    case Values():
                        alternatives += self._listed(form.values)
                    case Arrays():
                        alternatives += self._counting(form, "minItems", self._array)
                    case Objects():
                        alternatives += self._counting(form, "minProperties", self._object)
                    case _:
                        alternatives += self._leaves.write(form)
        return list(dict.fromkeys(alternatives))

    def _counting(self, form: T, keyword: str, write: Callable[[T], list[str]]) -> list[str]:
        try:
            return write(form)
        except TooMany as error:
            raise Unsupported(getattr(form, "pointer", ""), keyword, str(error)) from None

    def _listed(self, listed: tuple[str, ...]) -> list[str]:
        """Scalars as one terminal; arrays and objects as what they consist of, so that they go along with other ones."""
        scalars = tuple(value for value in listed if value[0] not in "[{")
        composite = [self._spell(value) for value in listed if value[0] in "[{"]
        return [*(self._leaves.write(Values(values=scalars)) if scalars else []), *composite]

    def _spell(self, value: str) -> str:
        """A listed value in this style."""
        spelled = []
        for token in JSON_TOKEN.findall(value):
            if token[0] == '"' and token[-1] == ":":
                spelled.append(quote(token[:-1] + self._style.colon))
            else:
                spelled.append(quote(self._style.comma if token == "," else token))
        return " ".join(spelled)

    # arrays

    def _array(self, form: Arrays) -> list[str]:
        if form.contains:
            return self._containing(form)
        most = longest(form, self._possible.__contains__)
        if form.unique and (most is None or most > 1):
            return self._unique(form, most)
        names = form.prefix if most is None else form.prefix[:most]
        prefix = [self.reference(name) for name in names]
        rest = self.reference(form.rest) if form.rest in self._possible else None
        rows = row(self._lark, self._style.comma, prefix, rest, form.min_items, most)
        return [f'"[" {one} "]"' if one != '""' else '"[" "]"' for one in rows]

    def _unique(self, form: Arrays, most: int | None) -> list[str]:
        """Items of one list of values, whatever their place."""
        names = list(form.prefix[:most])
        if form.rest in self._possible and (most is None or most > len(names)):
            names.append(form.rest)
        lists = [self.finite(name) for name in names]
        first = lists[0]
        if first is None or None in lists:
            reason = "items are not from a list of values, so they cannot be told apart"
            raise Unsupported(form.pointer, "uniqueItems", reason)
        keys = [{values.key(json.loads(value, parse_float=Decimal)) for value in listed or ()} for listed in lists]
        if any(one != keys[0] for one in keys):
            raise Unsupported(form.pointer, "uniqueItems", "not all items are from the same list of values")
        distinct = {values.key(json.loads(value, parse_float=Decimal)): value for value in reversed(first)}
        parts = [self._spell(value) for value in reversed(distinct.values())]
        if form.min_items > len(parts):
            return []
        return [f'"[" {different(self._lark, self._style.comma, parts, "]", form.min_items, most)}']

    def _containing(self, form: Arrays) -> list[str]:
        if form.unique:
            raise Unsupported(form.pointer, "uniqueItems", "it stands beside contains")
        if form.prefix:
            raise Unsupported(form.pointer, "contains", "it stands beside prefixItems")
        counts = [Count(one.least, one.most) for one in form.contains]
        most = longest(form, self._possible.__contains__)
        rows = containing(self._lark, self._style.comma, self._kinds(form), counts, "]", form.min_items, most)
        return [] if rows is None else [f'"[" {rows}']

    def _kinds(self, form: Arrays) -> list[Kind]:
        """Kinds of items, told apart by what they count for."""
        listed = self.finite(form.rest)
        members = [self.finite(one.item) for one in form.contains]
        if listed is not None and all(member is not None for member in members):
            groups: dict[tuple[int, ...], list[str]] = {}
            for value in listed:
                groups.setdefault(tuple(int(value in (member or ())) for member in members), []).append(value)
            return [
                Kind(f"({' | '.join(self._listed(tuple(group)))})", vector) for vector, group in groups.items() if group
            ]
        limited = next((one for one in form.contains if one.most is not None), None)
        if limited is not None:
            raise Unsupported(form.pointer, "maxContains", "items that it must not count cannot be told from others")
        kinds = [
            Kind(self.reference(one.item), tuple(int(other is one) for other in form.contains))
            for one in form.contains
            if one.item in self._possible
        ]
        rest = [Kind(self.reference(form.rest), (0,) * len(form.contains))] if form.rest in self._possible else []
        return [*rest, *kinds]

    # objects

    def _object(self, form: Objects) -> list[str]:
        parts = [
            Part(f"{quote(json_string(key) + self._style.colon)} {self.reference(name)}", key in form.required)
            for key, name in form.properties
            if name in self._possible
        ]
        extras = self._extras(form)
        extra = self._lark.subrule(extras) if len(extras) > 1 else "".join(extras) or None
        required = sum(part.required for part in parts)
        most = form.max_properties
        if extra is None and most is not None and most >= len(parts):
            most = None
        if most is not None and most < required:
            return []
        if most == 0:
            return ['"{" "}"']
        least = form.min_properties if form.min_properties > required else 0
        if self._key_order == "any" and len(parts) + (extra is not None) > 1 and 0 < len(parts) <= MOST_PARTS:
            self._check_least(form, least, parts, extra)
            return [f'"{{" {any_order(self._lark, self._style.comma, parts, extra, "}", least, most)}']
        if least <= 1 and (most is None or required == len(parts)):
            return self._uncounted(parts, extra, least, None if most is None else most - required)
        self._check_least(form, least, parts, extra)
        return [f'"{{" {counted(self._lark, self._style.comma, parts, extra, "}", least, most)}']

    @staticmethod
    def _check_least(form: Objects, least: int, parts: list[Part], extra: str | None) -> None:
        if least > len(parts) + (extra is not None):
            raise Unsupported(form.pointer, "minProperties", "names that are not in properties cannot be told apart")

    def _uncounted(self, parts: list[Part], extra: str | None, least: int, most_extras: int | None) -> list[str]:
        """All that are required, any of the others, and extras. `least` is 0 or 1, and 1 only if nothing is required."""
        if extra is not None and most_extras != 0:
            parts = [*parts, Part(repeated(self._style.comma, extra, 1, most_extras), False)]
        body = some_of(self._lark, self._style.comma, parts) if parts else ""
        may_be_empty = not least and not any(part.required for part in parts)
        return [*(['"{" "}"'] if may_be_empty else []), *([f'"{{" {body} "}}"'] if body else [])]

    def _extras(self, form: Objects) -> list[str]:
        """Ways to write one name that is not in `properties`, with its value."""
        declared = [key for key, _ in form.properties]
        colon = self._style.colon
        extras = []
        for index, (source, name) in enumerate(form.patterns):
            if name in self._possible:
                others = [
                    other for at, (other, to) in enumerate(form.patterns) if at != index and to not in (name, ANY)
                ]
                others = [other for other in others if not self._leaves.are_apart(source, other)]
                try:
                    taken = automaton.matching(source, declared)
                except automaton.BudgetExceeded:
                    reason = "which names have which patterns takes too much work to find out"
                    raise Unsupported(form.pointer, "patternProperties", reason) from None
                terminal = self._leaves.name([source], others, taken, colon)
                if terminal is not None:
                    extras.append(f"{terminal} {self.reference(name)}")
        if form.additional in self._possible:
            sources = [source for source, _ in form.patterns]
            terminal = self._leaves.name([], sources, declared, colon)
            if terminal is not None:
                extras.append(f"{terminal} {self.reference(form.additional)}")
        return extras


def start_rule(roots: list[str], rules: list[str]) -> list[str]:
    """Alternatives of a grammar's start. Where there are many rules, one that nothing follows names them all, each after those
    that it leads to: the library reads rules when they are first named, and would go down with its stack otherwise."""
    if len(rules) <= MANY_DEFINITIONS:
        return roots
    return [f"NOTHING ({' | '.join(rules)})", *roots]


NOTHING = "NOTHING: /a/ & /b/"
