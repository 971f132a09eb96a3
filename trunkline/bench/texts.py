"""English-looking text of an exact number of tokens, from a word list and a seed. Knows a tokenizer's `encode`, no server.

    texts = Texts(lambda text: tokenizer.encode(text, add_special_tokens=False))
    system = texts.piece(1024, random.Random("7/system"), first=True)
    question = texts.piece(24, random.Random("7/question"))
    prompt = texts.join((system, 1024), (question, 24))     # checked: the first 1,024 tokens are the system prompt's

Pieces are whole words and end in a full stop, so the boundary between two is a boundary between tokens as well.
"""

import functools
import random
from collections.abc import Callable, Sequence
from importlib.resources import files

from trunkline.errors import ConfigError

SENTENCE_WORDS = (5, 14)  # a sentence has this many words: from, to
_CONTEXT = "the"  # costs are measured after a word: some tokenizers treat the start of a text differently


@functools.cache
def words() -> tuple[str, ...]:
    """The shipped list: about 1,500 plain English words in alphabetical order."""
    return tuple(files("trunkline.bench").joinpath("words.txt").read_text(encoding="ascii").split())


class Texts:
    """Writes pieces of text whose length in tokens is exact for one tokenizer.

    encode   text -> token ids, without special tokens
    """

    def __init__(self, encode: Callable[[str], Sequence[object]]) -> None:
        self._encode = encode
        self._costs: dict[str, int] = {}

    def count(self, text: str) -> int:
        """Tokens of a whole text."""
        return len(self._encode(text))

    def piece(self, tokens: int, rng: random.Random, *, first: bool = False) -> str:
        """Text of exactly `tokens` tokens: at the start of a prompt if `first`, else to be appended to another piece.

        Raises ConfigError if the tokenizer does not keep words apart, so that lengths do not add up.
        """
        full_stop = self._added(".")
        room = tokens - full_stop
        text = ""
        sentence_left = 0
        while room > 0:
            word = rng.choice(words())
            if sentence_left == 0 and room > 2 * max(self._by_cost):  # near its end, a piece is all one sentence
                if text:
                    text += "."
                    room -= full_stop
                sentence_left = rng.randint(*SENTENCE_WORDS)
                word = word.capitalize()
            gap = "" if first and not text else " "
            cost = self._added(gap + word) if gap else self.count(word)
            if not self._leaves_room(room - cost):
                word = rng.choice(self._fitting(room))
                cost = self._added(gap + word)
            text += gap + word
            room -= cost
            sentence_left = max(0, sentence_left - 1)
        text += "."
        seen = self.count(text) if first else self._added(text)
        if seen != tokens:
            raise ConfigError(
                f"The tokenizer makes {seen} tokens of a text meant to have {tokens}: it does not split text at spaces."
                " Name another one with --tokenizer; it need not be the served model's."
            )
        return text

    def join(self, *pieces: tuple[str, int]) -> str:
        """Concatenate (text, tokens) pieces, having checked that every boundary is a token boundary.

        Raises ConfigError if it is not.
        """
        whole = ""
        total = 0
        ids = list(self._encode("".join(text for text, _ in pieces)))
        for text, tokens in pieces:
            whole += text
            total += tokens
            if list(self._encode(whole)) != ids[:total]:
                raise ConfigError(
                    f"The tokenizer merges tokens across the boundary after {total} tokens, so a shared prefix would not be"
                    " one. Name another tokenizer with --tokenizer; it need not be the served model's."
                )
        return whole

    def _added(self, unit: str) -> int:
        """Tokens that `unit` adds to a text that ends in a word."""
        if unit not in self._costs:
            self._costs[unit] = self.count(_CONTEXT + unit) - self.count(_CONTEXT)
        return self._costs[unit]

    @functools.cached_property
    def _by_cost(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for word in words():
            found.setdefault(self._added(f" {word}"), []).append(word)
        return found

    def _leaves_room(self, room: int) -> bool:
        """True if `room` more tokens can be filled with words exactly."""
        return room == 0 or room >= min(self._by_cost)

    def _fitting(self, room: int) -> list[str]:
        """Words after which the rest of `room` can still be filled exactly."""
        fitting = [word for cost, some in self._by_cost.items() if self._leaves_room(room - cost) for word in some]
        if not fitting:
            raise ConfigError(
                f"No word fits into the last {room} tokens of a text. Name another tokenizer with --tokenizer."
            )
        return fitting
