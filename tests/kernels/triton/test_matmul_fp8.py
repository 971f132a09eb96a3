"""Matmul over float8 weights with every kind of scales, activations in floats and in float8: right by float64."""

import math

import pytest
import torch

from tests.kernels.factories import assert_close, random
from tests.kernels.triton.factories import DTYPES, TOLERANCE
from trunkline.kernels.triton import matmul_fp8 as module
from trunkline.kernels.triton.matmul_fp8 import (
    BLOCK,
    ROWS_TILES,
    TILES,
    Fp8Weight,
    dequantize,
    matmul_fp8,
    matmul_fp8_rows,
    reference,
    specs,
)
from trunkline.kernels.triton.quantize_rows import quantize_rows
from trunkline.kernels.triton.spec import ARCHS

SHAPES = [(1, 80, 16), (5, 208, 272), (17, 48, 256), (33, 144, 400), (70, 96, 160)]  # M, N, K
KINDS = ("tensor", "channel", "block")
CASES = [  # each type of activations with each kind of scales
    (*shape, dtype, KINDS[(first + second) % 3])
    for first, shape in enumerate(SHAPES)
    for second, dtype in enumerate(DTYPES)
]


def make_weight(n, k, kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = {"tensor": (1,), "channel": (n,), "block": (math.ceil(n / 128), math.ceil(k / 128))}[kind]
    scales = torch.exp(1.5 * torch.randn(shape, generator=generator)) / 1000  # far apart: a wrong one shows
    data = torch.randn(n, k, generator=generator) * 2.0 ** torch.randint(-9, 6, (n, k), generator=generator)
    return Fp8Weight(data=data.to(torch.float8_e4m3fn), scales=scales)


def multiply(x, weight, bias=None):
    out = torch.full((len(x), len(weight.data)), math.nan, dtype=x.dtype)
    matmul_fp8(x, weight, bias, out=out)
    return out


def quantized(x):
    """(codes, scales)"""
    codes, scales = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x))
    quantize_rows(x, out=codes, scales=scales)
    return codes, scales


def multiply_rows(activations, weight, bias=None, *, dtype=torch.float32):
    codes, row_scales = activations
    out = torch.full((len(codes), len(weight.data)), math.nan, dtype=dtype)
    matmul_fp8_rows(codes, row_scales, weight, bias, out=out)
    return out


@pytest.mark.parametrize(("m", "n", "k", "dtype", "kind"), CASES)
def test_float_activations(m, n, k, dtype, kind) -> None:
    weight = make_weight(n, k, kind)
    x, bias = random(m, k).to(dtype), random(n, seed=1).to(dtype)
    assert_close(multiply(x, weight, bias), reference(x, weight, bias), TOLERANCE[dtype])


@pytest.mark.parametrize(("m", "n", "k", "dtype", "kind"), CASES)
def test_float8_activations(m, n, k, dtype, kind) -> None:
    """Against the quantized activations nothing but the output's rounding; against the true ones, theirs."""
    weight = make_weight(n, k, kind)
    x, bias = random(m, k).to(dtype), random(n, seed=1).to(dtype)
    codes, row_scales = quantized(x)
    out = multiply_rows((codes, row_scales), weight, bias, dtype=dtype)
    exact = codes.float().double() * row_scales[:, None]
    assert_close(out, reference(exact, weight, bias), TOLERANCE[dtype])
    assert_close(out, reference(x, weight, bias), 7e-2)


