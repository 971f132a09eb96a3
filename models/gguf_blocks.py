"""GGUF's blocks as small integers with scales, for kernels that multiply by them as they are stored: no file, no torch.

    blocks = unpack("Q4_1", stored)       # uint8 [B, 20], block after block
    blocks.value                          # int8 [B, 32]: 0 … 15
    blocks.scale, blocks.offset           # float32 [B, 1] each; weight = scale * value + offset

    type         group  bits  value       scale       offset
    Q4_0, Q4_1     32     4     0 … 15    d           -8 d, m
    Q5_0, Q5_1     32     8   -16 … 15    d           none, m       Q5_1: 0 … 31
    Q8_0           32     8  -128 … 127   d           none
    Q4_K, Q5_K     32   4, 8    0 … 31    d * s_g     -dmin * m_g   blocks of 256: 8 groups; Q4_K: 0 … 15
    Q6_K           16     8   -32 … 31    d * s_g     none          blocks of 256: 16 groups

d, dmin and m are float16; s_g and m_g have 6 bits, Q6_K's s_g 8. So scales and products are exact in float32, and `scale * value + offset`
rounds where `gguf.quants` does: the same floats, except that Q4_0's 0 may be -0 there.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and their meaning, dequantize_row_*, ggml-quants.c beside it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Blocks(NamedTuple):
    """What kernels.quantized.QuantizedMatrix is made of, for B blocks or for a whole matrix of N rows.

    value    int8 [B, block], or [N, K]
    scale    float32 [B, block / group], or [N, K / group]
    offset   the same; None: 0 everywhere
    """

    value: "np.ndarray"
    scale: "np.ndarray"
    offset: "np.ndarray | None"


class Packing(NamedTuple):
    """What all blocks of a type have in common; `group` and `bits` are QuantizedMatrix's."""

    group: int
    bits: int
    has_offset: bool
    unpack: "Callable[[np.ndarray], Blocks]"


def unpack(kind: str, stored: "np.ndarray") -> Blocks:
    """The blocks `stored`, uint8 [B, bytes of a block], B at least 1, of the ggml type `kind`, one of PACKINGS."""
    return PACKINGS[kind].unpack(stored)


def _q4_0(stored: "np.ndarray") -> Blocks:
    """d, 16 bytes of values."""
    d = _halves(stored[:, :2])
    return Blocks(_nibbles(stored[:, 2:], 16), d, -8 * d)


def _q4_1(stored: "np.ndarray") -> Blocks:
    """d, m, 16 bytes of values."""
    return Blocks(_nibbles(stored[:, 4:], 16), _halves(stored[:, :2]), _halves(stored[:, 2:4]))


def _q5_0(stored: "np.ndarray") -> Blocks:
    """d, 4 bytes of fifth bits, 16 of the others."""
    value = _with_high(_nibbles(stored[:, 6:], 16), _bits(stored[:, 2:6]), below=16)
    return Blocks(value, _halves(stored[:, :2]), None)


def _q5_1(stored: "np.ndarray") -> Blocks:
    """d, m, 4 bytes of fifth bits, 16 of the others."""
    value = _with_high(_nibbles(stored[:, 8:], 16), _bits(stored[:, 4:8]))
    return Blocks(value, _halves(stored[:, :2]), _halves(stored[:, 2:4]))


def _q8_0(stored: "np.ndarray") -> Blocks:
    """d, 32 bytes of values."""
    import numpy as np

    return Blocks(stored[:, 2:].view(np.int8), _halves(stored[:, :2]), None)


def _q4_k(stored: "np.ndarray") -> Blocks:
    """d, dmin, 12 bytes of s_g and m_g, 128 of values: 32 low halves, then 32 high ones."""
    return Blocks(_nibbles(stored[:, 16:], 32), *_scales_and_minima(stored))


def _q5_k(stored: "np.ndarray") -> Blocks:
    """d, dmin, 12 bytes of s_g and m_g, 32 of fifth bits, of which bit g is group g's, 128 of the others."""
    import numpy as np

    groups = np.arange(8, dtype=np.uint8)[:, None]
    high = stored[:, None, 16:48] >> groups & 1  # [B, 8, 32]
    return Blocks(_with_high(_nibbles(stored[:, 48:], 32), high), *_scales_and_minima(stored))


def _q6_k(stored: "np.ndarray") -> Blocks:
    """128 bytes of low halves, 64 of fifth and sixth bits, 16 of s_g, d; of 128 values, the first 64 are in 64 bytes' low halves."""
    import numpy as np

    pairs = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = stored[:, 128:192].reshape(-1, 2, 1, 32) >> pairs & 3  # [B, 2, 4, 32]
    scale = _halves(stored[:, 208:]) * stored[:, 192:208].view(np.int8)
    return Blocks(_with_high(_nibbles(stored[:, :128], 64), high, below=32), scale, None)


PACKINGS = {
    "Q4_0": Packing(32, 4, True, _q4_0),
    "Q4_1": Packing(32, 4, True, _q4_1),
    "Q5_0": Packing(32, 8, False, _q5_0),
    "Q5_1": Packing(32, 8, True, _q5_1),
    "Q8_0": Packing(32, 8, False, _q8_0),
    "Q4_K": Packing(32, 4, True, _q4_k),
    "Q5_K": Packing(32, 8, True, _q5_k),
    "Q6_K": Packing(16, 8, False, _q6_k),
}


def _halves(stored: "np.ndarray") -> "np.ndarray":
    """float16 numbers [B, 2 n] bytes -> float32 [B, n]."""
    import numpy as np

    return np.ascontiguousarray(stored).view("<f2").astype(np.float32)


def _nibbles(stored: "np.ndarray", run: int) -> "np.ndarray":
    """Two values a byte [B, n] -> int8 [B, 2 n], 0 … 15: the low halves of `run` bytes, their high halves, and so on."""
    import numpy as np

    packed = stored.reshape(len(stored), -1, run)
    value = np.empty((len(stored), packed.shape[1], 2, run), np.uint8)
    np.bitwise_and(packed, 0x0F, out=value[:, :, 0])
    np.right_shift(packed, 4, out=value[:, :, 1])
    return value.reshape(len(stored), -1).view(np.int8)


def _bits(stored: "np.ndarray") -> "np.ndarray":
    """Eight bits a byte, the lowest first: [B, n] -> uint8 [B, 8 n]."""
    import numpy as np

    return np.unpackbits(stored, axis=1, bitorder="little")


def _with_high(low: "np.ndarray", high: "np.ndarray", *, below: int = 0) -> "np.ndarray":
    """int8: low + 16 high - below, in the shape of `low`."""
    import numpy as np

    return low + (high.reshape(low.shape) << 4).view(np.int8) - np.int8(below)


def _scales_and_minima(stored: "np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
    """Scales and offsets, float32 [B, 8] each, from the first 16 bytes of Q4_K or Q5_K.

    Of the 12 bytes behind d and dmin, the first four are s_0 … s_3, the next m_0 … m_3, 6 bits each; the last are the low halves of s_4 … s_7
    and, in their high halves, of m_4 … m_7, whose upper two bits are those of the first eight bytes.
    """
    import numpy as np

    scales, minima, rest = np.split(stored[:, 4:16], 3, axis=1)
    s = np.concatenate([scales & 0x3F, rest & 0x0F | scales >> 6 << 4], axis=1)
    m = np.concatenate([minima & 0x3F, rest >> 4 | minima >> 6 << 4], axis=1)
    return _halves(stored[:, :2]) * s, _halves(stored[:, 2:4]) * -m.astype(np.float32)
