"""From logits to tokens: penalties, bias, filters, the choice itself, and the log-probabilities reported beside it.

    penalties → logit_bias → banned ids → mask → temperature → min_p → top_k → top_p → argmax of logits + temperature × noise

A mask (trunkline/step.py) that leaves one token decides alone: the logits are then only looked at for soundness.

Rows are worked on one at a time, so a row's result can't depend on its neighbours, bit for bit. Noise is a function of
(seed, position, token id): see workers/noise.py. Log-probabilities are of the model's own distribution, before all of that.

Letters: L rows, V vocabulary. Token ids only: no text, no pages, no model here.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trunkline.errors import GenerationFailed
from trunkline.sampling import SamplingParams
from trunkline.step import Float32, Int32, LogitsRow, RowLogprobs, mask_bits
from trunkline.workers.noise import GUMBEL_SPAN, gumbel, gumbel_of_all

MIN_LOGPROB = -9999.0  # stands for log(0), as with OpenAI: JSON has no infinity

Indices = npt.NDArray[np.intp]
Float64 = npt.NDArray[np.float64]


class Samples(NamedTuple):
    """token_ids, logprobs, failed and fallback_logprobs as in StepResult."""

    token_ids: Int32
    logprobs: tuple[RowLogprobs | None, ...]
    failed: dict[int, str]
    fallback_logprobs: dict[int, RowLogprobs]


def sample(logits: torch.Tensor, rows: Sequence[LogitsRow], masks: Int32 | None = None) -> Samples:
    """Choose one token for each row of logits, float32 [L, V], or score the row's target.

    masks  int32 [M, at least V/32], of the rows that name one; see step.Masks

    A row that can't be answered (NaN or infinite logits, every token banned or masked, an id outside the vocabulary) gets
    token -1 and a sentence in `failed`; the other rows are as if it were not there.
    """
    assert logits.dtype == torch.float32 and len(logits) == len(rows), (logits.dtype, logits.shape, len(rows))
    token_ids = np.full(len(rows), -1, dtype=np.int32)
    logprobs: list[RowLogprobs | None] = [None] * len(rows)
    failed: dict[int, str] = {}
    fallbacks: dict[int, RowLogprobs] = {}
    # A tiny temperature overflows to -inf, which is right: that token is never chosen. NaN is looked for explicitly.
    with np.errstate(over="ignore", invalid="ignore"):
        for index, (row_logits, row) in enumerate(zip(logits.contiguous().numpy(), rows, strict=True)):
            try:
                mask = None if row.mask < 0 or masks is None else _Mask(masks[row.mask], len(row_logits))
                token_ids[index], logprobs[index] = _sample_row(row_logits, row, mask)
            except GenerationFailed as failure:
                failed[index] = failure.message
                continue
            if row.logprobs is not None and row.fallback >= 0:
                fallbacks[index] = _score(row_logits, row.fallback, row.logprobs)
    return Samples(token_ids, tuple(logprobs), failed, fallbacks)


def allowed_tokens(mask: Int32, vocab_size: int) -> Indices:
    """The token ids below `vocab_size` whose bits are set in a mask row, ascending."""
    return np.flatnonzero(mask_bits(mask)[:vocab_size])


class _Mask:
    """A mask row, int32, for `vocab_size` tokens. Its ids are listed only where they are needed: they may be all of them."""

    def __init__(self, words: Int32, vocab_size: int) -> None:
        self._words = words[: -(-vocab_size // 32)]
        self._vocab_size = vocab_size

    def __contains__(self, token_id: int) -> bool:
        return bool(int(self._words[token_id // 32]) >> token_id % 32 & 1)

    @property
    def ids(self) -> Indices:
        """See allowed_tokens."""
        return allowed_tokens(self._words, self._vocab_size)

    @property
    def at_most_one(self) -> list[int] | None:
        """The one id, or none; None if there are more."""
        if np.count_nonzero(self._words) > 2:  # one of them may hold bits beyond the vocabulary only
            return None
        lowest: list[int] = []
        for word in np.flatnonzero(self._words).tolist():
            bits = int(self._words[word]) & 0xFFFFFFFF
            while bits and len(lowest) < 2:
                lowest.append(32 * word + (bits & -bits).bit_length() - 1)
                bits &= bits - 1
        ids = [token_id for token_id in lowest if token_id < self._vocab_size]
        return ids if len(ids) <= 1 else None


def _sample_row(logits: Float32, row: LogitsRow, mask: _Mask | None) -> tuple[int, RowLogprobs | None]:
    top = logits.max()  # NaN if any is NaN
    if not np.isfinite(top):
        raise GenerationFailed(not_finite(row.position, top))
    token_id = -1
    scored = row.target
    if row.sampling is not None and mask is not None and (only := mask.at_most_one) is not None:
        scored = token_id = _only(only, row)
    elif row.sampling is not None:
        scored = token_id = _choose(_adjust(logits, row, row.sampling), row, row.sampling, mask)
    if row.logprobs is None or scored < 0:
        return token_id, None
    return token_id, _score(logits, scored, row.logprobs)


def _only(allowed: list[int], row: LogitsRow) -> int:
    """The one token that the mask leaves."""
    if not allowed:
        raise GenerationFailed(nothing_allowed(row.position))
    return allowed[0]


# Why rows fail; the sampler on the device says the same.

PROMPT, OUTPUT, BIAS = "The prompt holds", "The output holds", "'logit_bias' names"  # who holds token ids
ALL_BANNED = "No token is left to choose: only ids that 'min_tokens' or 'bad_words' forbids have any chance. Ask for less of them."
IMPOSSIBLE = (
    "No token is left to choose: those that the grammar or 'allowed_token_ids' allows are impossible by the logits, or"
    " 'min_tokens' or 'logit_bias' forbids them."
)


def not_finite(position: int, top: np.floating) -> str:
    return (
        f"The model's largest logit at position {position} is {top}; it must be finite."
        " The weights or the KV cache hold numbers that the model's dtype can't represent: try --dtype float32."
    )


def nothing_allowed(position: int) -> str:
    return (
        f"The grammar leaves no token for position {position}, or 'bad_words' and 'min_tokens' leave none of 'allowed_token_ids': no"
        " token of this model's vocabulary continues the text as they allow. Ask for less of them; or use another grammar, and write"
        " to the maintainers if it is a JSON schema."
    )


def too_strong(top: np.floating) -> str:
    return f"With penalties and 'logit_bias' the largest logit is {top}; it must be finite. Use milder ones."


def check_vocabulary(token_ids: npt.NDArray[np.integer], vocab_size: int, holder: str, *, futures: int = 0) -> None:
    """Raises GenerationFailed, which names the first wrong id.

    holder   PROMPT, OUTPUT or BIAS
    futures  rows of the step before: ids from -1 to -futures stand for what they choose
    """
    if len(token_ids) and not (token_ids.min() >= -futures and token_ids.max() < vocab_size):
        wrong = next(int(token_id) for token_id in token_ids if not -futures <= token_id < vocab_size)
        raise GenerationFailed(f"{holder} token id {wrong}; the model's ids are 0 to {vocab_size - 1}.")


# Adjustments: what makes tokens more or less likely, greedy or not.


def _adjust(logits: Float32, row: LogitsRow, sampling: SamplingParams) -> Float32:
    """Logits after penalties, bias and bans, float32 [V]: a copy, or `logits` itself if there are none."""
    if not (sampling.penalizes or sampling.logit_bias or row.banned):
        return logits
    adjusted = logits.copy()
    if sampling.penalizes:
        _penalize(adjusted, row, sampling)
    if sampling.logit_bias:
        biased = np.fromiter(sampling.logit_bias, dtype=np.int64)
        check_vocabulary(biased, len(logits), BIAS)
        adjusted[biased] += np.fromiter(sampling.logit_bias.values(), dtype=np.float32)
    # A stop id outside the vocabulary can't be chosen anyway.
    adjusted[[token_id for token_id in row.banned if token_id < len(logits)]] = -np.inf
    top = adjusted.max()
    if not np.isfinite(top):
        raise GenerationFailed(ALL_BANNED if top == -np.inf else too_strong(top))
    return adjusted


def _penalize(adjusted: Float32, row: LogitsRow, sampling: SamplingParams) -> None:
    """Repetition penalty over prompt and output, then presence and frequency penalties over the output, in place."""
    assert row.prompt is not None and row.output is not None, "a row that penalizes needs its prompt and output"
    check_vocabulary(row.prompt, len(adjusted), PROMPT)
    check_vocabulary(row.output, len(adjusted), OUTPUT)
    counts = np.bincount(row.output, minlength=len(adjusted))  # int64 [V]
    if sampling.repetition_penalty != 1:
        seen = counts > 0
        seen[row.prompt] = True
        ids = np.flatnonzero(seen)
        old = adjusted[ids]
        adjusted[ids] = np.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    ids = np.flatnonzero(counts)
    adjusted[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts[ids]


# The choice.


def _choose(logits: Float32, row: LogitsRow, sampling: SamplingParams, mask: _Mask | None) -> int:
    """The chosen token id: the likeliest (of equals the lowest id), or a draw from the filtered softmax.

    mask  of those that may be chosen; None: all
    """
    if sampling.greedy:
        best = int(logits.argmax())
        if mask is None or best in mask:  # what a model wants is mostly what its grammar allows
            return best
    candidates = _Candidates(None, logits) if mask is None else _Candidates(ids := mask.ids, logits[ids])
    if mask is not None and candidates.logits.max() == -np.inf:
        raise GenerationFailed(IMPOSSIBLE)
    if sampling.greedy and candidates.ids is not None:
        return int(candidates.ids[candidates.logits.argmax()])
    candidates = _filter(candidates, sampling)
    if candidates.ids is None:
        scores = gumbel_of_all(row.seed, row.position, len(logits))
    else:
        scores = gumbel(row.seed, row.position, candidates.ids)
    scores *= sampling.temperature
    scores += candidates.logits  # in float64
    best = int(scores.argmax())
    return best if candidates.ids is None else int(candidates.ids[best])


class _Candidates(NamedTuple):
    """Tokens that may be chosen, ascending, and their logits; ids None stands for the whole vocabulary, uncopied."""

    ids: Indices | None
    logits: Float32

    def keep(self, indices: Indices) -> "_Candidates":
        return _Candidates(indices if self.ids is None else self.ids[indices], self.logits[indices])


def _filter(left: _Candidates, sampling: SamplingParams) -> _Candidates:
    """What min_p, then top_k, then top_p leave. Never empty: the likeliest stays.

    As in vLLM, top_p is a share of what the filters before it left. Among equal logits the lowest ids stay, so exactly
    top_k tokens are left, and the nucleus is the same wherever it is computed.
    """
    top, num_all = float(left.logits.max()), len(left.logits)
    if sampling.min_p > 0:
        left = left.keep(np.flatnonzero(left.logits >= top + sampling.temperature * math.log(sampling.min_p)))
    if 0 < sampling.top_k < len(left.logits):
        left = left.keep(_largest(left.logits, _kth_largest(left.logits, sampling.top_k), sampling.top_k))
    if sampling.top_p < 1:
        left = left.keep(_nucleus(_weights(left.logits, top, sampling.temperature), sampling.top_p))
    # Not a filter but a saving: noise lifts no other token to the top. Making all noise beats picking over a quarter.
    near = left.logits >= top - GUMBEL_SPAN * sampling.temperature
    if left.ids is not None or 4 * np.count_nonzero(near) < num_all:
        left = left.keep(np.flatnonzero(near))
    return left


def _nucleus(weights: Float64, top_p: float) -> Indices:
    """Indices of the fewest weights, largest first, that sum to `top_p` of the total; at least one.

    Only weights over `floor` need sorting: all those below it together can't make up the `1 - top_p` that may be missing.
    """
    total = weights.sum()
    floor = (1 - top_p) * total / len(weights)
    descending = np.sort(weights[weights >= floor])[::-1]
    count = int(np.searchsorted(np.cumsum(descending), top_p * total)) + 1
    count = min(count, len(descending))  # rounding may leave the sum just short of a top_p near 1
    return _largest(weights, descending[count - 1], count)


def _largest(values: npt.NDArray[np.floating], smallest: float, count: int) -> Indices:
    """Indices (ascending) of the `count` largest values, the least of which is `smallest`; of equals the first stay."""
    keep = np.flatnonzero(values >= smallest)
    excess = len(keep) - count
    if excess > 0:
        ties = np.flatnonzero(values[keep] == smallest)
        keep = np.delete(keep, ties[len(ties) - excess :])
    return keep


def _kth_largest(values: Float32, k: int) -> float:
    """torch.topk beats numpy.partition three to one here."""
    return torch.topk(torch.from_numpy(values), k, sorted=False).values.min().item()


def _weights(logits: Float32, top: float, temperature: float) -> Float64:
    """exp((logits - top) / temperature): the softmax before it is divided by its sum."""
    weights = logits.astype(np.float64)
    weights -= top
    weights /= temperature
    return np.exp(weights, out=weights)


# The report.


def _score(logits: Float32, token_id: int, num_alternatives: int) -> RowLogprobs:
    """Log-probability and rank of a token, and of the likeliest tokens: equals are ranked by id."""
    check_vocabulary(np.array([token_id]), len(logits), PROMPT)
    top = float(logits.max())
    log_total = top + math.log(_weights(logits, top, 1.0).sum())
    count = min(num_alternatives, len(logits))
    alternatives = np.empty(0, dtype=np.intp)
    if count > 0:
        alternatives = _largest(logits, _kth_largest(logits, count), count)
        alternatives = alternatives[np.argsort(-logits[alternatives], kind="stable")]
    ids = np.concatenate(([token_id], alternatives))
    own = logits[token_id]
    return RowLogprobs(
        token_ids=ids.astype(np.int32),
        logprobs=np.maximum(logits[ids].astype(np.float64) - log_total, MIN_LOGPROB).astype(np.float32),
        rank=1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token_id] == own)),
    )
