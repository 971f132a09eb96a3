"""Strings, keys and numbers in XGrammar's EBNF.

    leaves = Leaves(ebnf)
    leaves.string(Strings(max_length=5))       an expression for a JSON string, quotes included
    leaves.key([whole_tree("^x-")], [])        for the rest of a key, from behind its opening quote
    leaves.number(Numbers(integer=True))

Each character of a string has one spelling: what JSON must escape is escaped, in the short form where there is one. The
closing quote belongs to the last state of a string: see ebnf for why.
"""

from collections.abc import Sequence

from trunkline.grammar.backends import numbers
from trunkline.grammar.backends.numbers import NotDecimal, Span
from trunkline.grammar.backends.strings import string_trees
from trunkline.grammar.backends.xgrammar.ebnf import EMPTY, Ebnf, char_class, expression, is_plain
from trunkline.grammar.interface import Unsupported
from trunkline.grammar.regex import ast, characters, dfa, pattern
from trunkline.grammar.regex.ast import Node
from trunkline.grammar.regex.automaton import BudgetExceeded
from trunkline.grammar.regex.dfa import Dfa
from trunkline.grammar.schema.forms import Numbers, Strings

QUOTE = '"\\""'
RAW = characters.difference(characters.ALL, ast.MUST_ESCAPE)  # characters that stand for themselves in a JSON string
LONG_STRING = 32  # limits of length from here on leave out escapes: counting those takes a state for each length
LARGEST_AUTOMATON = 1000  # states, each a rule
LARGEST_KEYS = 3000
WORK = 400_000  # for one automaton; about half a second


class Leaves:
    """Writes into `ebnf`. Equal questions get the same rules."""

    def __init__(self, ebnf: Ebnf) -> None:
        self._ebnf = ebnf
        self._written: dict[object, str | None] = {}

    def string(self, form: Strings) -> str:
        """A JSON string. Raises Unsupported."""
        found = self._written.get(form)
        if found is None:
            found = self._written[form] = f"{QUOTE} {self._string(form)}"
        return found

    def key(self, trees: Sequence[Node], not_trees: Sequence[Node]) -> str | None:
        """The rest of a key that all of `trees` match and none of `not_trees`; None if there is no such key.

        Raises BudgetExceeded.
        """
        question = ("key", tuple(trees), tuple(not_trees))
        if question not in self._written:
            if not trees and not not_trees:
                self._written[question] = self.any_string_end()
            else:
                automaton = dfa.build(trees, not_trees, limit=LARGEST_KEYS, work=WORK)
                self._written[question] = automaton and self._ebnf.automaton(automaton, ast.json_chars, QUOTE)
        return self._written[question]

    def any_string_end(self) -> str:
        """The rest of any string, from behind its opening quote."""
        return self._automaton(Dfa((((0, characters.LAST, 0),),), (True,)))

    def number(self, form: Numbers) -> str:
        """A JSON number. Raises Unsupported."""
        found = self._written.get(form)
        if found is None:
            found = self._written[form] = self._number(form)
        return found

    # Strings, from behind the opening quote.

    def _string(self, form: Strings) -> str:
        trees, not_trees = string_trees(form)
        if not trees and not not_trees and (form.min_length or form.max_length is not None):
            return self._of_length(form)
        if len(trees) == 1 and not not_trees and not form.min_length and form.max_length is None:
            spelled = ast.json_form(trees[0])
            if is_plain(spelled):
                return f"{expression(spelled, 1)} {QUOTE}"
        try:
            automaton = dfa.build(
                trees, not_trees, form.min_length, form.max_length, limit=LARGEST_AUTOMATON, work=WORK
            )
        except BudgetExceeded:
            return self._narrower(form, trees, not_trees)
        if automaton is None:
            raise Unsupported(form.pointer, _keyword(form), "no string satisfies it")
        return self._automaton(automaton)

    def _automaton(self, automaton: Dfa) -> str:
        return self._ebnf.automaton(automaton, ast.json_chars, QUOTE)

    def _of_length(self, form: Strings) -> str:
        least, most = form.min_length, form.max_length
        if most is not None and most >= LONG_STRING:
            return f"{char_class(RAW)}{{{least},{most}}} {QUOTE}"
        if most is None and least >= LONG_STRING:
            return f"{char_class(RAW)}{{{least}}} {self.any_string_end()}"
        automaton = dfa.build([], [], least, most, limit=LARGEST_AUTOMATON)
        assert automaton is not None
        return self._automaton(automaton)

    def _narrower(self, form: Strings, trees: list[Node], not_trees: list[Node]) -> str:
        """Only strings without characters that JSON escapes, where a single plain expression is left then."""
        if len(trees) == 1 and not not_trees and not form.min_length and form.max_length is None:
            raw = _only_raw(trees[0])
            if is_plain(raw):
                return f"{expression(raw, 1)} {QUOTE}"
        raise Unsupported(
            form.pointer,
            _keyword(form),
            f"its automaton has more than {LARGEST_AUTOMATON} states; xgrammar needs each as a rule",
        )

    # Numbers.

    def _number(self, form: Numbers) -> str:
        try:
            ways = [self._span(span) for span in numbers.spans(form)]
        except NotDecimal as error:
            raise Unsupported(form.pointer, "multipleOf", str(error)) from None
        except BudgetExceeded:
            raise Unsupported(form.pointer, "minimum", "its digits take too large an automaton") from None
        if not ways:
            raise Unsupported(form.pointer, "minimum", "no number that is written here satisfies it")
        return self._ebnf.rule(" | ".join(ways)) if len(ways) > 1 else ways[0]

    def _span(self, span: Span) -> str:
        ways = []
        for sources in span.alternatives():
            trees = [pattern.parse(source) for source in sources]
            if len(trees) == 1 and is_plain(trees[0]):
                ways.append(self._ebnf.rule(expression(trees[0])))
                continue
            automaton = dfa.build(trees, limit=LARGEST_AUTOMATON, work=WORK)
            if automaton is not None:
                ways.append(self._ebnf.automaton(automaton, ast.Chars, EMPTY))
        return " | ".join(ways)


def _keyword(form: Strings) -> str:
    return "pattern" if form.patterns or form.not_patterns else "format" if form.formats else "maxLength"


def _only_raw(node: Node) -> Node:
    """The tree without characters that JSON escapes."""
    match node:
        case ast.Chars(ranges):
            return ast.Chars(characters.intersection(ranges, RAW))
        case ast.Concat(parts):
            return ast.concat(map(_only_raw, parts))
        case ast.Union(options):
            return ast.union(map(_only_raw, options))
        case ast.Repeat(body, least, most):
            return ast.repeat(_only_raw(body), least, most)
        case _:
            return node
