"""Brings a schema into forms: definitions of typed alternatives, without conjunction, negation or reference (see forms.py).

    canonicalize(normalize(schema)).forms

A definition is the meaning of a conjunction of subschemas (nodes.py); its cases (expansion.py) are spelled here as forms; what
they ask of properties and items are conjunctions again, each with a definition of its own, made once. At the end simplify.py
takes out what nothing satisfies.

The forms accept what the schema accepts, or less; never more. They accept less
  - where the meaning of a pattern or format is not the same to all readers;
  - where an alternative can't be said but others of its type can;
  - for unevaluatedProperties and unevaluatedItems beside an anyOf of which several branches hold at once: each alternative
    counts only what its own branch looked at.
"""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import takewhile
from typing import NamedTuple

from trunkline.grammar.algebra.assertions import expand_held
from trunkline.grammar.algebra.blame import blame
from trunkline.grammar.algebra.cases import ArrayCase, Case, NumberCase, ObjectCase, StringCase
from trunkline.grammar.algebra.expansion import Expansion
from trunkline.grammar.algebra.members import takes_number, takes_string
from trunkline.grammar.algebra.negation import expand_denied
from trunkline.grammar.algebra.nodes import ALWAYS, Conjunction, Nodes, conjoin
from trunkline.grammar.algebra.objects import flatten, without_somewhere
from trunkline.grammar.algebra.patterns import Patterns
from trunkline.grammar.algebra.simplify import simplify
from trunkline.grammar.interface import Finding, InvalidSchema, Unsupported
from trunkline.grammar.schema import values
from trunkline.grammar.schema.forms import (
    ANY,
    ANYTHING,
    NEVER,
    Arrays,
    Contains,
    Form,
    Forms,
    Name,
    Numbers,
    Objects,
    Strings,
    Values,
)
from trunkline.grammar.schema.normalize import NormalSchema

MOST_DEFINITIONS = 4_000
MOST_ALTERNATIVES = 256  # of a definition
MOST_LISTED = 256  # integers of which each is looked at
LONGEST_NAME = 60


class Canonical(NamedTuple):
    """
    forms     what the schema means
    findings  what was left out (only if lenient)
    """

    forms: Forms
    findings: tuple[Finding, ...]


def canonicalize(schema: NormalSchema, *, lenient: bool = False) -> Canonical:
    """The forms of a schema. With `lenient` a keyword that can't be said is left out, which accepts more, and listed.

    Raises Unsupported, unless lenient, with the keyword that can't be said; InvalidSchema if nothing satisfies the schema.
    """
    definer = _Definer(schema, lenient)
    try:
        forms = definer.forms(schema)
    except Unsupported as unsupported:  # of the whole schema
        definer.expansion.refuse(unsupported.finding)
        forms = Forms(definitions={}, root=ANY)
    return Canonical(forms, tuple(definer.expansion.findings))


class Spelled(NamedTuple):
    """A form, and why it stands for less than it claims, if it does."""

    form: Form
    blocked: tuple[Finding, ...]


