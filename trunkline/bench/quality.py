"""Perplexity of a model on a text, through the engine itself: what a format of weights or of the KV cache costs in quality.

The text is cut into windows; each is read alone, and every token but its first is scored given those before it in the window:
perplexity = exp(- mean log-probability). Two settings are compared token by token on the same windows, and by what they write
themselves behind the beginnings of some. Knows no engine: it is given functions that score and write.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from trunkline.bench.tables import NONE, align
from trunkline.errors import ConfigError
from trunkline.outputs import PositionLogprobs

# Of each window, its tokens from the second on.
Score = Callable[[Sequence[list[int]]], list[tuple[PositionLogprobs, ...]]]
# Of each prompt, the likeliest tokens that follow it, as many as are asked for.
Write = Callable[[Sequence[list[int]], int], list[tuple[int, ...]]]

SHARE_READ = 4  # a text that is continued is the first so many-th part of a window


def shipped_text() -> str:
    """79 KB, 21,000 tokens of SmolLM2: English prose of several kinds, questions and answers, Python, tables and JSON.

    It stays as it is, so that numbers of different versions can be compared. First come excerpts whose authors have been dead for over a
    century, in the public domain (Carroll, Austen, Melville, Lincoln, Shakespeare, Darwin); the rest was written for Trunkline, much of
    it as documentation, and has its licence, Apache-2.0.
    """
    return files("trunkline.bench").joinpath("quality.txt").read_text(encoding="utf-8")


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
    same_likeliest     greedy agreement: share of tokens at which both would choose the same, each time behind the text's own tokens
    """

    perplexity_ratio: float
    mean_logprob: float
    mean_absolute: float
    same_likeliest: float


class Parting(NamedTuple):
    """How long two settings write the same, greedily, each behind its own tokens: one early difference is all it takes.

    same_tokens  mean number of tokens before the first that differs
    same_texts   share of texts that are the same to the end
    """

    same_tokens: float
    same_texts: float


class Measured(NamedTuple):
    """One setting.

    settings  what it differs by from the flags
    weights   how they are stored, for people
    written   its continuations
    """

    settings: dict[str, Any]
    weights: str
    scores: Scores
    written: list[tuple[int, ...]]

    def numbers(self, baseline: "Measured | None") -> dict[str, Any]:
        """For JSON; without a baseline, or of itself, nothing is compared."""
        numbers: dict[str, Any] = {"settings": self.settings, "weights": self.weights}
        numbers |= {"perplexity": self.scores.perplexity, "standard_error": self.scores.standard_error}
        if baseline is not None and baseline is not self:
            numbers |= compare(self.scores, baseline.scores)._asdict()
            if self.written:
                numbers |= part(self.written, baseline.written)._asdict()
        return numbers


def windows(token_ids: Sequence[int], length: int, *, most: int | None = None) -> list[list[int]]:
    """The text in pieces of `length` tokens; the rest at its end is left out, unless it is all there is.

    Raises ConfigError if there are fewer than two tokens.
    """
    if len(token_ids) < 2:
        raise ConfigError(f"The text has {len(token_ids)} tokens; two are the least that can be scored.")
    length = min(length, len(token_ids))
    pieces = [list(token_ids[start : start + length]) for start in range(0, len(token_ids) - length + 1, length)]
    return pieces[:most]


def beginning(piece: list[int]) -> list[int]:
    """What of a window is continued."""
    return piece[: max(1, len(piece) // SHARE_READ)]


def score(pieces: Sequence[list[int]], run: Score) -> Scores:
    """Score every window."""
    logprobs: list[float] = []
    likeliest: list[int] = []
    for positions in run(pieces):
        for position in positions:
            logprobs.append(position.chosen.logprob)
            likeliest.append(position.top[0].token_id)
    return Scores(logprobs, likeliest)


def measure(
    settings: dict[str, Any],
    weights: str,
    pieces: Sequence[list[int]],
    run: Score,
    write: Write,
    *,
    continuations: int,
    tokens: int,
) -> Measured:
    """Score every window, and continue the beginnings of the first `continuations` by `tokens` tokens."""
    beginnings = [beginning(piece) for piece in pieces[:continuations]]
    scores = score(pieces, run)
    return Measured(settings, weights, scores, write(beginnings, tokens) if beginnings else [])


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


def part(setting: Sequence[tuple[int, ...]], baseline: Sequence[tuple[int, ...]]) -> Parting:
    """Where the texts of the one, at least one, leave those of the other."""
    common = [
        next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for one, other in zip(setting, baseline, strict=True)
    ]
    return Parting(
        same_tokens=statistics.fmean(common),
        same_texts=sum(one == other for one, other in zip(setting, baseline, strict=True)) / len(common),
    )


def table(measured: Sequence[Measured], baseline: Measured | None) -> str:
    """A row for each setting; the baseline's comes last."""
    rows: list[Sequence[str]] = [
        (
            "format",
            "weights",
            "perplexity",
            "× baseline",
            "same likeliest",
            "log-probability off by",
            "same tokens written",
        )
    ]
    for one in [*measured, *([baseline] if baseline is not None and baseline not in measured else [])]:
        found = one.numbers(baseline)
        cells = [NONE] * 4
        if "perplexity_ratio" in found:
            cells[:3] = (
                f"{found['perplexity_ratio']:.4f}",
                f"{100 * found['same_likeliest']:.2f} %",
                f"{found['mean_absolute']:.4f} ({found['mean_logprob']:+.4f})",
            )
        if "same_tokens" in found:
            cells[3] = f"{found['same_tokens']:.1f}; {100 * found['same_texts']:.0f} % to the end"
        perplexity = f"{found['perplexity']:.4f} ± {found['standard_error']:.4f}"
        rows.append((_name(one, baseline), one.weights, perplexity, *cells))
    return align(rows)


def named(settings: dict[str, Any]) -> str:
    """As they are written: "dtype=float32, kv-cache-dtype=fp8"."""
    return ", ".join(f"{key.replace('_', '-')}={value}" for key, value in settings.items())


def _name(one: Measured, baseline: Measured | None) -> str:
    settings = named(one.settings)
    if one is baseline:
        return f"baseline: {settings}" if settings else "baseline"
    return settings or "as served"