def test_every_code_is_decoded_exactly() -> None:
    """All 254 finite numbers, subnormals and both zeros too, by a matmul with the identity."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)
    weight = Fp8Weight(data=codes.view(torch.float8_e4m3fn), scales=torch.ones(1))
    for dtype in DTYPES:
        assert torch.equal(multiply(torch.eye(16, dtype=dtype), weight).T.float(), weight.data.float())


def test_blocks_by_hand() -> None:
    """The scale of output n and input k is scales[n // 128, k // 128], at the edges too."""
    scales = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    weight = Fp8Weight(data=torch.ones(144, 272).to(torch.float8_e4m3fn), scales=scales)
    for n, k, scale in [(0, 0, 1), (127, 127, 1), (127, 128, 2), (128, 127, 8), (143, 255, 16), (143, 271, 32)]:
        assert dequantize(weight)[n, k] == scale
        x = torch.zeros(1, 272)
        x[0, k] = 1
        assert multiply(x, weight)[0, n] == scale


@pytest.mark.parametrize(("rows", "kind"), [((1, 16), "channel"), ((17, 64), "block")], ids=str)
def test_a_row_does_not_depend_on_the_others(rows, kind) -> None:
    weight = make_weight(48, 144, kind)
    x = random(rows[-1], 144).bfloat16()
    together, together_rows = multiply(x, weight), multiply_rows(quantized(x), weight)
    for count in rows[:-1]:
        for some in (slice(count), slice(-count, None)):
            assert torch.equal(multiply(x[some].clone(), weight), together[some])
            assert torch.equal(multiply_rows(quantized(x[some].clone()), weight), together_rows[some])


def test_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.kernels.triton.matmul_fp8.matmul_fp8_kernel", None)
    monkeypatch.setattr("trunkline.kernels.triton.matmul_fp8.matmul_fp8_rows_kernel", None)
    weight = make_weight(16, 32, "tensor")
    assert multiply(torch.empty(0, 32), weight).shape == (0, 16)
    assert multiply_rows(quantized(torch.empty(0, 32)), weight).shape == (0, 16)


def test_misfits_are_refused(monkeypatch) -> None:
    weight = make_weight(144, 272, "block")
    data, scales, x = weight.data, weight.scales, torch.zeros(2, 272)
    with pytest.raises(AssertionError, match=r"scales \(3, 2\) must be \(1,\), \(144,\) or \(2, 3\)"):
        Fp8Weight(data=data, scales=scales.T.contiguous())
    with pytest.raises(AssertionError, match=r"scales \(2,\) must be"):
        Fp8Weight(data=data, scales=scales[:, 0].clone())
    with pytest.raises(AssertionError, match="scales are"):
        Fp8Weight(data=data, scales=scales.bfloat16())
    with pytest.raises(AssertionError, match="data is"):
        Fp8Weight(data=data.view(torch.uint8), scales=scales)
    with pytest.raises(AssertionError, match="multiples of 16"):
        Fp8Weight(data=data[:40, :40].contiguous(), scales=torch.ones(1))
    with pytest.raises(AssertionError, match="x has 256 columns, the weights 272 inputs"):
        multiply(torch.zeros(2, 256), weight)
    with pytest.raises(AssertionError, match="out is"):
        matmul_fp8(x, weight, out=torch.empty(2, 128))
    with pytest.raises(AssertionError, match=r"x is torch\.float32, out torch\.float16"):
        matmul_fp8(x, weight, out=torch.empty(2, 144).half())
    with pytest.raises(AssertionError, match="not float8_e4m3fn"):
        multiply_rows((x, torch.ones(2)), weight)
    with pytest.raises(AssertionError):
        multiply_rows((x.to(torch.float8_e4m3fn), torch.ones(1)), weight)
    with pytest.raises(AssertionError):
        multiply(x, weight, torch.zeros(143))
    monkeypatch.setattr(module, "arch_of", lambda device: 80)
    with pytest.raises(AssertionError, match="sm_80 multiply no float8"):
        multiply_rows((x.to(torch.float8_e4m3fn), torch.ones(2)), weight)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_shipped(arch) -> None:
    """Two kinds of scales for two types of activations of each tile, and for float32's tile."""
    assert len(specs(arch)) == len({spec.name for spec in specs(arch)}) == (14 if arch == 80 else 28)
    shipped = {tuple(spec.config.blocks.values()) for spec in specs(arch)}
    tiles = [*TILES[arch].values(), *ROWS_TILES.get(arch, {}).values()]
    assert shipped == {tuple(config.blocks.values()) for config in tiles}
    for config in tiles:
        assert BLOCK % config.blocks["BLOCK_N"] == BLOCK % config.blocks["BLOCK_K"] == 0