class _Definer:
    """Gives conjunctions names, and names definitions."""

    def __init__(self, schema: NormalSchema, lenient: bool) -> None:
        self.nodes, self.patterns, self.lenient = Nodes(schema), Patterns(), lenient
        self.expansion = Expansion(self.nodes, self.patterns, held=expand_held, denied=expand_denied, lenient=lenient)
        self.dropped: list[Finding] = []  # why alternatives were left out
        self.definitions: dict[Name, tuple[Form, ...]] = {}
        self.names: dict[Conjunction, Name] = {}
        self._taken: set[Name] = {ANY, NEVER}
        self._waiting: list[Conjunction] = []

    def forms(self, schema: NormalSchema) -> Forms:
        """Of the whole schema. Raises Unsupported, InvalidSchema."""
        whole = self.nodes.literal(schema.root)
        try:
            root = self.define(whole)
            self._spell_all()
            forms = simplify(Forms(definitions=self.definitions, root=root))
        except RecursionError:
            raise Unsupported("", "$ref", "it leads through too many others") from None
        if forms.root == NEVER and self.dropped:  # something might satisfy it, but can't be said
            raise Unsupported(*self.dropped[0])
        if forms.root == NEVER:
            raise InvalidSchema(*blame(self.nodes, whole, self.names, self.definitions))
        return forms

    def define(self, conjunction: Conjunction) -> Name:
        """The name of what satisfies all of this. Its definition follows."""
        if conjunction is ALWAYS:
            return ANY
        if self.expansion.conflicts(conjunction):
            return NEVER
        name = self.names.get(conjunction)
        if name is None:
            if len(self.names) >= MOST_DEFINITIONS:
                reason = f"the schema has more than {MOST_DEFINITIONS} parts in combination"
                self.expansion.refuse(Finding(self._where(conjunction), "allOf", reason))
                return ANY
            name = self.names[conjunction] = self._new_name(conjunction)
            self._waiting.append(conjunction)
        return name

    def _spell_all(self) -> None:
        """Makes the definitions of all names that were given, and of those that this leads to."""
        for conjunction in self._waiting:  # grows meanwhile
            try:
                spelled = self._spell(conjunction)
            except Unsupported as unsupported:
                self.expansion.refuse(unsupported.finding)
                spelled = ANYTHING
            self.definitions[self.names[conjunction]] = spelled

    def _where(self, conjunction: Conjunction) -> str:
        return self.nodes.where(min(conjunction)[0])

    def _new_name(self, conjunction: Conjunction) -> Name:
        parts = [("" if holds else "not ") + "#" + self.nodes.where(number) for number, holds in sorted(conjunction)]
        name = wanted = " & ".join(parts) if len(parts) < 4 else f"{parts[0]} & {len(parts) - 1} more"
        if len(wanted) > LONGEST_NAME:
            name = wanted = "…" + wanted[1 - LONGEST_NAME :]
        number = 2
        while name in self._taken:
            name, number = f"{wanted} ({number})", number + 1
        self._taken.add(name)
        return name

    def _spell(self, conjunction: Conjunction) -> tuple[Form, ...]:
        where = self._where(conjunction)
        texts: dict[str, None] = {}
        spelled: list[Spelled] = []
        at = 0  # where the listed values stand among the forms
        for case in self.expansion.cases(conjunction):
            before = len(texts)
            if case.values is not None:
                texts.update(dict.fromkeys(case.values))
            else:
                spelled += self._spell_case(case, where)
                texts.update((kind, None) for kind in (values.TRUE, values.FALSE, values.NULL) if kind in case.kinds)
            if not before and texts:
                at = len(spelled)
        said = {type(form) for form, blocked in spelled if not blocked}
        forms: list[Form] = []
        for form, blocked in spelled:
            if blocked and type(form) in said:
                at -= len(forms) < at
                self.dropped += blocked
                continue  # others of its type can be said: less is accepted
            self.expansion.refuse(*blocked)
            forms.append(form)
        if texts:
            forms.insert(at, Values(values=values.distinct_texts(texts), pointer=where))
        if len(forms) > MOST_ALTERNATIVES:
            raise Unsupported(
                where, "anyOf", f"it has {len(forms)} alternatives; at most {MOST_ALTERNATIVES} are followed"
            )
        return tuple(dict.fromkeys(forms))

    # --- one case

    def _spell_case(self, case: Case, where: str) -> Iterator[Spelled]:
        if values.STRING in case.kinds:
            yield from self._strings(case.string, where)
        if values.NUMBER in case.kinds:
            yield from _numbers(case.number, where)
        if values.ARRAY in case.kinds:
            yield from self._arrays(case.array, where)
        if values.OBJECT in case.kinds:
            for one in without_somewhere(case.object, self.expansion):
                yield from self._objects(one, where)

    def _strings(self, case: StringCase, where: str) -> Iterator[Spelled]:
        if self.patterns.is_empty(case):
            return
        if case.max_length == 0:
            if takes_string(case, "", self.patterns, lenient=self.lenient):
                yield Spelled(Values(values=('""',), pointer=case.pointer or where), case.blocked)
            return
        form = Strings(
            min_length=case.min_length,
            max_length=case.max_length,
            patterns=case.patterns,
            not_patterns=case.not_patterns,
            excluded=tuple(text for text in case.excluded if _fits(len(text), case.min_length, case.max_length)),
            formats=case.formats,
            pointer=case.pointer or where,
        )
        yield Spelled(form, case.blocked)

    def _arrays(self, case: ArrayCase, where: str) -> Iterator[Spelled]:
        prefix = [self.define(item) for item in case.prefix]
        rest = self.define(case.rest)
        least, most = case.min_items, case.max_items
        if NEVER in prefix:  # the array ends before
            most = min(prefix.index(NEVER), len(prefix) if most is None else most)
        if most is not None and most <= len(prefix):
            prefix, rest, most = prefix[:most], NEVER, None
        while prefix and prefix[-1] == rest:
            prefix.pop()
        if rest == NEVER and least > len(prefix):
            return
        contains = []
        for what, at_least, at_most in case.contains:
            if what <= case.rest and not prefix:  # every item is
                least = max(least, at_least)
                most = at_most if most is None else most if at_most is None else min(most, at_most)
                continue
            # Among items that all satisfy `rest` it does not matter whether that is asked again; it shows what can't be.
            item = self.define(what if case.prefix or at_most is not None else conjoin(what, case.rest))
            if item == NEVER and at_least:
                return
            if item != NEVER:
                contains.append(Contains(item=item, least=at_least, most=at_most))
                least = max(least, at_least)
        if most is not None and (least > most):
            return
        if most == 0:
            rest, most = NEVER, None
        form = Arrays(
            prefix=tuple(prefix),
            rest=rest,
            min_items=least,
            max_items=most,
            unique=case.unique and (most is None or most > 1) and (rest != NEVER or len(prefix) > 1),
            contains=tuple(contains),
            pointer=case.pointer or where,
        )
        yield Spelled(form, case.blocked)

    def _objects(self, case: ObjectCase, where: str) -> Iterator[Spelled]:
        if case.is_empty:
            return
        flat = flatten(case, self.patterns)
        properties = {name: self.define(what) for name, what in flat.properties.items()}
        if any(properties[name] == NEVER for name in case.required):
            return
        form = Objects(
            properties=tuple(properties.items()),
            required=frozenset(case.required),
            patterns=tuple((source, self.define(what)) for source, what in flat.patterns),
            additional=self.define(flat.additional),
            min_properties=case.min_properties if case.min_properties > len(case.required) else 0,
            max_properties=case.max_properties,
            pointer=case.pointer or where,
        )
        yield Spelled(form, (*case.blocked, *flat.blocked))


