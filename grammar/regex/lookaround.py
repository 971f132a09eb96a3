"""Does away with lookarounds, where an expression without them, or several together, say exactly the same.

    ^(?=A)(?!B)C$     ──►  ^C$ and ^A found, ^B not found
    ^ab(?!B)C$        ──►  ^abC$ found, ^abB not found: what stands before has one length, so it ends in one place
    C(?<!B)$          ──►  C$ found, B$ not found
    ^((?!B)c)*$       ──►  ^c*$ found, B not found
    ((?!-)[a-z-]+x)*  ──►  ([a-z][a-z-]*x)*: a look at one character narrows its neighbour, anywhere. So do word boundaries,
                           (?<=\\w)(?!\\w)|(?<!\\w)(?=\\w)

Trees only; no text of an expression is read here.
"""

from dataclasses import dataclass
from itertools import product
from math import prod

from trunkline.grammar.regex import ast, characters
from trunkline.grammar.regex.ast import Node, TooComplex
from trunkline.grammar.regex.characters import Ranges

CANNOT = "this lookaround cannot be enforced"
MOST_WAYS = 64  # that alternatives of lookarounds make together
MOST_LOOKS = 64
MOST_PARTS = 100_000  # of the sequences that a narrowed one is written out to


def word_boundary(wide: bool, *, negated: bool) -> Node:
    """`\\b`, or `\\B`. Narrow: where ECMA-262 and Python's `re` both see one."""
    word, other = ast.Chars(characters.word(wide)), ast.Chars(characters.complement(characters.word(not wide)))
    begin, end = ast.union((other, ast.START)), ast.union((other, ast.END))
    if not negated:
        sides: tuple[tuple[Node, Node], ...] = ((word, end), (begin, word))
    elif wide:
        sides = ((word, word), (begin, end))
    else:  # in an empty text, Python sees no \B before 3.14
        sides = ((word, word), (other, end), (ast.START, other))
    return ast.union(ast.concat((ast.Look(one, False, False), ast.Look(two, True, False))) for one, two in sides)


