"""What the algebra asks about regular expressions: is it found in this name, can both be found in one, is one within another.

Answers about a text may be None: ECMA-262 and Python's `re` would not say the same (or the expression is beyond us), so
neither yes nor no is safe. `doubted` remembers that this has happened.
"""

from trunkline.grammar.algebra.cases import Layer, StringCase
from trunkline.grammar.algebra.nodes import ALWAYS, IMPOSSIBLE, Conjunction, conjoin
from trunkline.grammar.interface import Unsupported
from trunkline.grammar.regex import pattern
from trunkline.grammar.regex.automaton import UNBOUNDED, Automaton, Budget, BudgetExceeded, is_empty, tree_of
from trunkline.grammar.schema import formats

Split = tuple[tuple[str, ...], tuple[str, ...]]

MOST_WORK = 20_000  # for one question about two languages


class Patterns:
    """Questions about the expressions of one schema, each answered once."""

    def __init__(self) -> None:
        self.doubted = False
        self._automata: dict[str, Automaton] = {}
        self._found: dict[tuple[str, str], bool | None] = {}
        self._within: dict[tuple[str, str], bool] = {}
        self._disjoint: dict[tuple[str, str], bool] = {}

    def split(self, source: str, pointer: str, keyword: str, *, wide: bool = False) -> Split:
        """All of the first expressions must be found, and none of the second. Raises Unsupported."""
        return pattern.split(source, wide=wide, pointer=pointer, keyword=keyword)

    def one(self, source: str, pointer: str, keyword: str, *, wide: bool = False) -> str:
        """The expression, normalized. Raises Unsupported."""
        return pattern.normalize(source, wide=wide, pointer=pointer, keyword=keyword)

    def for_names(self, source: str, additional: Conjunction, pointer: str, keyword: str) -> str:
        """The expression for names of properties. Where readers of it differ, what it asks for holds for the larger language; or,
        if other names are forbidden, only the smaller one is allowed. Raises Unsupported."""
        narrow, wide = (self.one(source, pointer, keyword, wide=wide) for wide in (False, True))
        if narrow != wide and additional is not ALWAYS and additional is not IMPOSSIBLE:
            raise Unsupported(pointer, keyword, f"{source!r} does not mean the same to every reader")
        return narrow if additional is IMPOSSIBLE else wide

    def is_clear(self, source: str) -> bool:
        """Whether every reader takes the expression for the same language."""
        try:
            return self.one(source, "", "pattern") == self.one(source, "", "pattern", wide=True)
        except Unsupported:
            return False

    def found(self, source: str, text: str) -> bool | None:
        """Whether the expression is found in the text; None if that is in doubt."""
        if (source, text) not in self._found:
            surely, perhaps = self._search(source, text, wide=False), self._search(source, text, wide=True)
            self._found[source, text] = surely if surely == perhaps else None
        answer = self._found[source, text]
        self.doubted |= answer is None
        return answer

    def _search(self, source: str, text: str, *, wide: bool) -> bool | None:
        try:
            found, missed = self.split(source, "", "pattern", wide=wide)
        except Unsupported:
            return not wide  # surely yes, perhaps no: in doubt
        try:
            return all(self._matches(one, text) for one in found) and not any(
                self._matches(one, text) for one in missed
            )
        except BudgetExceeded:
            return not wide

    def _matches(self, expression: str, text: str) -> bool:
        one = self._automata.get(expression)
        if one is None:
            one = self._automata[expression] = Automaton(tree_of(expression), Budget(UNBOUNDED))
        return one.takes(text)

    def has_format(self, name: str, text: str) -> bool | None:
        """True if the text surely has the format; None if its expression, which may be narrower, does not say."""
        try:
            if self._matches(formats.KNOWN[name], text):
                return True
        except BudgetExceeded:
            pass  # then nobody knows
        self.doubted = True
        return None

    def is_within(self, inner: str, outer: str) -> bool:
        """Wherever `inner` is found, `outer` surely is."""
        if inner == outer:
            return True
        if (inner, outer) not in self._within:
            self._within[inner, outer] = _is_empty((inner,), (outer,))
        return self._within[inner, outer]

    def are_disjoint(self, left: str, right: str) -> bool:
        """No text surely has both."""
        pair = (min(left, right), max(left, right))
        if pair not in self._disjoint:
            self._disjoint[pair] = _is_empty((left, right))
        return self._disjoint[pair]

    def is_empty(self, case: StringCase) -> bool:
        """Whether surely no string is left, as far as expressions and lengths tell."""
        sought = tuple(case.patterns) + tuple(formats.KNOWN[name] for name in case.formats)
        has_length = case.min_length or case.max_length is not None
        if len(sought) + len(case.not_patterns) + bool(has_length) < 2:
            return case.is_empty  # one thing alone is hardly ever impossible
        return _is_empty(sought, case.not_patterns, case.min_length, case.max_length)

    # --- names of properties

    def layer(
        self, named: dict[str, Conjunction], matched: tuple[tuple[str, Conjunction], ...], additional: Conjunction
    ) -> Layer:
        """A layer in which the patterns that match a given name are joined to what it must be."""
        if matched:
            for name, what in named.items():
                for source, under in matched:
                    if self.found(source, name) is not False:
                        what = conjoin(what, under)
                named[name] = what
        return Layer(named, matched, additional)

    def in_layer(self, layer: Layer, name: str) -> Conjunction:
        """What one layer asks of a property."""
        given = layer.properties.get(name)
        if given is not None:
            return given
        what, surely = ALWAYS, False
        for source, under in layer.patterns:
            found = self.found(source, name)
            if found is not False:
                what = conjoin(what, under)
            surely |= found is True
        return what if surely else conjoin(what, layer.additional)

    def under(self, layers: tuple[Layer, ...], name: str) -> Conjunction:
        """What all layers together ask of a property."""
        what = ALWAYS
        for layer in layers:
            what = conjoin(what, self.in_layer(layer, name))
        return what


def _is_empty(
    sought: tuple[str, ...], forbidden: tuple[str, ...] = (), min_length: int = 0, max_length: int | None = None
) -> bool:
    """Whether surely no text is one of all `sought` and none of `forbidden`."""
    try:
        return is_empty(sought, forbidden, min_length, max_length, work=MOST_WORK)
    except (BudgetExceeded, Unsupported):
        return False
