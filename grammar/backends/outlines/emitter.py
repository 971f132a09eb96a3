"""What outlines-core is given for a constraint: one regular expression, where its automaton is small.

Its tables hold every pair of a state and a token that may come there, so what counts is how many states there are, and
in how many of them nearly every token may come. Its own JSON schema converter is not used: that ignores what it does
not know, and puts patterns between quotes as they are.

A regular expression nests as deep as it is written, so a schema that leads to itself, or allows any value somewhere, is
refused. It has no intersection either: several things that are asked of one string are made one expression by way of an
automaton, if that is small.
Less is allowed than the schema does: no whitespace but one space behind a colon or a comma, no keys beyond the
properties.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from trunkline.constraint import GrammarSource
from trunkline.grammar.backends import numbers
from trunkline.grammar.backends.outlines import leftmost
from trunkline.grammar.backends.strings import string_trees
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.regex import ast, characters, dfa, pattern
from trunkline.grammar.regex.ast import Node
from trunkline.grammar.regex.automaton import Automaton, Budget, BudgetExceeded
from trunkline.grammar.regex.full_match import full_match
from trunkline.grammar.schema import values
from trunkline.grammar.schema.forms import (
    ANY,
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

NAME = "outlines"
LARGEST_SIZE = 20_000  # characters of the expression with its repetitions written out
MOST_STATES = 2_000
MOST_WIDE = 40.0  # states, each counted by the share of printable characters that may come there
WORK = 200_000
MOST_INTERSECTED = 300  # states of an intersection
DEEPEST = 24  # definitions within definitions

PRINTABLE = ((0x20, 0x7E),)
QUOTE = ast.char('"')
OPTIONAL_SPACE = ast.optional(ast.char(" "))


def emit(forms: Forms, *, compact: bool = False) -> GrammarSource:
    """JSON that is valid under a schema. Raises Unsupported."""
    tree = _Writer(forms, compact).definition(forms.root, "")
    return _source(tree, "", "type")


def emit_regex(text: str) -> GrammarSource:
    """The whole text matches. Raises Unsupported, InvalidSchema."""
    trees, not_trees = full_match(text)
    try:
        tree = _intersection(trees, not_trees) if not_trees or len(trees) > 1 else trees[0]
    except BudgetExceeded:
        raise Unsupported("", "regex", "one expression without its lookarounds would be too large") from None
    if tree == ast.NOTHING:
        raise InvalidSchema("", "regex", "no text matches it")
    return _source(tree, "", "regex")


def emit_choice(texts: Sequence[str]) -> GrammarSource:
    """The text is one of these. Raises Unsupported."""
    if sum(map(len, texts)) > LARGEST_SIZE:
        raise Unsupported("", "choice", f"the choices have more than {LARGEST_SIZE} characters")
    return _source(ast.union(map(ast.literal, texts)), "", "choice")


def _source(tree: Node, pointer: str, keyword: str) -> GrammarSource:
    """Raises Unsupported if its automaton may be large, or takes nothing."""
    if tree == ast.NOTHING:
        raise Unsupported(pointer, keyword, "no text that is written here satisfies it")
    if tree.size > LARGEST_SIZE:
        raise Unsupported(pointer, keyword, f"as one expression it has more than {LARGEST_SIZE} characters")
    try:
        states, wide = _weigh(tree)
        if states > MOST_STATES:
            raise Unsupported(pointer, keyword, f"its automaton has more than {MOST_STATES} states")
        if wide > MOST_WIDE:
            raise Unsupported(
                pointer, keyword, f"its automaton has more than {MOST_WIDE:g} states where nearly any text may come"
            )
        leftmost.check_anywhere(tree)
    except BudgetExceeded:
        raise Unsupported(pointer, keyword, "its automaton is too much work to look at") from None
    return GrammarSource(NAME, "regex", pattern.write(_without_preference(tree, pointer, keyword), "rust"))


def _without_preference(tree: Node, pointer: str, keyword: str) -> Node:
    """The same language, spelled so that the library gives up none of it (see leftmost). Raises Unsupported."""
    try:
        if leftmost.is_whole(tree):
            return tree
        spelled = _intersection([tree])
        if leftmost.is_whole(spelled):
            return spelled
    except BudgetExceeded:
        pass  # so it can't be told, and is refused as well
    raise Unsupported(pointer, keyword, "the library might give up longer texts once a shorter one has matched")


def _weigh(tree: Node) -> tuple[int, float]:
    """How many states its automaton has, and how wide they are together; no further than the limits. Raises
    BudgetExceeded."""
    machine = Automaton(tree, Budget(WORK))
    seen = {machine.start}
    waiting = [machine.start]
    wide = 0.0
    for state in waiting:  # grows meanwhile
        moves = machine.moves(state)
        shown = characters.intersection(tuple((first, last) for first, last, _ in moves), PRINTABLE)
        wide += characters.count(shown) / characters.count(PRINTABLE)
        for _, _, target in moves:
            if target not in seen:
                seen.add(target)
                waiting.append(target)
        if len(seen) > MOST_STATES or wide > MOST_WIDE:
            break
    return len(seen), wide


class _Writer:
    """Makes one tree of all definitions."""

    def __init__(self, forms: Forms, compact: bool) -> None:
        self._forms = forms
        space = () if compact else (OPTIONAL_SPACE,)
        self._comma = ast.concat((ast.char(","), *space))
        self._colon = ast.concat((ast.char(":"), *space))
        self._written: dict[Name, Node] = {}
        self._open: list[Name] = []

    def definition(self, name: Name, pointer: str) -> Node:
        """`pointer`: where it is asked for. Raises Unsupported."""
        if name == NEVER:
            return ast.NOTHING
        if name == ANY:
            raise Unsupported(pointer, "type", "any value may come here, which may be nested without limit")
        if name in self._open or len(self._open) > DEEPEST:
            raise Unsupported(pointer, "$ref", "it may be nested without limit")
        if name not in self._written:
            self._open.append(name)
            tree = ast.union(self._form(form) for form in self._forms.definitions[name])
            self._open.pop()
            if tree.size > LARGEST_SIZE:
                raise Unsupported(pointer, "type", f"as one expression it has more than {LARGEST_SIZE} characters")
            self._written[name] = tree
        return self._written[name]

    def _form(self, form: Form) -> Node:
        match form:
            case Values():
                return ast.union(self._value(values.with_numerals(text)) for text in form.values)
            case Strings():
                return ast.concat((QUOTE, ast.json_form(_string(form)), QUOTE))
            case Numbers():
                return _number(form)
            case Arrays():
                return self._array(form)
            case Objects():
                return self._object(form)

    def _value(self, value: Any) -> Node:
        """A listed value."""
        if isinstance(value, values.Numeral):
            return ast.literal(value.spelling)
        if isinstance(value, list) and value:
            return self._enclosed("[", [self._value(item) for item in value], "]")
        if isinstance(value, dict) and value:
            return self._enclosed("{", [self._member(key, self._value(member)) for key, member in value.items()], "}")
        return ast.literal(json.dumps(value, ensure_ascii=False))

    def _enclosed(self, opening: str, items: Sequence[Node], closing: str) -> Node:
        return ast.concat((ast.char(opening), *self._separated(items), ast.char(closing)))

    def _separated(self, items: Sequence[Node]) -> Iterable[Node]:
        for index, item in enumerate(items):
            yield from (self._comma, item) if index else (item,)

    def _member(self, key: str, value: Node) -> Node:
        return ast.concat((ast.literal(json.dumps(key, ensure_ascii=False)), self._colon, value))

    def _array(self, form: Arrays) -> Node:
        most = longest(form, NEVER.__ne__)
        if form.unique and (most is None or most > 1):
            raise Unsupported(form.pointer, "uniqueItems", "a regular expression cannot compare items")
        if form.contains:
            raise Unsupported(
                form.pointer, "contains", "a regular expression cannot count items of one kind among others"
            )
        if most is not None and most < form.min_items:
            return ast.NOTHING
        own = len(form.prefix) if most is None else min(most, len(form.prefix))
        after: Node = ast.EMPTY
        if most is None or most > own:
            item = ast.concat((self._comma, self.definition(form.rest, form.pointer)))
            after = ast.repeat(item, max(0, form.min_items - own), None if most is None else most - own)
            if own == 0:
                after = self._first(self.definition(form.rest, form.pointer), form.min_items, most)
        for index in range(own - 1, -1, -1):
            item = self.definition(form.prefix[index], form.pointer)
            after = ast.concat((*((self._comma,) if index else ()), item, after))
            if index >= form.min_items:
                after = ast.optional(after)
        return ast.concat((ast.char("["), after, ast.char("]")))

    def _first(self, item: Node, least: int, most: int | None) -> Node:
        """Items of one kind, separated."""
        more = ast.repeat(ast.concat((self._comma, item)), max(0, least - 1), None if most is None else most - 1)
        items = ast.concat((item, more))
        return items if least else ast.optional(items)

    def _object(self, form: Objects) -> Node:
        names = [(key, name) for key, name in form.properties if name != NEVER]
        if not form.required <= {key for key, _ in names}:
            return ast.NOTHING
        if not form.properties and (form.additional != NEVER or form.patterns):
            return self._map(form)
        if form.min_properties > len(form.required):
            raise Unsupported(
                form.pointer, "minProperties", "a regular expression cannot count which properties are there"
            )
        if form.max_properties is not None and form.max_properties < len(names):
            raise Unsupported(
                form.pointer, "maxProperties", "a regular expression cannot count which properties are there"
            )
        members = [self._member(key, self.definition(name, form.pointer)) for key, name in names]
        needed = [index for index, (key, _) in enumerate(names) if key in form.required]
        if not needed:
            ways = [
                ast.concat(
                    (member, *(ast.optional(ast.concat((self._comma, other))) for other in members[index + 1 :]))
                )
                for index, member in enumerate(members)
            ]
            body = ast.optional(ast.union(ways)) if ways else ast.EMPTY
        else:
            first = needed[0]
            parts: list[Node] = [ast.optional(ast.concat((member, self._comma))) for member in members[:first]]
            parts.append(members[first])
            for index in range(first + 1, len(members)):
                member = ast.concat((self._comma, members[index]))
                parts.append(member if index in needed else ast.optional(member))
            body = ast.concat(parts)
        return ast.concat((ast.char("{"), body, ast.char("}")))

    def _map(self, form: Objects) -> Node:
        """Any keys, with values of one kind."""
        if form.min_properties > 1:
            raise Unsupported(form.pointer, "minProperties", "a regular expression cannot tell whether keys differ")
        if len(form.patterns) > 1 or (form.patterns and form.additional != NEVER):
            raise Unsupported(
                form.pointer, "patternProperties", "a regular expression cannot tell other keys from these"
            )
        key: Node = ast.ANY_TEXT
        name = form.patterns[0][1] if form.patterns else form.additional
        for source, _ in form.patterns:
            key = pattern.whole_tree(source, pointer=form.pointer, keyword="patternProperties")
        most = form.max_properties if name != NEVER else 0
        if most == 0:
            return ast.literal("{}") if not form.min_properties else ast.NOTHING
        value = self.definition(name, form.pointer)
        member = ast.concat((QUOTE, ast.json_form(key), QUOTE, self._colon, value))
        members = self._first(member, form.min_properties, most)
        return ast.concat((ast.char("{"), members, ast.char("}")))


def _string(form: Strings) -> Node:
    """What stands between the quotes, before JSON escapes it. Raises Unsupported."""
    trees, not_trees = string_trees(form)
    has_length = bool(form.min_length or form.max_length is not None)
    if not not_trees and len(trees) + has_length <= 1:
        return trees[0] if trees else ast.repeat(ast.ANY_CHAR, form.min_length, form.max_length)
    try:
        return _intersection(trees, not_trees, form.min_length, form.max_length)
    except BudgetExceeded:
        reason = "one regular expression for all that is asked of the string would be too large"
        raise Unsupported(form.pointer, "pattern" if trees else "not", reason) from None


def _intersection(
    trees: Sequence[Node], not_trees: Sequence[Node] = (), least: int = 0, most: int | None = None
) -> Node:
    """Raises BudgetExceeded."""
    machine = dfa.build(trees, not_trees, least, most, limit=MOST_INTERSECTED, work=WORK)
    return ast.NOTHING if machine is None else dfa.to_tree(machine, limit=LARGEST_SIZE)


def _number(form: Numbers) -> Node:
    """Raises Unsupported."""
    ways = []
    try:
        for span in numbers.spans(form):
            for sources in span.alternatives():
                trees = [pattern.parse(source) for source in sources]
                ways.append(trees[0] if len(trees) == 1 else _intersection(trees))
    except BudgetExceeded:
        raise Unsupported(
            form.pointer, "minimum", "a regular expression for these numbers would be too large"
        ) from None
    except numbers.NotDecimal as error:
        raise Unsupported(form.pointer, "multipleOf", str(error)) from None
    return ast.union(ways)
