"""What the kernels of sampling know of a row: a table of numbers, and float32 logits as integers that can be searched.

A key is an int32 that is ordered as its logit is: 0.0 and -0.0 have the same, NaN has the largest. A ranked key is an int64 with the
key in its high half; of equal logits the one with the lower token id is the larger. So one maximum finds a logit and its token, and
whether there is a NaN.

Letters: N rows that there is room for, L rows of a step, V vocabulary.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import enum
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LANES = 128  # blocks of a row whose results one program merges
BLOCK = 4096  # tokens of a block
MAX_VOCAB = LANES * BLOCK


class Kind(enum.IntEnum):
    """What is done with a row: nothing is chosen, the likeliest token is, or a draw."""

    LOOK = 0
    GREEDY = 1
    DRAW = 2


class Status(enum.IntEnum):
    """Why a row failed; OK if it did not. Of several reasons the first counts."""

    OK = 0
    NOT_FINITE = 1  # the model's largest logit is not finite
    NOTHING_ALLOWED = 2  # its mask has no bit
    REFUSED = 3  # it was refused before it came here
    ALL_BANNED = 4  # after penalties, bias and bans the largest logit is -inf
    TOO_STRONG = 5  # … or +inf
    IMPOSSIBLE = 6  # all that its mask allows have logits of -inf


# Columns of RowTable.reals
TEMPERATURE, MIN_P_REACH, TOP_P, TOP_P_REACH, PRESENCE, FREQUENCY, REPETITION = map(tl.constexpr, range(7))
REALS = tl.constexpr(8)
# Columns of RowTable.integers
KIND, POSITION, TOP_K, MASK, ADJUSTED, IS_REFUSED = map(tl.constexpr, range(6))
INTEGERS = tl.constexpr(8)
# Columns of RowTable.adjusts
ROW, PROMPT, OUTPUT, OUTPUT_END, CHANGES, CHANGES_END = map(tl.constexpr, range(6))
ADJUSTS = tl.constexpr(8)
# Columns of RowTable.reports, behind ROW
TARGET, ALTERNATIVES = tl.constexpr(1), tl.constexpr(2)
REPORTS = tl.constexpr(4)
# Columns of Workspace.state
IS_PENDING, TOP, THRESHOLD, LAST_ID, LOW, HIGH, LENGTH, STAY = map(tl.constexpr, range(8))
STATE = tl.constexpr(8)

GREEDY = tl.constexpr(int(Kind.GREEDY))
DRAW = tl.constexpr(int(Kind.DRAW))
NO_KEY = tl.constexpr(-(2**31))  # below the key of -inf
NAN_KEY = tl.constexpr(2**31 - 1)
INFINITY_KEY = tl.constexpr(0x7F800000)
NO_RANKED_KEY = tl.constexpr(-(2**63))
LOW_HALF = tl.constexpr(2**32 - 1)
LARGEST_ID = tl.constexpr(2**31 - 1)


class RowTable(NamedTuple):
    """Parameters of the rows of a step, on the device.

    reals     float64 [N, 8]  temperature, how far below the top min_p reaches (temperature * log(min_p); -inf: no limit), top_p, how
                              far top_p can reach at most, presence, frequency and repetition penalty
    seeds     int64 [N]
    integers  int32 [N, 8]    Kind, position (modulo 2**32), top_k (0: no limit), row of the masks (-1: none), place in `adjusts`
                              (-1: none), 1 if the row is refused
    draws     int32 [N]       rows that draw
    filters   int32 [N]       those of them that have a top_k or top_p
    adjusts   int32 [N, 8]    row; begin of its prompt's ids in `words`, of its output's, and their end; begin and end of its changes:
                              pairs of a token id and the bits of a float32 that is added to its logit, or -inf
    reports   int32 [2 N, 4]  row, the token id that is scored (-1: the chosen one), number of alternatives
    words     int32 [any]     what `adjusts` points at; an id of -1 - r is the token that row r of the step before chose
    """

    reals: Tensor
    seeds: Tensor
    integers: Tensor
    draws: Tensor
    filters: Tensor
    adjusts: Tensor
    reports: Tensor
    words: Tensor


class Counts(NamedTuple):
    """How many rows of a table are filled."""

    rows: int
    draws: int
    filters: int
    adjusts: int
    reports: int


class Workspace(NamedTuple):
    """Memory that kernels pass on to each other, on the device; B blocks of a row.

    ranked    int64 [N, 3, LANES]       largest ranked keys of blocks: of all logits, of the adjusted, of those that the mask allows
    allowed   int32 [N, LANES]          tokens of a block that the mask allows
    state     int32 [N, 8]              1 while a row waits for its draw; keys of its largest logit and of the smallest that may be
                                        drawn, and the last token id of those that have this one; filters.py's own: bounds of the
                                        latter, length of the list, and how many of its tokens stay (-1: all)
    scores    float64 [N, LANES]        largest scores of blocks
    winners   int32 [N, LANES]          and whose they are
    lists     int32 [N, LIST]           keys of a row among which its threshold is
    totals    float64 [N]               weight of the tokens that min_p leaves
    adjusted  float32 [any, V]          logits of the rows in RowTable.adjusts after penalties, bias and bans
    peaks     float32 [2 N, LANES, 2]   of reports: largest logits of blocks, and sums of exp(logit - largest)
    ranks     int32 [2 N, LANES]        tokens of a block that are likelier than the one that is scored
    likeliest int64 [2 N, B, 20]        ranked keys of the likeliest of a block
    """

    ranked: Tensor
    allowed: Tensor
    state: Tensor
    scores: Tensor
    winners: Tensor
    lists: Tensor
    totals: Tensor
    adjusted: Tensor
    peaks: Tensor
    ranks: Tensor
    likeliest: Tensor


@triton.jit
def to_key(logits):
    """Keys of float32 logits, int32."""
    logits = tl.where(logits == 0, 0.0, logits)  # -0.0 is 0.0
    bits = logits.to(tl.int32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > INFINITY_KEY
    return tl.where(is_nan, NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def to_logit(keys):
    """The float32 logits of keys; of a NaN some NaN."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def to_ranked(keys, ids):
    """Ranked keys of keys and token ids, int64."""
    return (keys.to(tl.int64) << 32) | (ids ^ LARGEST_ID).to(tl.int64)


@triton.jit
def key_of(ranked):
    return (ranked >> 32).to(tl.int32)


@triton.jit
def id_of(ranked):
    return ((ranked & LOW_HALF) ^ LARGEST_ID).to(tl.int32)


@triton.jit
def is_allowed(masks_ptr, mask, mask_stride, ids, inside):
    """Whether row `mask` of the masks (-1: none) allows token ids."""
    words = tl.load(masks_ptr + mask.to(tl.int64) * mask_stride + ids // 32, mask=inside & (mask >= 0), other=-1)
    return inside & (((words >> (ids % 32)) & 1) != 0)


@triton.jit
def mask_of(integers_ptr, row, num_masks):
    """The row of the masks that holds for a row of logits, or -1."""
    mask = tl.load(integers_ptr + row * INTEGERS + MASK)
    return tl.where(mask < num_masks, mask, -1)


@triton.jit
def logits_of(logits_ptr, adjusted_ptr, integers_ptr, row, stride, vocab_size):
    """Where the logits of a row stand that are chosen from."""
    place = tl.load(integers_ptr + row * INTEGERS + ADJUSTED).to(tl.int64)
    return adjusted_ptr + place * vocab_size if place >= 0 else logits_ptr + row.to(tl.int64) * stride
