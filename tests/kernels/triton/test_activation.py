"""The gated activation: right by the float64 oracle, and at the ends of the number line."""

import math

import pytest
import torch

from tests.kernels.factories import assert_close, random
from tests.kernels.triton.factories import DTYPES, TOLERANCE
from trunkline.kernels.interface import Activation
from trunkline.kernels.reference import ReferenceKernels
from trunkline.kernels.triton import activation
from trunkline.kernels.triton.activation import gated_mul

SHAPES = [(1, 1), (3, 33), (17, 128), (9, 1030), (2, 5000)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_equals_the_oracle(activation: Activation, rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = random(rows, 2 * width, std=4).to(dtype)
    out, oracle = (torch.full((rows, width), math.nan, dtype=of) for of in (dtype, torch.float64))
    gated_mul(gate_up, activation, out=out)
    ReferenceKernels(torch.float64).gated_mul(gate_up.double(), activation, out=oracle)
    assert_close(out, oracle, TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_extremes(activation: Activation) -> None:
    gate = torch.tensor([[0.0, -0.0, 1e-30, 20.0, -20.0, -87.5, -1e4, 88.5, 1e4, math.nan]])
    out = torch.empty(1, 10)
    gated_mul(torch.cat([gate, torch.ones_like(gate)], dim=1), activation, out=out)
    expected = torch.empty(1, 10, dtype=torch.float64)
    ReferenceKernels(torch.float64).gated_mul(
        torch.cat([gate, torch.ones_like(gate)], dim=1).double(), activation, out=expected
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes an empty grid for an error, the interpreter does not: nothing may be launched."""
    monkeypatch.setattr(activation, "_gated_mul_kernel", None)
    gated_mul(torch.empty(0, 8), "silu", out=torch.empty(0, 4))


def test_misfits_are_refused() -> None:
    with pytest.raises(AssertionError):
        gated_mul(torch.empty(2, 8), "silu", out=torch.empty(2, 8))
    with pytest.raises(AssertionError):
        gated_mul(torch.empty(2, 16)[:, ::2], "silu", out=torch.empty(2, 4))
