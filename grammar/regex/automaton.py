"""Questions about the languages of regular expressions, answered by automata that are built only as far as they are walked.

    matches("^a", "abc")                            True
    is_empty(("^[a-z]+$",), ("^[a-c]",), 1, 5)      False: "d"
    is_empty(("^a", "^b"))                          True

An expression is given as text (`pattern.normalize`'s, or any that `pattern.parse` takes) and stands for all texts in which it is found; or
as a tree, and then stands for the texts that match it from end to end.

States are sets of terms: what may still follow (Antimirov, "Partial derivatives of regular expressions and finite automaton
constructions", 1996). Counted repeats stay counted, so `.{0,5000}` costs what is walked of it. Every question has a budget of work
and raises BudgetExceeded beyond it: a caller then says that it does not know. All questions about one constraint together have
one as well (`all_within`): a schema of a few hundred patterns has thousands of pairs of them.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise

from trunkline.grammar.regex import ast, characters, pattern
from trunkline.grammar.regex.ast import Node
from trunkline.grammar.regex.characters import Ranges, contains

Expression = str | Node
State = frozenset[int]
Move = tuple[int, int, State]  # (first, last, next) for characters first to last

DEFAULT_WORK = 100_000  # terms and ranges looked at; about a tenth of a second
UNBOUNDED = 1 << 62  # for work that is linear in a text
WORK_PER_LOOK = 1_000  # at the clock, about a millisecond apart
PARTS_PER_WORK = 4  # of a concatenation that is copied
SHORT = 500  # characters of an expression whose tree is remembered


class BudgetExceeded(Exception):
    """The question is too much work."""


class Budget:
    """Work that is left for a question, and with it for all within which it is asked.

    Raises BudgetExceeded if nothing is left for those.
    """

    def __init__(self, work: int = DEFAULT_WORK) -> None:
        self.left = work
        self._all = _all.get()
        self.spend(0)

    def spend(self, work: int) -> None:
        """Raises BudgetExceeded when there is not enough."""
        self.left -= work
        if self._all is not None:
            self._all.spend(work)
        if self.left < 0:
            raise BudgetExceeded


class _TimedBudget(Budget):
    """Ends with time as well. Work is counted roughly, and a hostile constraint finds what is counted worst.

    The time is what this thread computes: a busy machine refuses nothing that an idle one takes.
    """

    def __init__(self, work: int, seconds: float) -> None:
        self._deadline = time.thread_time() + seconds
        self._unlooked = 0  # work since the clock was looked at
        super().__init__(work)

    def spend(self, work: int) -> None:
        self._unlooked += 1 + work
        if self._unlooked >= WORK_PER_LOOK:
            self._unlooked = 0
            if time.thread_time() > self._deadline:
                self.left = -1
        super().spend(work)


_all: ContextVar[Budget | None] = ContextVar("all", default=None)


@contextmanager
def all_within(work: int, seconds: float = math.inf) -> Iterator[None]:
    """All that is asked meanwhile has so much work together, and so many seconds of this thread's CPU time."""
    token = _all.set(_TimedBudget(work, seconds))
    try:
        yield
    finally:
        _all.reset(token)


def spend(work: int) -> None:
    """For other work on the same constraint. Raises BudgetExceeded as soon as nothing is left of what `all_within` gives."""
    if (budget := _all.get()) is not None:
        budget.spend(work)