def _fits(count: int, least: int, most: int | None) -> bool:
    return least <= count and (most is None or count <= most)


def _numbers(case: NumberCase, where: str) -> Iterator[Spelled]:
    case, blocked = _without_not_multiples(case)
    low, high, step = case.minimum, case.maximum, case.multiple_of or Fraction(1)
    rest = replace(case, excluded=())
    excluded = {number: None for number in case.excluded if takes_number(rest, number)}  # in order
    if case.integer:
        if low is not None:
            low = next(number for number in _multiples(low, step) if number not in excluded)
        if high is not None:
            high = -next(number for number in _multiples(-high, step) if -number not in excluded)
    if low is not None and high is not None and low > high:
        return
    if case.integer and low == high and low is not None:
        yield Spelled(Values(values=(str(low),), pointer=case.pointer or where), (*case.blocked, *blocked))
        return
    form = Numbers(
        integer=case.integer,
        minimum=low,
        maximum=high,
        exclusive_minimum=case.exclusive_minimum,
        exclusive_maximum=case.exclusive_maximum,
        multiple_of=case.multiple_of,
        excluded=tuple(n for n in excluded if (low is None or n >= low) and (high is None or n <= high)),
        pointer=case.pointer or where,
    )
    yield Spelled(form, (*case.blocked, *blocked))


def _multiples(start: Fraction, step: Fraction) -> Iterator[Fraction]:
    """Of `step`, from `start` upward."""
    number = -(-start // step) * step
    while True:
        yield number
        number += step


def _without_not_multiples(case: NumberCase) -> tuple[NumberCase, tuple[Finding, ...]]:
    """Forms can't say of what a number is no multiple; but among few integers those that are can be excluded one by one."""
    if not case.not_multiples:
        return case, ()
    plain = replace(case, not_multiples=())
    step = case.multiple_of or Fraction(1)
    low, high = case.minimum, case.maximum
    if case.integer and low is not None and high is not None and (high - low) / step <= MOST_LISTED:
        few = takewhile(high.__ge__, _multiples(low, step))
        more = tuple(n for n in few if any((n / unit).denominator == 1 for unit, _ in case.not_multiples))
        return replace(plain, excluded=(*case.excluded, *more)), ()
    return plain, tuple(finding for _, finding in case.not_multiples)
