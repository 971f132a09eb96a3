"""Matrices of small integers: what GGUF files hold, what int8 makes of any matrix, and their plain-torch meaning.

    matrix = quantize_int8(weight)          # or what models/gguf_blocks.py reads from a file
    matrix.dequantize()                     # float32 [N, K]: the oracle of every kernel that multiplies by it

How kernels pack such a matrix is their affair (`Kernels.pack_linear` takes it beside plain tensors). Those that keep the integers do
so in the smallest `IntegerFormat` that holds all of a stack exactly.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

INT8_MAX = 127
CHUNK_ELEMENTS = 2**15  # quantized at a time, in NumPy: torch's threads would wait longer for each other than compute
LONGEST_GROUP = 512  # inputs, unless a whole channel shares a scale: sums of 32 bits are exact up to here (cpu_src/quantized_layout.h)
GROUP_MULTIPLE = 4  # STEP there
CENTRE = 8  # of values 0 … 15


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [N, K] in groups along K:    weight[n, k] = scale[n, k // group] * value[n, k] + offset[n, k // group]

    value    int8 [N, K], one number a byte; of `bits` = 4 each is 0 … 15
    scale    float32 [N, K / group]
    offset   float32 [N, K / group]; None: 0 everywhere
    group    inputs that share a scale; divides K, and is K where a whole output channel shares one
    bits     4 or 8: how wide the values are at most
    """

    value: Tensor
    scale: Tensor
    offset: Tensor | None
    group: int
    bits: int

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def __len__(self) -> int:
        return len(self.value)

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        grouped = self.value.float().unflatten(1, (-1, self.group)) * self.scale[..., None]
        if self.offset is not None:
            grouped += self.offset[..., None]
        return grouped.flatten(1)


class Offsets(IntEnum):
    """What stands for the offsets of a packed matrix; enum offsets in cpu_src/quantized_layout.h."""

    NONE = 0
    STORED = 1
    CENTRED = 2  # not stored: every one is -8 * scale, and values are 0 … 15, as in GGUF's Q4_0


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """How packed integers are stored.

    bits         of a value, 4 or 8
    group        inputs that share a scale: a multiple of GROUP_MULTIPLE up to LONGEST_GROUP, or all
    scale_dtype  of scales and offsets: float16 if it holds every one of them exactly, or float32
    offsets      see Offsets
    """

    bits: int
    group: int
    scale_dtype: torch.dtype
    offsets: Offsets

    @classmethod
    def holding(cls, matrices: Sequence[QuantizedMatrix]) -> "IntegerFormat":
        """The smallest that holds every number of these matrices, of one K, exactly.

        Raises ValueError if groups have no common divisor that could be stored.
        """
        k = matrices[0].shape[1]
        group = math.gcd(*(matrix.group for matrix in matrices))
        if group < k and group > LONGEST_GROUP:
            group = math.gcd(group, LONGEST_GROUP)
        if group < k and group % GROUP_MULTIPLE:
            groups = sorted({matrix.group for matrix in matrices})
            raise ValueError(
                f"{k} inputs are in groups of {groups}; they must be multiples of {GROUP_MULTIPLE}, or one group of all inputs."
            )
        offsets = _offsets_of(matrices)
        stored = [matrix.scale for matrix in matrices]
        if offsets is Offsets.STORED:
            stored += [matrix.offset for matrix in matrices if matrix.offset is not None]
        half = all(torch.equal(numbers.half().float(), numbers) for numbers in stored)
        bits = max(matrix.bits for matrix in matrices)
        return cls(bits, group, torch.float16 if half else torch.float32, offsets)


def _offsets_of(matrices: Sequence[QuantizedMatrix]) -> Offsets:
    if all(matrix.offset is None for matrix in matrices):
        return Offsets.NONE
    if all(matrix.offset is not None and torch.equal(matrix.offset, -CENTRE * matrix.scale) for matrix in matrices):
        return Offsets.CENTRED
    return Offsets.STORED


def dequantized(weights: Iterable[Tensor | QuantizedMatrix]) -> list[Tensor]:
    """Plain tensors as they are, the others in float32: for whoever can't multiply by integers."""
    return [weight.dequantize() if isinstance(weight, QuantizedMatrix) else weight for weight in weights]


def quantize_int8(weight: Tensor) -> QuantizedMatrix:
    """Per output channel, symmetric, to nearest: the largest magnitude of each row of `weight` [N, K] becomes 127."""
    value, scale = np.empty(weight.shape, np.int8), np.empty((len(weight), 1), np.float32)
    step = max(1, CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        rows = weight[part].float().numpy()
        largest = np.maximum(rows.max(axis=1, keepdims=True), -rows.min(axis=1, keepdims=True))
        scale[part] = largest / np.float32(INT8_MAX)
        quotients = rows / np.where(scale[part] > 0, scale[part], np.float32(1))
        value[part] = np.rint(quotients, out=quotients).clip(-INT8_MAX, INT8_MAX)  # a scale near 0 is rounded itself
    return QuantizedMatrix(torch.from_numpy(value), torch.from_numpy(scale), None, group=weight.shape[1], bits=8)
