"""Rows of named things in any order, none of them twice, as rules of llguidance's Lark.

    any_order(lark, ", ", [Part('"a"', True), Part('"b"', False)], None, "]", 0, None)     a ] | a, b ] | b, a ]

The parameter of the rules (64 bits) has one bit for each part, which tells whether it was taken: first those of the parts that
must be there, then those of the others, then some for the extras. So what is still missing, and how many there are, can be asked
of a range of bits. As in llguidance_sequences, no rule leads to a place from which there is no way to the end.
"""

from collections.abc import Sequence

from trunkline.grammar.backends.llguidance.lark import LarkWriter, quote
from trunkline.grammar.backends.llguidance.sequences import PARAMETER_BITS, Part, repeated

MOST_PARTS = 60  # leaves some bits for extras


def any_order(
    lark: LarkWriter, comma: str, parts: Sequence[Part], extra: str | None, closing: str, least: int, most: int | None
) -> str:
    """Each part at most once, all that are required, any number of `extra` in between; `least` to `most` in all; then `closing`.

    No two parts are the same, but two extras may be: all of those count as one for `least`. There are 1 to MOST_PARTS parts, no
    more of them are required than `most`, and `least` is at most their number, one more if there is an extra. With `most`,
    the extras are at most as many as there are bits left for them.
    """
    order = _Order(lark, comma, parts, extra, closing, least, most)
    return order.bounded() if order.most is not None else order.unbounded()


def _when(*conditions: str) -> str:
    """What stands behind an alternative that needs all of these. Without any, one that always holds: see Counter.when."""
    both, *others = conditions or ["ge([0:1], 0)"]
    for condition in others:
        both = f"and({both}, {condition})"
    return f" %if {both}"


class _Order:
    """The arguments of `any_order`, with the required parts first. If there is room for no others, these are all."""

    def __init__(
        self,
        lark: LarkWriter,
        comma: str,
        parts: Sequence[Part],
        extra: str | None,
        closing: str,
        least: int,
        most: int | None,
    ) -> None:
        self.lark, self.comma, self.closing = lark, comma, closing
        self.required = sum(part.required for part in parts)
        self.parts, self.extra, self.least, self.most = sorted(parts, key=_is_optional), extra, least, most
        if most == self.required:
            self.parts, self.extra, self.most = self.parts[: self.required], None, None

    @property
    def size(self) -> int:
        return len(self.parts)

    def unbounded(self) -> str:
        """Extras stand in runs, between two parts, so that many of them do not make the rules go deep.

        Three rules: a part; what may follow a part; what may follow a run of extras.
        """
        part, after, after_run = (self.lark.fresh() for _ in range(3))
        self.lark.rule(f"{part}::_", self._take_parts(after, ()))
        another = f"{quote(self.comma)} {part}::_{_when(f'bit_count_lt([0:{self.size}], {self.size})')}"
        run = None if self.extra is None else f"{repeated(self.comma, self.extra, 1, None)} {after_run}"
        following = [self._close(), another]
        if run is not None:
            following.append(f"{quote(self.comma)} {run}::set_bit({self.size}){_when()}")
            self.lark.rule(f"{after_run}::_", [self._close(), another])
        self.lark.rule(f"{after}::_", following)
        return self._start([f"{part}::0", *([f"{run}::{1 << self.size}"] if run is not None else [])])

    def bounded(self) -> str:
        """The first extra sets the first bit behind those of the parts, and each further one the next. The further ones may be
        repetitions, so they are only as many as leave room for what is needed.

        Two rules: a part or an extra; what may follow it.
        """
        assert self.most is not None
        room = self.most - self.required
        repetitions = min(self.most - max(self.least, self.required), PARAMETER_BITS - self.size - 1)
        bits = self.size + (0 if self.extra is None else 1 + repetitions)
        has_room = f"bit_count_lt([{self.required}:{bits}], {room})"
        item, after = self.lark.fresh(), self.lark.fresh()
        items = self._take_parts(after, (has_room,))
        for bit in range(self.size, bits):
            is_next = [f"bit_clear({bit})", *([f"bit_set({bit - 1})"] if bit > self.size else [])]
            items.append(f"{self.extra} {after}::set_bit({bit}){_when(has_room, *is_next)}")
        self.lark.rule(f"{item}::_", items)
        is_more = f"bit_count_lt([0:{bits}], {min(self.most, bits)})"
        self.lark.rule(f"{after}::_", [self._close(), f"{quote(self.comma)} {item}::_{_when(is_more)}"])
        return self._start([f"{item}::0"])

    def _take_parts(self, to: str, conditions_of_others: Sequence[str]) -> list[str]:
        """Alternatives: each part that was not taken. Those that are not required have further conditions."""
        return [
            f"{part.text} {to}::set_bit({bit})"
            + _when(f"bit_clear({bit})", *(() if part.required else conditions_of_others))
            for bit, part in enumerate(self.parts)
        ]

    def _close(self) -> str:
        """The end, if there is all that is needed. Something was taken before."""
        conditions = [f"is_ones([0:{self.required}])"] if self.required else []
        if self.least > max(self.required, 1):
            conditions.append(f"bit_count_ge([0:{self.size + (self.extra is not None)}], {self.least})")
        return quote(self.closing) + _when(*conditions)

    def _start(self, firsts: list[str]) -> str:
        may_be_empty = not self.required and not self.least
        return self.lark.subrule([*firsts, *([quote(self.closing)] if may_be_empty else [])])


def _is_optional(part: Part) -> bool:
    return not part.required
