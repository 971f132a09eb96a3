"""Rows rounded to int8 and float8: within half a step, each on its own, and never a healthy row made of a NaN."""

import math

import pytest
import torch

from tests.kernels.factories import random
from tests.kernels.triton.factories import DTYPES
from trunkline.kernels.triton.quantize_rows import LARGEST, quantize_rows, reference, specs

CODES = list(LARGEST)


def quantize(x, dtype):
    codes = torch.full(x.shape, 77, dtype=torch.int8).view(dtype)
    scales = torch.full((len(x),), math.nan)
    quantize_rows(x, out=codes, scales=scales)
    return codes, scales


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (3, 1040), (2, 2064)], ids=str)
def test_close_to_what_it_stands_for(shape, dtype, code) -> None:
    x = (random(*shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(dtype)
    codes, scales = quantize(x, code)
    ours, oracle = codes.double() * scales[:, None], x.double()
    largest = oracle.abs().amax(dim=1, keepdim=True)
    assert torch.allclose(scales.double(), largest[:, 0] / LARGEST[code], rtol=1e-6)
    # Half a step of int8, 1/16 of an e4m3 number of 3 bits behind the point, and half of its least subnormal.
    allowed = largest / 254 if code == torch.int8 else oracle.abs() / 16 + largest / 448 / 1024
    assert ((ours - oracle).abs() <= allowed * 1.001).all()


@pytest.mark.parametrize("code", CODES, ids=str)
def test_agrees_with_the_reference(code) -> None:
    x = random(7, 96, std=5)
    codes, scales = quantize(x, code)
    expected, expected_scales = reference(x, code)
    assert torch.allclose(scales, expected_scales, rtol=1e-6)
    assert (codes.float() - expected.float()).abs().max() <= (1 if code == torch.int8 else 32)
    assert (codes.float() != expected.float()).float().mean() < 0.01


@pytest.mark.parametrize("code", CODES, ids=str)
def test_a_row_does_not_depend_on_the_others(code) -> None:
    x = random(4, 64) * torch.tensor([1.0, 1e6, 1e-6, 1.0])[:, None]
    together, scales = quantize(x, code)
    for row in range(4):
        alone, scale = quantize(x[row : row + 1], code)
        assert torch.equal(alone[0].view(torch.int8), together[row].view(torch.int8)) and scale[0] == scales[row]


@pytest.mark.parametrize("code", CODES, ids=str)
def test_rows_of_zeros_and_rows_that_are_not_finite(code) -> None:
    x = torch.zeros(4, 32)
    x[1, 5], x[2, 9], x[3, 1] = math.nan, -math.inf, 2.0
    codes, scales = quantize(x, code)
    assert scales[0] == 0 and not codes[0].float().any()
    assert scales[1].isnan() and scales[2].isnan()
    assert codes[3, 1].float() * scales[3] == 2.0


def test_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.kernels.triton.quantize_rows.quantize_rows_kernel", None)
    assert len(quantize(torch.empty(0, 32), torch.int8)[1]) == 0


def test_misfits_are_refused() -> None:
    x, scales = torch.zeros(2, 32), torch.zeros(2)
    with pytest.raises(AssertionError, match="out is"):
        quantize_rows(x, out=torch.zeros(2, 32, dtype=torch.int16), scales=scales)
    with pytest.raises(AssertionError, match=r"out \(2, 16\) must be \(2, 32\)"):
        quantize_rows(x, out=torch.zeros(2, 16, dtype=torch.int8), scales=scales)
    with pytest.raises(AssertionError):
        quantize_rows(x, out=torch.zeros(2, 32, dtype=torch.int8), scales=scales[:1])
    with pytest.raises(AssertionError, match="x is"):
        quantize_rows(torch.zeros(2, 40), out=torch.zeros(2, 40, dtype=torch.int8), scales=scales)


def test_what_is_shipped() -> None:
    assert len(specs(80)) == 3 and len({spec.name for spec in specs(90)}) == len(specs(90)) == 6
