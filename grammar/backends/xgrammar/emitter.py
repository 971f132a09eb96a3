"""What XGrammar is given for a constraint: grammars in its EBNF, in which every form is written out.

Its JSON schema converter is not used: that drops what it does not know, and lets strings with a length or a pattern
hold what is no JSON. A context-free grammar has no intersection and no memory, so conjunctions of expressions and
lengths are multiplied out into automata here, up to a limit, and what would need memory is refused: equal items, what
an array contains, counts of keys that may repeat.

Sometimes less is allowed than the schema does, never more:
  strings       one spelling for each character; a string whose limit of length is large, or whose automaton would be,
                holds no character that JSON escapes (xgrammar_leaves)
  numbers       with no more digits than `numbers` writes
  objects       keys in the order of `properties`, then the others; no others where telling them from those takes too
                large an automaton
  Values        spelled as they are listed
  whitespace    one space after each comma and colon, or none, all through a text
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trunkline.constraint import GrammarSource, Tags
from trunkline.grammar.backends.xgrammar.ebnf import COMPACT, EMPTY, SPACED, Ebnf, Style, expression, is_plain, literal
from trunkline.grammar.backends.xgrammar.leaves import Leaves
from trunkline.grammar.backends.xgrammar.objects import ObjectWriter
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.regex import ast, dfa
from trunkline.grammar.regex.automaton import BudgetExceeded
from trunkline.grammar.regex.full_match import full_match
from trunkline.grammar.schema import values
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

NAME = "xgrammar"
MOST_COPIES = 16  # of an item that an array must have, written out
MOST_DISTINCT = 8  # values in an array of unique items
MOST_VALUES = 10_000
LARGEST_REGEX = 2000  # states
RISKY_VALUES = 1_000
RISKY_BYTES = 100_000


def emit(forms: Forms, *, compact: bool = False) -> GrammarSource:
    """JSON that is valid under a schema. Raises Unsupported."""
    ebnf = Ebnf()
    return _source(ebnf.text(_written(ebnf, forms, compact)))


def emit_tags(tags: Tags, forms_of_each: Sequence[Forms], *, compact: bool = False) -> GrammarSource:
    """Tool calls; where they are not forced, no text may follow the last of `at_most`. Raises Unsupported.

    forms_of_each  of each tag, then those of `tags.instead` if there is one
    """
    if tags.free_tokens or any(token in text for token in tags.special_tokens for text in tags.texts):
        raise Unsupported("", "special_tokens", "the grammars that are written for XGrammar hold text only")
    ebnf = Ebnf()
    bodies = [ebnf.rule(_written(ebnf, forms, compact)) for forms in forms_of_each]
    ends = [f"{body} {literal(tag.end)}" for tag, body in zip(tags.tags, bodies[: len(tags.tags)], strict=True)]
    skipped = "" if tags.forced else tags.trigger
    starts = [tags.opening + tag.begin for tag in tags.tags]
    for start in starts:
        if not start.startswith(skipped):
            raise Unsupported(
                "", "tags", f"a call begins with {start[:40]!r} and not with the trigger {skipped[:40]!r}"
            )
    first = " | ".join(f"{literal(start[len(skipped) :])} {end}" for start, end in zip(starts, ends, strict=True))
    other = " | ".join(f"{literal(tag.begin)} {end}" for tag, end in zip(tags.tags, ends, strict=True))
    more = ebnf.rule(f"{literal(tags.separator)} ({other})")
    repeated = f"{more}*" if tags.at_most is None else f"{more}{{0,{tags.at_most - 1}}}" if tags.at_most > 1 else ""
    calls = ebnf.rule(f"({first}) {repeated} {literal(tags.closing)}")
    if tags.instead is not None:
        calls = ebnf.rule(f"{calls} | {bodies[-1]}")
    if tags.forced:
        return _source(ebnf.text(calls))
    loops = "true" if tags.at_most is None else "false"
    return _source(ebnf.text(f"TagDispatch(({literal(tags.trigger)}, {calls}), loop_after_dispatch={loops})"))


def emit_regex(text: str) -> GrammarSource:
    """The whole text matches. Raises Unsupported, InvalidSchema."""
    trees, not_trees = full_match(text)
    if len(trees) == 1 and not not_trees and is_plain(trees[0]):
        return _source(f"root ::= {expression(trees[0])}")
    try:
        automaton = dfa.build(trees, not_trees, limit=LARGEST_REGEX)
    except BudgetExceeded:
        raise Unsupported("", "regex", f"its automaton has more than {LARGEST_REGEX} states") from None
    if automaton is None:
        raise InvalidSchema("", "regex", "no text matches it")
    ebnf = Ebnf()
    return _source(ebnf.text(ebnf.automaton(automaton, ast.Chars, EMPTY)))


def emit_choice(texts: Sequence[str]) -> GrammarSource:
    """The text is one of these. Raises Unsupported."""
    if len(texts) > MOST_VALUES:
        raise Unsupported("", "choice", f"xgrammar takes too long for more than {MOST_VALUES} choices")
    text = "root ::= " + " | ".join(map(literal, dict.fromkeys(texts)))
    return _source(text, is_risky=len(texts) > RISKY_VALUES)


def emit_ebnf(text: str) -> GrammarSource:
    """A grammar as its caller wrote it, which may cost anything."""
    return _source(text, is_risky=True)


def _source(text: str, *, is_risky: bool = False) -> GrammarSource:
    return GrammarSource(NAME, "ebnf", text, is_risky or len(text) > RISKY_BYTES)


def _written(ebnf: Ebnf, forms: Forms, compact: bool) -> str:
    """An expression for JSON that follows the forms, in either style unless it is to be compact. Raises Unsupported."""
    if forms.root == NEVER:
        raise Unsupported("", "", "nothing satisfies it")
    leaves, scalars = Leaves(ebnf), dict[Name, str]()
    styles = (COMPACT,) if compact else (COMPACT, SPACED)
    return " | ".join(dict.fromkeys(_Writer(ebnf, leaves, scalars, forms, style).root() for style in styles))


class _Writer:
    """Writes the definitions of one schema in one style. What has no comma or colon is written once for all styles.

    scalars  the rules of those definitions, for the writers of all styles
    """

    def __init__(self, ebnf: Ebnf, leaves: Leaves, scalars: dict[Name, str], forms: Forms, style: Style) -> None:
        self.ebnf = ebnf
        self._leaves = leaves
        self._scalars = scalars
        self._forms = forms
        self._style = style
        self._objects = ObjectWriter(ebnf, leaves, self.value, style)
        self._names: dict[Name, str] = {}
        self._waiting: list[Name] = []

    def root(self) -> str:
        """The rule of the root. Raises Unsupported."""
        root = self.value(self._forms.root)
        for name in self._waiting:  # grows meanwhile
            self.ebnf.define(self._names[name], " | ".join(map(self._form, self._alternatives(name))))
        return root

    def _alternatives(self, name: Name) -> Sequence[Form]:
        return ANYTHING if name == ANY else self._forms.definitions[name]

    def value(self, name: Name) -> str:
        """The rule of a definition, which is written later."""
        if name in self._scalars:
            return self._scalars[name]
        if name not in self._names:
            self._names[name] = self.ebnf.reserve()
            self._waiting.append(name)
            if all(map(_is_scalar, self._alternatives(name))):
                self._scalars[name] = self._names[name]
        return self._names[name]

    def _form(self, form: Form) -> str:
        match form:
            case Values():
                return self._values(form)
            case Strings():
                return self._leaves.string(form)
            case Numbers():
                return self._leaves.number(form)
            case Arrays():
                return self._array(form)
            case Objects():
                return self._objects.write(form)

    # Listed values.

    def _values(self, form: Values) -> str:
        if len(form.values) > MOST_VALUES:
            raise Unsupported(form.pointer, "enum", f"xgrammar takes too long for more than {MOST_VALUES} values")
        return " | ".join(self._literal_value(values.with_numerals(text)) for text in form.values)

    def _literal_value(self, value: Any) -> str:
        """A value as it is written."""
        comma, colon = f" {self._style.comma} ", self._style.colon
        if isinstance(value, list) and value:
            return f'"[" {comma.join(map(self._literal_value, value))} "]"'
        if isinstance(value, dict) and value:
            members = [f"{_json(key)} {colon} {self._literal_value(member)}" for key, member in value.items()]
            return f'"{{" {comma.join(members)} "}}"'
        return literal(value.spelling) if isinstance(value, values.Numeral) else _json(value)

    # Arrays.

    def _array(self, form: Arrays) -> str:
        form = _without_contains(form)
        most = longest(form, NEVER.__ne__)
        if most is not None and most < form.min_items:
            raise Unsupported(form.pointer, "minItems", "no array satisfies it")
        if form.unique and (most is None or most > 1):
            return self._unique(form, most)
        return f'"[" {self._items(form, most)}'

    def _items(self, form: Arrays, most: int | None) -> str:
        """What follows the opening bracket."""
        least = form.min_items
        own = len(form.prefix) if most is None else min(len(form.prefix), most)
        after = '"]"'
        if most is None or most > own:
            value = self.value(form.rest)
            after = self._rest(value, max(0, least - own), None if most is None else most - own, is_first=own == 0)
        for index in range(own - 1, -1, -1):
            value = self.value(form.prefix[index])
            body = f"{value} {after}" if index == 0 else f"{self._style.comma} {value} {after}"
            after = self.ebnf.rule(body if index < least else f'{body} | "]"')
        return after

    def _rest(self, value: str, least: int, most: int | None, *, is_first: bool) -> str:
        """Items of one kind and the closing bracket; `is_first`: nothing stands before them."""
        if is_first:
            left = None if most is None else most - 1
            body = f"{value} {self._rest(value, max(0, least - 1), left, is_first=False)}"
            return self.ebnf.rule(body if least else f'{body} | "]"')
        item = self.ebnf.rule(f"{self._style.comma} {value}")
        if most is not None:
            return f'{item}{{{least},{most}}} "]"' if most else '"]"'
        if least > MOST_COPIES:
            return f'{item}{{{least},}} "]"'
        loop = self.ebnf.reserve()
        self.ebnf.define(loop, f'{self._style.comma} {value} {loop} | "]"')
        return " ".join([item] * least + [loop])

    def _unique(self, form: Arrays, most: int | None) -> str:
        """All orders of different values, where they are few and listed."""
        listed = self._forms.definitions.get(form.rest, ()) if not form.prefix else ()
        texts = [text for one in listed if isinstance(one, Values) for text in one.values]
        if not all(isinstance(one, Values) for one in listed) or not 0 < len(texts) <= MOST_DISTINCT:
            raise Unsupported(
                form.pointer, "uniqueItems", "xgrammar cannot compare items, unless they are a few listed values"
            )
        spelled = [self._literal_value(values.with_numerals(text)) for text in texts]
        rules: dict[int, str] = {}
        for used in range(2 ** len(texts) - 1, -1, -1):  # bit i: value i was written
            count = used.bit_count()
            comma = f"{self._style.comma} " if count else ""
            ways = [
                f"{comma}{text} {rules[used | 1 << index]}"
                for index, text in enumerate(spelled)
                if not used >> index & 1 and (most is None or count < most) and used | 1 << index in rules
            ]
            if count >= form.min_items:
                ways.append('"]"')
            if ways:
                rules[used] = self.ebnf.rule(" | ".join(ways))
        if 0 not in rules:
            raise Unsupported(form.pointer, "minItems", "no array satisfies it")
        return f'"[" {rules[0]}'


def _is_scalar(form: Form) -> bool:
    """Whether its values look the same in all styles."""
    if isinstance(form, Values):
        return not any(isinstance(json.loads(text), list | dict) for text in form.values)
    return isinstance(form, Strings | Numbers)


def _without_contains(form: Arrays) -> Arrays:
    """Where all items are what must be contained, that is a number of items. Raises Unsupported elsewhere."""
    least, most = form.min_items, form.max_items
    for contains in form.contains:
        if contains.least == 0 and contains.most is None:
            continue
        if contains.item != ANY and (form.prefix or contains.item != form.rest):
            raise Unsupported(form.pointer, "contains", "xgrammar cannot count items of one kind among others")
        least = max(least, contains.least)
        if contains.most is not None:
            most = contains.most if most is None else min(most, contains.most)
    return replace(form, min_items=least, max_items=most, contains=())


def _json(value: Any) -> str:
    """A string, true, false, null, [] or {} as it is written."""
    return literal(json.dumps(value, ensure_ascii=False))