def split(tree: Node) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Trees without lookarounds: all of the first must be found in a text, none of the second. Raises TooComplex."""
    if not tree.has_look:
        return (tree,), ()
    num_looks, num_ways = _counts(tree)
    if num_looks > MOST_LOOKS or num_ways > MOST_WAYS:
        raise TooComplex("so many lookarounds cannot be enforced")
    must: list[Node] = []
    must_not: list[Node] = []
    main = ast.whole(tree)
    parts: list[Node] = list(main.parts) if isinstance(main, ast.Concat) else [main]
    while (at := _movable(parts)) is not None:
        look = parts.pop(at)
        assert isinstance(look, ast.Look)
        before, after = ast.concat(parts[:at]), ast.concat(parts[at:])
        aside = ast.concat((ast.START, before, look.body) if look.ahead else (look.body, after, ast.END))
        (must_not if look.negative else must).append(aside)
    tempered = _tempered(parts)
    if tempered is not None:
        parts[-1], forbidden = tempered
        must_not.append(ast.concat((ast.START, *parts[:-1], ast.ANY_TEXT, forbidden)))
    main = _localized(ast.concat(parts), at_start=True, at_end=True)
    return (_anchored(main), *must), tuple(must_not)


def _counts(node: Node) -> tuple[int, int]:
    """Lookarounds in a tree, and the product of all alternatives that have some."""
    match node:
        case ast.Look():
            return 1, 1
        case ast.Concat(inside) | ast.Union(inside):
            pairs = [_counts(one) for one in inside if one.has_look]
            looks, ways = sum(pair[0] for pair in pairs), prod(pair[1] for pair in pairs)
            return looks, ways * len(inside) if isinstance(node, ast.Union) and looks else ways
        case ast.Repeat(body):
            return _counts(body) if body.has_look else (0, 1)
        case _:
            return 0, 1


def _anchored(tree: Node) -> Node:
    return ast.concat((ast.START, tree, ast.END))


def _movable(parts: list[Node]) -> int | None:
    """The place of a lookaround that can be said apart: a lookahead behind parts, or a lookbehind before parts, of one length."""
    for at, part in enumerate(parts):
        if isinstance(part, ast.Look):
            beside = parts[:at] if part.ahead else parts[at + 1 :]
            least, most = ast.lengths(ast.concat(beside))
            if least == most and not part.body.has_look and not any(one.has_look for one in beside):
                return at
    return None


def _tempered(parts: list[Node]) -> tuple[Node, Node] | None:
    """`c*` and B, if the last part is `((?!B)c)*` and what stands before has one length."""
    match parts[-1] if parts else None:
        case ast.Repeat(
            ast.Concat((ast.Look(body=forbidden, ahead=True, negative=True), ast.Chars() as one)), least, most
        ):
            before = ast.concat(parts[:-1])
            shortest, longest = ast.lengths(before)
            # A B that is empty, or looks at the end of the text, would also be found behind the last character.
            if shortest == longest and not (before.has_look or forbidden.has_look or forbidden.is_nullable):
                return ast.repeat(one, least, most), forbidden
    return None


@dataclass(frozen=True)
class _Neighbour:
    """What a look asks of the character beside it: to be in `allowed`; or, if `or_none`, that there is none."""

    allowed: Ranges
    or_none: bool


def _neighbour(look: ast.Look) -> _Neighbour:
    """Raises TooComplex if the look is about more than one character."""
    edge = ast.END if look.ahead else ast.START
    options = look.body.options if isinstance(look.body, ast.Union) else (look.body,)
    ranges = [option.ranges for option in options if isinstance(option, ast.Chars)]
    at_edge = edge in options
    if len(ranges) + at_edge < len(options):
        raise TooComplex(CANNOT)
    allowed = characters.union(*ranges)
    if look.negative:
        return _Neighbour(characters.complement(allowed), not at_edge)
    return _Neighbour(allowed, at_edge)


def _localized(node: Node, *, at_start: bool, at_end: bool) -> Node:
    """Without lookarounds. `at_start`, `at_end`: nothing stands before or behind it in the text."""
    if not node.has_look:
        return node
    match node:
        case ast.Concat(parts):
            return _localized_parts(list(parts), at_start, at_end)
        case ast.Union(options):
            return ast.union(_localized(option, at_start=at_start, at_end=at_end) for option in options)
        case ast.Repeat(body, least, most):
            return ast.repeat(_localized(body, at_start=False, at_end=False), least, most)
        case ast.Look():
            return _localized_parts([node], at_start, at_end)
        case _:
            raise AssertionError(node)


def _localized_parts(parts: list[Node], at_start: bool, at_end: bool) -> Node:
    ways = _written_out(parts)
    if len(ways) > 1:
        return ast.union(_localized_parts(list(way), at_start, at_end) for way in ways)
    parts = list(ways[0])
    # Groups first: their own looks must be answered inside of them.
    for at, part in enumerate(parts):
        if not isinstance(part, ast.Look):
            first = at_start and at == 0
            last = at_end and at == len(parts) - 1
            parts[at] = _localized(part, at_start=first, at_end=last)
    while looks := [at for at, part in enumerate(parts) if isinstance(part, ast.Look)]:
        at = looks[0]
        look = parts.pop(at)
        assert isinstance(look, ast.Look)
        # Looks beside this one look from the same place; beyond its neighbours, up to the next look, nothing changes.
        if look.ahead:
            begin = next((i for i in range(at, len(parts)) if not isinstance(parts[i], ast.Look)), len(parts))
            end = next((i for i in range(begin, len(parts)) if isinstance(parts[i], ast.Look)), len(parts))
            is_edge = at_end and end == len(parts)
        else:
            end = next((i for i in range(at, 0, -1) if not isinstance(parts[i - 1], ast.Look)), 0)
            begin = next((i for i in range(end, 0, -1) if isinstance(parts[i - 1], ast.Look)), 0)
            is_edge = at_start and begin == 0
        parts[begin:end] = [_restricted(ast.concat(parts[begin:end]), _neighbour(look), is_edge, look.ahead)]
    return ast.concat(parts)


def _written_out(parts: list[Node]) -> list[tuple[Node, ...]]:
    """Alternatives with looks in them as alternatives of the whole sequence, so that the looks see their neighbours."""
    options = [part.options if isinstance(part, ast.Union) and part.has_look else (part,) for part in parts]
    ways = [ast.concat(way) for way in product(*options)]
    return [way.parts if isinstance(way, ast.Concat) else (way,) for way in ways]


def _restricted(node: Node, wanted: _Neighbour, is_edge: bool, ahead: bool) -> Node:
    """The texts of `node` whose first (last, if not ahead) character is wanted. `is_edge`: an empty one has no neighbour."""
    found = _nonempty(node, wanted.allowed, ahead)
    if not node.is_nullable:
        return found
    if not is_edge:
        raise TooComplex(CANNOT)
    return ast.union((found, ast.EMPTY)) if wanted.or_none else found


def _nonempty(node: Node, allowed: Ranges, ahead: bool) -> Node:
    """The texts of `node` that begin (end, if not ahead) with an allowed character."""
    match node:
        case ast.Chars(ranges):
            return ast.Chars(characters.intersection(ranges, allowed))
        case ast.Union(options):
            return ast.union(_nonempty(option, allowed, ahead) for option in options)
        case ast.Concat(parts):
            num_empty = next((at for at, part in enumerate(parts) if not part.is_nullable), len(parts))
            if num_empty * len(parts) > MOST_PARTS:
                raise TooComplex(CANNOT)
            ways = []
            for at in range(len(parts)) if ahead else reversed(range(len(parts))):
                one = _nonempty(parts[at], allowed, ahead)
                ways.append(ast.concat((one, *parts[at + 1 :]) if ahead else (*parts[:at], one)))
                if not parts[at].is_nullable:
                    break
            return ast.union(ways)
        case ast.Repeat(body, least, most):
            one = _nonempty(body, allowed, ahead)
            others = ast.repeat(body, max(0, least - 1), None if most is None else most - 1)
            return ast.concat((one, others) if ahead else (others, one))
        case _:
            raise TooComplex(CANNOT)
