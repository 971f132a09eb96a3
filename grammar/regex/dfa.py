"""Small complete automata: what a backend is given where its own language has no intersection and no complement.

    dfa = build(trees=[whole_tree("^[a-z]+$")], not_trees=[literal("no")], max_length=5, limit=500)
    dfa.moves[0]       ((97, 109, 1), (110, 110, 2), (111, 122, 1)): from state 0 by a to m, by n, by o to z
    dfa.accepting      (False, True, …)

Over characters, deterministic, without states from which no text ends, minimal if it has few states. 0 is where it
starts.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from trunkline.grammar.regex import ast, characters
from trunkline.grammar.regex.ast import Node
from trunkline.grammar.regex.automaton import DEFAULT_WORK, Budget, BudgetExceeded, Joint, Product

MOST_MINIMIZED = 300  # states: rounds times states is the work
MOST_WRITTEN = 50  # characters written on the way to a tree, for each that it may have: most are taken back


class Dfa(NamedTuple):
    """
    moves      per state: (first character, last character, next state), ascending
    accepting  per state: a text may end here
    """

    moves: tuple[tuple[tuple[int, int, int], ...], ...]
    accepting: tuple[bool, ...]


def build(
    trees: Iterable[Node],
    not_trees: Iterable[Node] = (),
    min_length: int = 0,
    max_length: int | None = None,
    *,
    limit: int,
    work: int = DEFAULT_WORK,
) -> Dfa | None:
    """The texts that all of `trees` match from end to end, and none of `not_trees`, of that many characters; None if
    there are none.

    Raises BudgetExceeded for more than `limit` states.
    """
    texts = Product(trees, not_trees, Budget(work))
    most = min_length if max_length is None else max_length
    start = texts.start, 0
    numbers = {start: 0}
    order: list[tuple[Joint, int]] = [start]
    moves: list[list[tuple[int, int, int]]] = []
    for joint, length in order:  # grows meanwhile
        row: list[tuple[int, int, int]] = []
        if max_length is None or length < max_length:
            for first, last, joint_after in texts.moves(joint):
                after = joint_after, min(length + 1, most)
                if after not in numbers:
                    if len(order) >= limit:
                        raise BudgetExceeded
                    numbers[after] = len(order)
                    order.append(after)
                row.append((first, last, numbers[after]))
        moves.append(row)
    accepting = [length >= min_length and texts.accepts(joint) for joint, length in order]
    return _trimmed(moves, accepting)


def _trimmed(moves: list[list[tuple[int, int, int]]], accepting: list[bool]) -> Dfa | None:
    """Without states from which no text ends; minimal if that is little work."""
    sources: list[set[int]] = [set() for _ in moves]
    for state, row in enumerate(moves):
        for _, _, target in row:
            sources[target].add(state)
    alive = {state for state, accepts in enumerate(accepting) if accepts}
    waiting = list(alive)
    while waiting:
        for state in sources[waiting.pop()] - alive:
            alive.add(state)
            waiting.append(state)
    if 0 not in alive:
        return None
    rows = [[move for move in row if move[2] in alive] if state in alive else [] for state, row in enumerate(moves)]
    block = _blocks(rows, accepting) if len(alive) <= MOST_MINIMIZED else list(range(len(rows)))
    return _renumbered(rows, accepting, block)


def _blocks(moves: list[list[tuple[int, int, int]]], accepting: list[bool]) -> list[int]:
    """State -> number of its block of equivalent states (Moore's refinement)."""
    block = [int(accepts) for accepts in accepting]
    count = len(set(block))
    while True:
        signatures: dict[object, int] = {}
        refined = [
            signatures.setdefault((block[state], _joined(row, block)), len(signatures))
            for state, row in enumerate(moves)
        ]
        if len(signatures) == count:
            return block
        block, count = refined, len(signatures)


def _joined(row: Iterable[tuple[int, int, int]], block: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Moves by block, neighbours with the same target as one."""
    joined: list[tuple[int, int, int]] = []
    for first, last, target in row:
        if joined and joined[-1][1] == first - 1 and joined[-1][2] == block[target]:
            joined[-1] = (joined[-1][0], last, block[target])
        else:
            joined.append((first, last, block[target]))
    return tuple(joined)


def _renumbered(moves: list[list[tuple[int, int, int]]], accepting: list[bool], block: list[int]) -> Dfa:
    """Blocks as states, numbered in the order in which they are first come to."""
    numbers = {block[0]: 0}
    members = [0]
    rows = []
    for member in members:  # grows meanwhile
        row = []
        for first, last, target in moves[member]:
            if block[target] not in numbers:
                numbers[block[target]] = len(members)
                members.append(target)
            row.append((first, last, numbers[block[target]]))
        rows.append(_joined(row, list(range(len(moves)))))
    return Dfa(tuple(rows), tuple(accepting[member] for member in members))


def to_tree(dfa: Dfa, *, limit: int) -> Node:
    """The regular expression of an automaton, made by taking out state after state.

    Raises BudgetExceeded where it would have more than `limit` characters.
    """
    start, end = -1, -2
    edges: dict[int, dict[int, Node]] = {start: {0: ast.EMPTY}, end: {}}
    sources: dict[int, set[int]] = {state: set() for state in range(len(dfa.moves))}
    sources[end] = set()
    for state, row in enumerate(dfa.moves):
        ranges: dict[int, list[tuple[int, int]]] = {}
        for first, last, target in row:
            ranges.setdefault(target, []).append((first, last))
        edges[state] = {target: ast.Chars(characters.union(pieces)) for target, pieces in ranges.items()}
        if dfa.accepting[state]:
            edges[state][end] = ast.EMPTY
        for target in edges[state]:
            sources[target].add(state)
    sources[0].add(start)

    def weight(state: int) -> int:
        """How many ways lead through a state."""
        return len(sources[state] - {state}) * len(edges[state].keys() - {state})

    queue = [(weight(state), state) for state in range(len(dfa.moves))]
    heapq.heapify(queue)
    total = 0
    while queue:
        seen, state = heapq.heappop(queue)
        if state not in edges:
            continue
        if weight(state) > seen:
            heapq.heappush(queue, (weight(state), state))
            continue
        onward = edges.pop(state)
        loop = ast.repeat(onward.pop(state), 0, None) if state in onward else ast.EMPTY
        before_it = sources.pop(state) - {state}
        for source in before_it:
            before = edges[source].pop(state)
            for target, after in onward.items():
                through = ast.concat((before, loop, after))
                known = edges[source].get(target)
                edges[source][target] = through if known is None else _either(known, through)
                sources[target].add(source)
                total += through.size
                if total > MOST_WRITTEN * limit or edges[source][target].size > limit:
                    raise BudgetExceeded
        for target in onward:
            sources[target].discard(state)
        for changed in {*before_it, *onward}:
            if changed >= 0:
                heapq.heappush(queue, (weight(changed), changed))
    return edges[start][end]


def _either(left: Node, right: Node) -> Node:
    if ast.EMPTY in (left, right):
        return ast.optional(right if left == ast.EMPTY else left)
    return ast.union((left, right))
