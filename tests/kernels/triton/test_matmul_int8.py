"""Matmul over int8 weights, with activations in floats and in int8: right by float64."""

import math

import pytest
import torch

from tests.kernels.factories import assert_close, random
from tests.kernels.triton.factories import DTYPES, TOLERANCE
from trunkline.kernels.triton.matmul_int8 import ROWS_TILES, TILES, matmul_int8, matmul_int8_rows, reference, specs
from trunkline.kernels.triton.quantize_rows import quantize_rows
from trunkline.kernels.triton.spec import ARCHS

SHAPES = [(1, 80, 16), (5, 208, 272), (17, 48, 256), (33, 144, 112), (70, 96, 160)]  # M, N, K


def make_weight(n, k, seed=0):
    """(weight, scales)"""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8),
        torch.rand(n, generator=generator) / 100 + 0.001,
    )


def multiply(x, weight, scales, bias=None):
    out = torch.full((len(x), len(weight)), math.nan, dtype=x.dtype)
    matmul_int8(x, weight, scales, bias, out=out)
    return out


def quantized(x):
    """(codes, scales)"""
    codes, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
    quantize_rows(x, out=codes, scales=scales)
    return codes, scales


def multiply_rows(activations, weight, scales, bias=None, *, dtype=torch.float32):
    codes, row_scales = activations
    out = torch.full((len(codes), len(weight)), math.nan, dtype=dtype)
    matmul_int8_rows(codes, row_scales, weight, scales, bias, out=out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_float_activations(m, n, k, dtype) -> None:
    weight, scales = make_weight(n, k)
    x, bias = random(m, k).to(dtype), random(n, seed=1).to(dtype)
    assert_close(multiply(x, weight, scales, bias), reference(x, weight, scales, bias), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_int8_activations(m, n, k, dtype) -> None:
    """Against the quantized activations nothing but the output's rounding; against the true ones, theirs."""
    weight, scales = make_weight(n, k)
    x, bias = random(m, k).to(dtype), random(n, seed=1).to(dtype)
    codes, row_scales = quantized(x)
    out = multiply_rows((codes, row_scales), weight, scales, bias, dtype=dtype)
    assert_close(out, reference(codes.double() * row_scales[:, None], weight, scales, bias), TOLERANCE[dtype])
    assert_close(out, reference(x, weight, scales, bias), 2e-2)


def test_sums_of_int8_products_are_exact() -> None:
    """The largest that there are, each way; a float16 or bfloat16 sum would round them."""
    codes = torch.full((2, 4096), 127, dtype=torch.int8)
    weight = torch.full((16, 4096), -128, dtype=torch.int8)
    weight[3, 7] = 127
    out = multiply_rows((codes, torch.ones(2)), weight, torch.ones(16))
    expected = (codes.long() @ weight.long().T).float()
    assert torch.equal(out, expected) and out[0, 0] == -4096 * 127 * 128


@pytest.mark.parametrize("rows", [(1, 16), (17, 64)], ids=str)
def test_a_row_does_not_depend_on_the_others(rows) -> None:
    weight, scales = make_weight(48, 96)
    x = random(rows[-1], 96).bfloat16()
    together = multiply(x, weight, scales)
    together_rows = multiply_rows(quantized(x), weight, scales)
    for count in rows[:-1]:
        for some in (slice(count), slice(-count, None)):
            assert torch.equal(multiply(x[some].clone(), weight, scales), together[some])
            assert torch.equal(multiply_rows(quantized(x[some].clone()), weight, scales), together_rows[some])


def test_a_row_that_is_not_finite_stays_so_alone() -> None:
    weight, scales = make_weight(16, 32)
    x = random(3, 32)
    x[1, 4] = math.nan
    out = multiply_rows(quantized(x), weight, scales)
    assert out.isnan().all(dim=1).tolist() == [False, True, False] and out[0].isfinite().all()


def test_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.kernels.triton.matmul_int8.matmul_int8_kernel", None)
    monkeypatch.setattr("trunkline.kernels.triton.matmul_int8.matmul_int8_rows_kernel", None)
    weight, scales = make_weight(16, 32)
    assert multiply(torch.empty(0, 32), weight, scales).shape == (0, 16)
    assert multiply_rows(quantized(torch.empty(0, 32)), weight, scales).shape == (0, 16)


def test_misfits_are_refused() -> None:
    weight, scales = make_weight(48, 64)
    x, codes = torch.zeros(2, 64), torch.zeros(2, 64, dtype=torch.int8)
    with pytest.raises(AssertionError, match="weight is"):
        multiply(torch.zeros(2, 32), weight, scales)
    with pytest.raises(AssertionError, match="weight is"):
        multiply(x, weight.view(torch.uint8), scales)
    with pytest.raises(AssertionError, match="scales are"):
        multiply(x, weight, scales[:47])
    with pytest.raises(AssertionError, match="scales are"):
        multiply(x, weight, scales.half())
    with pytest.raises(AssertionError, match="multiples of 16"):
        multiply(x, weight[:40], scales[:40])
    with pytest.raises(AssertionError, match="out is"):
        matmul_int8(x, weight, scales, out=torch.empty(3, 48))
    with pytest.raises(AssertionError, match=r"x is torch\.float32, out torch\.float16"):
        matmul_int8(x, weight, scales, out=torch.empty(2, 48).half())
    with pytest.raises(AssertionError, match="not int8"):
        multiply_rows((x, torch.ones(2)), weight, scales)
    with pytest.raises(AssertionError):
        multiply_rows((codes, torch.ones(3)), weight, scales)
    with pytest.raises(AssertionError):
        multiply(x, weight, scales, torch.zeros(48).half())


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_shipped(arch) -> None:
    """Two types of activations for each tile, and float32's tile."""
    assert len(specs(arch)) == len({spec.name for spec in specs(arch)}) == 2 * 7
    shipped = {tuple(spec.config.blocks.values()) for spec in specs(arch)}
    tiles = [*TILES[arch].values(), *ROWS_TILES[arch].values()]
    assert shipped == {tuple(config.blocks.values()) for config in tiles}
