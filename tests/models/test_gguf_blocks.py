"""Blocks as integers: the floats that the gguf package makes of the same bytes, for any bytes."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.k_quants import quantize
from trunkline.kernels.quantized import QuantizedMatrix
from trunkline.models.gguf_blocks import PACKINGS, unpack

KINDS = list(PACKINGS)


def as_matrix(kind: str, stored: np.ndarray) -> QuantizedMatrix:
    """Each block is a row."""
    value, scale, offset = unpack(kind, stored)
    packing = PACKINGS[kind]
    assert (offset is not None) == packing.has_offset
    parts = [None if part is None else torch.from_numpy(np.ascontiguousarray(part)) for part in (value, scale, offset)]
    assert parts[0] is not None and parts[1] is not None
    return QuantizedMatrix(parts[0], parts[1], parts[2], packing.group, packing.bits)


def library(kind: str, stored: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 70))
def test_any_bytes_are_what_the_library_makes_of_them(kind: str, seed: int, count: int) -> None:
    """To the bit, but that Q4_0's zeros may be negative there; and not finite in the same blocks."""
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    stored = np.random.default_rng(seed).integers(0, 256, (count, num_bytes), np.uint8)
    expected = library(kind, stored)
    with np.errstate(all="ignore"):
        matrix = as_matrix(kind, stored)
    assert matrix.value.dtype == torch.int8 and matrix.scale.dtype == torch.float32
    finite = np.isfinite(expected).all(axis=1)
    numbers = [matrix.scale] if matrix.offset is None else [matrix.scale, matrix.offset]
    np.testing.assert_array_equal(torch.cat(numbers, dim=1).isfinite().all(dim=1).numpy(), finite)
    ours = matrix.dequantize().numpy()
    np.testing.assert_array_equal(ours[finite], expected[finite])
    if kind != "Q4_0":
        np.testing.assert_array_equal(ours[finite].view(np.uint32), expected[finite].view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_back_as_closely_as_their_bits_allow(kind: str) -> None:
    weights = np.random.default_rng(1).standard_normal((40, 512), np.float32)
    stored = quantize(weights, kind)
    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    matrix = as_matrix(kind, stored.reshape(-1, num_bytes))
    assert matrix.shape == (40 * 512 // block, block) and matrix.scale.shape[1] == block // matrix.group
    np.testing.assert_array_equal(matrix.dequantize().numpy().reshape(40, 512), library(kind, stored))
    error = np.abs(matrix.dequantize().numpy().reshape(40, 512) - weights).max()
    assert error < {"Q4": 0.4, "Q5": 0.2, "Q6": 0.1, "Q8": 0.02}[kind[:2]]


@pytest.mark.parametrize("kind", KINDS)
def test_four_bits_are_counted_from_zero(kind: str) -> None:
    """What kernels rely on."""
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    with np.errstate(all="ignore"):
        value = unpack(kind, np.random.default_rng(2).integers(0, 256, (999, num_bytes), np.uint8)).value
    if PACKINGS[kind].bits == 4:
        assert (value.min(), value.max()) == (0, 15)
    else:
        assert PACKINGS[kind].bits == 8


def test_the_halves_of_a_byte_by_hand() -> None:
    """Q4_1: d = 0.5, m = -2; byte 0 holds values 0 and 16, byte 15 values 15 and 31."""
    stored = np.zeros((1, 20), np.uint8)
    stored[0, :4] = np.array([0.5, -2], "<f2").view(np.uint8)
    stored[0, 4], stored[0, 19] = 0x31, 0xF7
    weights = as_matrix("Q4_1", stored).dequantize()[0].tolist()
    assert (weights[0], weights[16], weights[15], weights[31]) == (-1.5, -0.5, 1.5, 5.5)
    assert set(weights[1:15]) == {-2.0}
