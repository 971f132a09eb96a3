"""The mark after which a text begins to follow its grammar, "</think>" say, and how much of it was just written.

    mark = Mark(b"</think>", tokens)
    mark.follow(0, b"so: </th")     # 4: these many bytes of it stand at the end of the text
    mark.follow(4, b"ink>\n")       # 8: all of it was written; white space may follow it in the same token
    mark.spilling(4)                # ids of tokens like b"ink>{", which write the mark and more
    mark.spelling(4)                # ids of tokens that write its rest: b"ink", b">"

What a token writes after the mark belongs to the grammar, which reads whole tokens only. So a token that completes the mark
may write nothing more than white space, which the grammar never sees; those that would are not allowed.

Knows bytes only: no matcher, no request.
"""

from collections.abc import Sequence

WHITE_SPACE = b" \t\r\n"


class Mark:
    """A state is the number of the mark's first bytes that end the text so far; len(mark) once it was written.

    Source: the prefix function of Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
    """

    def __init__(self, mark: bytes, tokens: Sequence[bytes]) -> None:
        """`tokens`: bytes of each id."""
        assert mark
        self.mark = mark
        self._tokens = tokens
        self._borders = _borders(mark)
        self._ids: dict[bytes, int] = {}  # of tokens that stand in the mark, once asked for
        self._spilling: dict[int, tuple[int, ...]] = {}  # by state, once asked for

    def __len__(self) -> int:
        return len(self.mark)

    def follow(self, state: int, token: bytes) -> int:
        """The state after a token."""
        return self._split(state, token)[0]

    def spilling(self, state: int) -> tuple[int, ...]:
        """The ids that would complete the mark and write something else than white space after it.

        The first question in a state looks at every token: some milliseconds.
        """
        if state not in self._spilling:
            rests, border = [], state
            while border:
                rests.append(self.mark[border:])
                border = self._borders[border]
            starts = tuple(rests)
            self._spilling[state] = tuple(
                token_id
                for token_id, token in enumerate(self._tokens)
                if (token.startswith(starts) or self.mark in token) and self._split(state, token)[1].strip(WHITE_SPACE)
            )
        return self._spilling[state]

    def spelling(self, state: int) -> tuple[int, ...]:
        """Tokens that write the rest of the mark: at each place the longest that is a part of it.

        Raises ValueError if the vocabulary cannot write it.
        """
        if not self._ids:
            self._ids = {
                token: token_id for token_id, token in reversed([*enumerate(self._tokens)]) if token in self.mark
            }
        spelled: list[int] = []
        while state < len(self.mark):
            ends = range(len(self.mark), state, -1)
            end = next((end for end in ends if self.mark[state:end] in self._ids), None)
            if end is None:
                raise ValueError(f"no token of the vocabulary begins {self.mark[state:]!r}")
            spelled.append(self._ids[self.mark[state:end]])
            state = end
        return tuple(spelled)

    def _split(self, state: int, token: bytes) -> tuple[int, bytes]:
        """The state after a token, and what of the token follows the mark."""
        for at, byte in enumerate(token):
            if state == len(self.mark):
                return state, token[at:]
            while state and self.mark[state] != byte:
                state = self._borders[state]
            state += self.mark[state] == byte
        return state, b""


def _borders(mark: bytes) -> list[int]:
    """[n]: the length of the longest proper beginning of mark[:n] that also ends it; 0 for n = 0."""
    borders = [0, 0]
    for end in range(1, len(mark)):
        border = borders[end]
        while border and mark[border] != mark[end]:
            border = borders[border]
        borders.append(border + (mark[border] == mark[end]))
    return borders
