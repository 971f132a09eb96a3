"""What a compiled grammar costs for every token of a text: masks filled along texts chosen at random."""

import random
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from trunkline.grammar.interface import CompiledGrammar, MatcherFailed
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.step import Int32, mask_bits

NUM_MASKS = 48
LONGEST_WALK = 24  # tokens; then another text begins
DRAWS = 32


class MaskCost(NamedTuple):
    """Seconds of one mask.

    median, worst
    usual   a quarter take longer: what a text pays that stays in the costly places, but not what only the first one pays
    """

    median: float
    usual: float
    worst: float


def allowed_ids(row: Int32) -> Int32:
    """int32 [n]: the token ids whose bits are set in a row, int32 [W], ascending."""
    return np.flatnonzero(mask_bits(row)).astype(np.int32)


def measure_masks(compiled: CompiledGrammar, vocabulary: Vocabulary, clock: Callable[[], float]) -> MaskCost:
    """Fill NUM_MASKS masks along texts whose tokens are drawn from what is allowed, always the same texts.

    clock  seconds. Raises MatcherFailed.
    """
    rng = random.Random(0)
    row = np.zeros(vocabulary.num_words, np.int32)
    seconds: list[float] = []
    matcher, length = compiled.matcher(), 0
    while len(seconds) < NUM_MASKS:
        started_at = clock()
        matcher.fill(row)
        seconds.append(clock() - started_at)
        token = _draw(allowed_ids(row), vocabulary, rng)
        if token is None or length == LONGEST_WALK:
            matcher, length = compiled.matcher(), 0
            continue
        if not matcher.accept(token):
            raise MatcherFailed("a token that the mask allows was refused")
        length += 1
    return MaskCost(statistics.median(seconds), sorted(seconds)[NUM_MASKS * 3 // 4], max(seconds))


def _draw(ids: Int32, vocabulary: Vocabulary, rng: random.Random) -> int | None:
    """One of them that ends no text, and that is not blank if that is found soon: blanks lead nowhere new."""
    drawn: int | None = None
    for _ in range(DRAWS):
        token = int(ids[rng.randrange(len(ids))]) if len(ids) else -1
        if token >= 0 and token not in vocabulary.eos_token_ids:
            drawn = token
            if vocabulary.tokens[token].strip():
                break
    return drawn
