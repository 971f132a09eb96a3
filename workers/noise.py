"""The noise of sampling: Philox-4x32-10, a counter-based generator, keyed by seed, position and token id.

Nothing here has state. The noise of a token is a pure function of three numbers, so a request's text depends on its seed
alone: not on its neighbours in the batch, not on being preempted and resumed, not on which tokens a filter left over.

    gumbel(seed=7, position=33, token_ids=np.array([5, 812]))      # float64 [2]

Triton's `tl.philox(seed, token_id // 4, position, 0, 0)` makes the same words. This file knows no logits.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64] | np.uint64
Float64 = npt.NDArray[np.float64]

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85  # added to the key after each round
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


class Words(NamedTuple):
    """Four 32-bit words of each block, in uint64 arrays (or scalars) with high halves of zero."""

    w0: UInt64
    w1: UInt64
    w2: UInt64
    w3: UInt64


def philox4x32(counter: Words, key: int) -> Words:
    """One block of four random words for each counter.

    counter   four words that broadcast together
    key       64 bits; any integer is reduced modulo 2**64

    Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.
    """
    # The rounds work in place on copies: twice as fast as expressions, which would allocate twelve arrays a round.
    c0, c1, c2, c3 = (word.copy() for word in np.broadcast_arrays(*counter))
    product_0, product_1 = np.empty_like(c0), np.empty_like(c0)
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        np.multiply(c0, _MULTIPLIER_0, out=product_0)  # 32 × 32 bits fit 64: no overflow
        np.multiply(c2, _MULTIPLIER_1, out=product_1)
        np.right_shift(product_1, _32, out=c0)
        c0 ^= c1
        c0 ^= np.uint64(k0)
        np.bitwise_and(product_1, _LOW, out=c1)
        np.right_shift(product_0, _32, out=c2)
        c2 ^= c3
        c2 ^= np.uint64(k1)
        np.bitwise_and(product_0, _LOW, out=c3)
        k0, k1 = (k0 + _WEYL_0) & 0xFFFFFFFF, (k1 + _WEYL_1) & 0xFFFFFFFF
    return Words(c0, c1, c2, c3)


def gumbel(seed: int, position: int, token_ids: npt.NDArray[np.integer]) -> Float64:
    """Standard Gumbel noise of each token, float64 [n]: `argmax(logits + temperature * noise)` samples the softmax.

    seed        the request's own; any 64-bit integer
    position    absolute position of the token to be chosen, 0 … 2**32-1
    token_ids   integers [n], ascending, 0 … 2**31-1
    """
    if len(token_ids) == 0:
        return np.empty(0)
    if len(token_ids) > token_ids[-1] // 4:  # no more blocks than tokens
        return gumbel_of_all(seed, position, int(token_ids[-1]) + 1).take(token_ids)
    words = _blocks(seed, position, (token_ids // 4).astype(np.uint64))
    return _to_gumbel(words[np.arange(len(token_ids)), token_ids % 4])


def gumbel_of_all(seed: int, position: int, vocab_size: int) -> Float64:
    """The same for tokens 0 … vocab_size-1, at a quarter of the price."""
    words = _blocks(seed, position, np.arange(-(-vocab_size // 4), dtype=np.uint64))
    return _to_gumbel(words.reshape(-1)[:vocab_size])


def _blocks(seed: int, position: int, numbers: npt.NDArray[np.uint64]) -> Float64:
    """Words of blocks (number, position, 0, 0), [n, 4], as floats: token t reads word t % 4 of block t // 4."""
    words = philox4x32(Words(numbers, np.uint64(position), np.uint64(0), np.uint64(0)), seed)
    blocks = np.empty((len(numbers), 4))
    for lane, word in enumerate(words):
        blocks[:, lane] = word
    return blocks


def _to_gumbel(words: Float64) -> Float64:
    """-log(-log(u)), in place. Word w stands for the middle of its interval [w, w+1) / 2**32, which is never 0 or 1."""
    words += 0.5
    words *= 2.0**-32
    np.negative(np.log(words, out=words), out=words)
    return np.negative(np.log(words, out=words), out=words)


# How far apart two tokens' noises can be. A token that trails the likeliest by more is never chosen.
GUMBEL_SPAN = float(np.ptp(_to_gumbel(np.array([0.0, 2.0**32 - 1])))) + 1e-9
