"""Gumbel noise of tokens, the same as that of workers/noise.py: Philox-4x32-10 keyed by seed, position and token id.

In float64, which costs little beside the rest, so that a GPU draws the tokens that a CPU draws.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import math

import triton
import triton.language as tl

_HALF_STEP = 2.0**-33  # half the distance of two uniform numbers
# How far apart two tokens' noises can be, rounded up: a token that trails the likeliest by more is never drawn.
GUMBEL_SPAN = tl.constexpr(math.log(-math.log(_HALF_STEP)) - math.log(-math.log1p(-_HALF_STEP)) + 1e-6)


@triton.jit
def gumbel(seed, position, first_id, BLOCK: tl.constexpr):
    """Noise of tokens first_id … first_id + BLOCK - 1, float64 [BLOCK].

    seed      int64
    position  int32, read as uint32
    first_id  int32, a multiple of 4
    """
    counters = first_id // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = tl.philox(seed, counters, position, 0, 0)  # token t reads word t % 4 of block t // 4
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([BLOCK])
    uniform = (words.to(tl.float64) + 0.5) * 2.0**-32
    return -tl.log(-tl.log(uniform))