class Automaton:
    """The deterministic automaton of one tree without anchors. States that lead nowhere are left out of `moves`."""

    def __init__(self, tree: Node, budget: Budget) -> None:
        self._budget = budget
        self._terms: list[Node] = []
        self._ids: dict[Node, int] = {}
        self._linear: dict[int, list[tuple[Ranges, int]]] = {}
        self._moves: dict[State, tuple[Move, ...]] = {}
        self._anything = self._id(ast.ANY_TEXT)
        self.start: State = self._state([self._id(tree)])

    def accepts(self, state: State) -> bool:
        """Whether a text may end here."""
        return any(self._terms[term].is_nullable for term in state)

    def moves(self, state: State) -> tuple[Move, ...]:
        """Where characters lead, in their order; ranges do not overlap."""
        found = self._moves.get(state)
        if found is None:
            steps = [step for term in state for step in self._steps(term)]
            self._budget.spend(1 + len(state) + sum(len(ranges) for ranges, _ in steps))
            found = self._moves[state] = tuple(self._split(steps))
        return found

    def takes(self, text: str) -> bool:
        """Whether this is one of its texts."""
        state = self.start
        for character in text:
            self._budget.spend(1)
            state = self.after(state, ord(character))
            if not state:
                return False
        return self.accepts(state)

    def after(self, state: State, code: int) -> State:
        """Where one character leads; the empty state if nowhere."""
        return self._state(target for term in state for ranges, target in self._steps(term) if contains(ranges, code))

    def _id(self, term: Node) -> int:
        known = self._ids.get(term)
        if known is None:
            known = self._ids[term] = len(self._terms)
            self._terms.append(term)
        return known

    def _state(self, terms: Iterable[int]) -> State:
        """Where anything may follow, nothing else matters."""
        state = frozenset(terms)
        return frozenset((self._anything,)) if self._anything in state else state

    def _steps(self, term: int) -> list[tuple[Ranges, int]]:
        found = self._linear.get(term)
        if found is None:
            found = self._linear[term] = [(ranges, self._id(rest)) for ranges, rest in self._derive(self._terms[term])]
        return found

    def _derive(self, node: Node) -> Iterator[tuple[Ranges, Node]]:
        """First characters of a tree, and what follows them."""
        self._budget.spend(1)
        match node:
            case ast.Chars(ranges):
                if ranges:
                    yield ranges, ast.EMPTY
            case ast.Union(options):
                for option in options:
                    yield from self._derive(option)
            case ast.Concat(parts):
                for at, part in enumerate(parts):
                    rest = parts[at + 1 :]
                    self._budget.spend(len(rest) // PARTS_PER_WORK)
                    for ranges, after in self._derive(part):
                        yield ranges, ast.concat((after, *rest))
                    if not part.is_nullable:
                        break
            case ast.Repeat(body, least, most):
                rest_of = ast.repeat(body, max(0, least - 1), None if most is None else most - 1)
                for ranges, after in self._derive(body):
                    yield ranges, ast.concat((after, rest_of))
            case _:
                raise ValueError("automata are made of trees without anchors and lookarounds: use whole() first")

    def _split(self, steps: list[tuple[Ranges, int]]) -> Iterator[Move]:
        """Ranges that overlap, cut so that they don't; neighbours with the same target joined."""
        edges: dict[int, tuple[list[int], list[int]]] = {}  # place -> terms that begin there, terms that end before it
        for ranges, term in steps:
            for first, last in ranges:
                edges.setdefault(first, ([], []))[0].append(term)
                edges.setdefault(last + 1, ([], []))[1].append(term)
        active: dict[int, int] = {}
        pending: Move | None = None
        places = sorted(edges)
        for place, following in pairwise((*places, 0)):
            begin, end = edges[place]
            for term in begin:
                active[term] = active.get(term, 0) + 1
            for term in end:
                active[term] -= 1
                if not active[term]:
                    del active[term]
            if not active:
                continue
            self._budget.spend(len(active))
            target = self._state(active)
            if pending is not None and pending[1] == place - 1 and pending[2] == target:
                pending = (pending[0], following - 1, target)
            else:
                if pending is not None:
                    yield pending
                pending = (place, following - 1, target)
        if pending is not None:
            yield pending


Joint = tuple[State, ...]  # one state for each expression; an empty set in a negated one: it can't be found any more
JointMove = tuple[int, int, Joint]


class Product:
    """The product of automata: texts that all of some trees match from end to end, and none of others."""

    def __init__(self, trees: Iterable[Node], not_trees: Iterable[Node], budget: Budget) -> None:
        self.budget = budget
        self._wanted = [Automaton(tree, budget) for tree in trees]
        self._unwanted = [Automaton(tree, budget) for tree in not_trees]
        self._moves: dict[Joint, tuple[JointMove, ...]] = {}
        self.start: Joint = tuple(automaton.start for automaton in (*self._wanted, *self._unwanted))

    def accepts(self, joint: Joint) -> bool:
        """Whether a text may end here."""
        count = len(self._wanted)
        return all(map(Automaton.accepts, self._wanted, joint[:count])) and not any(
            map(Automaton.accepts, self._unwanted, joint[count:])
        )

    def moves(self, joint: Joint) -> tuple[JointMove, ...]:
        """Where characters lead; only to where none of the wanted is lost."""
        found = self._moves.get(joint)
        if found is None:
            pieces: list[JointMove] = [(first, last, ()) for first, last in characters.ALL]
            for at, automaton in enumerate((*self._wanted, *self._unwanted)):
                is_wanted = at < len(self._wanted)
                moves = automaton.moves(joint[at]) if joint[at] else ()
                pieces = list(_refined(pieces, moves, keep_gaps=not is_wanted))
                self.budget.spend(1 + len(pieces))
            found = self._moves[joint] = tuple(pieces)
        return found

    def successors(self, joints: Iterable[Joint]) -> set[Joint]:
        """All states one character on."""
        return {joint for state in joints for _, _, joint in self.moves(state)}


def _refined(pieces: list[JointMove], moves: tuple[Move, ...], *, keep_gaps: bool) -> Iterator[JointMove]:
    """Each piece cut at the ranges of moves, with the state that they lead to added; between them: the empty state, or nothing."""
    at = 0
    for first, last, joint in pieces:
        while at and moves[at - 1][1] >= first:
            at -= 1
        while at < len(moves) and moves[at][1] < first:
            at += 1
        place = first
        while place <= last:
            if at < len(moves) and moves[at][0] <= place:
                end = min(last, moves[at][1])
                yield place, end, (*joint, moves[at][2])
                if end == moves[at][1]:
                    at += 1
            else:
                end = min(last, moves[at][0] - 1) if at < len(moves) else last
                if keep_gaps:
                    yield place, end, (*joint, frozenset())
            place = end + 1


def _closure(texts: Product, joints: set[Joint], most_steps: int | None = None) -> set[Joint]:
    """All states that are at most so many characters away."""
    seen = set(joints)
    layer = seen
    steps = 0
    while layer and (most_steps is None or steps < most_steps):
        layer = texts.successors(layer) - seen
        seen |= layer
        steps += 1
    return seen


def tree_of(expression: Expression) -> Node:
    """Without anchors: all texts that the expression stands for. Raises Unsupported."""
    if not isinstance(expression, str):
        return expression
    return _tree_of_short(expression) if len(expression) <= SHORT else pattern.whole_tree(expression)


_tree_of_short = lru_cache(maxsize=1024)(pattern.whole_tree)


def matches(expression: Expression, text: str) -> bool:
    """Whether the text is one that the expression stands for. Work is linear in the text: it needs no budget of its own."""
    return text in matching(expression, (text,))


def matching(expression: Expression, texts: Iterable[str]) -> list[str]:
    """Those of the texts that the expression stands for. Raises BudgetExceeded only for what `all_within` is about."""
    automaton = Automaton(tree_of(expression), Budget(UNBOUNDED))
    return [text for text in texts if automaton.takes(text)]


def is_empty(
    patterns: tuple[Expression, ...] = (),
    not_patterns: tuple[Expression, ...] = (),
    min_length: int = 0,
    max_length: int | None = None,
    *,
    work: int = DEFAULT_WORK,
) -> bool:
    """Whether no text of that many characters is one of all `patterns` and none of `not_patterns`. Raises BudgetExceeded."""
    if max_length is not None and max_length < min_length:
        return True
    texts = Product(map(tree_of, patterns), map(tree_of, not_patterns), Budget(work))
    layer = {texts.start}
    seen = {frozenset(layer): 0}
    length = 0
    while length < min_length and layer:
        layer = texts.successors(layer)
        texts.budget.spend(len(layer))
        length += 1
        before = seen.setdefault(frozenset(layer), length)
        if before < length:  # it goes round: leave out whole rounds
            length = min_length - (min_length - length) % (length - before)
            seen = {frozenset(layer): length}
    return not any(map(texts.accepts, _closure(texts, layer, None if max_length is None else max_length - min_length)))
