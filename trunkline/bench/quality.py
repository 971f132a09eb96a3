"""Perplexity of a model on a text, through the engine itself: what a format of weights or of the KV cache costs in quality.

The text is cut into windows; each is read alone, and every token but its first is scored given those before it in the window:
perplexity = exp(- mean log-probability). Two settings are compared token by token on the same windows. Knows no engine: it is given
a function that scores.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trunkline.errors import ConfigError
from trunkline.outputs import PositionLogprobs

Score = Callable[
    [Sequence[list[int]]], list[tuple[PositionLogprobs, ...]]
]  # windows -> of each, its tokens from the second on


class Scores(NamedTuple):
    """Of every scored token: its log-probability, and the likeliest token there."""

    logprobs: list[float]
    likeliest: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-statistics.fmean(self.logprobs))

    @property
    def standard_error(self) -> float:
        """Of the perplexity, as if tokens were independent."""
        if len(self.logprobs) < 2:
            return math.nan
        return self.perplexity * statistics.stdev(self.logprobs) / math.sqrt(len(self.logprobs))


class Difference(NamedTuple):
    """What a setting differs by from a baseline, on the same tokens.

    perplexity_ratio   of the setting over the baseline: 1.01 is 1 % worse
    mean_logprob       mean difference of log-probabilities; below 0 is worse
    mean_absolute      mean of its absolute value: how far off a token's log-probability is
    same_likeliest     share of tokens at which both would choose the same
    """

    perplexity_ratio: float
    mean_logprob: float
    mean_absolute: float
    same_likeliest: float


def windows(token_ids: Sequence[int], length: int, *, most: int | None = None) -> list[list[int]]:
    """The text in pieces of `length` tokens; the rest at its end is left out, unless it is all there is.

    Raises ConfigError if there are fewer than two tokens.
    """
    if len(token_ids) < 2:
        raise ConfigError(f"The text has {len(token_ids)} tokens; two are the least that can be scored.")
    length = min(length, len(token_ids))
    pieces = [list(token_ids[start : start + length]) for start in range(0, len(token_ids) - length + 1, length)]
    return pieces[:most]


def score(pieces: Sequence[list[int]], run: Score) -> Scores:
    """Score every window."""
    logprobs: list[float] = []
    likeliest: list[int] = []
    for positions in run(pieces):
        for position in positions:
            logprobs.append(position.chosen.logprob)
            likeliest.append(position.top[0].token_id)
    return Scores(logprobs, likeliest)


def compare(setting: Scores, baseline: Scores) -> Difference:
    """How the one differs from the other."""
    differences = [one - other for one, other in zip(setting.logprobs, baseline.logprobs, strict=True)]
    same = sum(one == other for one, other in zip(setting.likeliest, baseline.likeliest, strict=True))
    return Difference(
        perplexity_ratio=setting.perplexity / baseline.perplexity,
        mean_logprob=statistics.fmean(differences),
        mean_absolute=statistics.fmean(map(abs, differences)),
        same_likeliest=same / len(differences),
    )
